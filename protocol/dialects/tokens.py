"""A family's tokenizer, made safe: text can never become a control token, and ids come back as text piece by
piece.

It knows token ids, bytes and characters; nothing of templates, items or turns. Control tokens are all tokens
that the family added to its vocabulary (turn marks, tool marks, reserved ones).

Strategy: the tokenizer is taken apart. Control tokens are removed from a copy of it, from its vocabulary too,
so this copy cannot give their ids whatever it reads; it encodes all plain text. Between two control tokens
the family's own tokenizer works on the text in between and on nothing else, so a fragment whose neighbouring
strings are joined gets the family's ids. Back to text goes by a table of each token's bytes and an
incremental UTF-8 decoder: no token is looked at twice.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from protocol.dialects.base import Fragment

REPLACEMENT = (
    "\N{REPLACEMENT CHARACTER}".encode()
)  # for ids beyond the vocabulary: models pad their output layer


class DialectError(Exception):
    """A model's tokenizer or chat template cannot be used as it is; the text says why."""


class Tokens:
    """The tokenizer of one model. Stateless but for caches; may be used from several threads.

    `control` maps the spelling of every control token to its id.
    """

    def __init__(self, tokenizer_json: str) -> None:
        """From the text of a tokenizer.json. Raises DialectError: unreadable, or not a byte-level BPE."""
        try:
            description: dict[str, Any] = json.loads(tokenizer_json)
            self._family = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # tokenizers raises nothing narrower
            raise DialectError(f"the tokenizer cannot be read: {error}") from error
        if description["model"]["type"] != "BPE" or not _is_byte_level(description.get("decoder")):
            raise DialectError("the tokenizer is not a byte-level BPE; no other kind is supported")
        self._family.no_truncation()
        self._family.no_padding()
        self.control: dict[str, int] = {
            token["content"]: token["id"] for token in description["added_tokens"]
        }
        self.spelling = {token: text for text, token in self.control.items()}
        self._plain = _without_control_tokens(description, self.control)
        self._split = re.compile(
            "|".join(map(re.escape, sorted(self.control, key=len, reverse=True))) or "(?!)"
        )
        characters = {character: byte for byte, character in _byte_characters().items()}
        self.bytes_of = {
            token: _piece_bytes(piece, characters)
            for piece, token in self._family.get_vocab(with_added_tokens=False).items()
            if token not in self.spelling
        }

    def split(self, template_text: str) -> Fragment:
        """A template's own text as a fragment: here, and only here, a control token's spelling becomes its
        id.
        """
        fragment: Fragment = []
        position = 0
        for mark in self._split.finditer(template_text):
            fragment += [template_text[position : mark.start()], self.control[mark[0]]]
            position = mark.end()
        fragment.append(template_text[position:])
        return [part for part in fragment if part != ""]

    def spell(self, fragment: Fragment) -> str:
        """A fragment as one string, control tokens spelled out."""
        return "".join(self.spelling[part] if isinstance(part, int) else part for part in fragment)

    def encode(self, fragment: Fragment) -> list[int]:
        """Token ids. Neighbouring strings are one text; strings give no control token. Linear in the text's
        length.
        """
        ids: list[int] = []
        text: list[str] = []
        for part in fragment:
            if isinstance(part, str):
                text.append(part)
                continue
            if text:
                ids += self._encode_plain("".join(text))
                text.clear()
            ids.append(part)
        if text:
            ids += self._encode_plain("".join(text))
        return ids

    def encode_as_family(self, text: str) -> list[int]:
        """Token ids of a whole rendered string as the family's tokenizer gives them, spelled control tokens
        included.
        """
        return self._family.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the tokens, control tokens spelled out. Invalid UTF-8 becomes U+FFFD."""
        pieces = (self.bytes_of.get(token) or self.spelling.get(token, "\ufffd").encode() for token in tokens)
        return b"".join(pieces).decode(errors="replace")

    def _encode_plain(self, text: str) -> list[int]:
        # The batch call does without offsets, which halves the time of a long text.
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids


class Detokenizer:
    """Plain tokens to text, incrementally: bytes that may still become a character wait."""

    def __init__(self, tokens: Tokens) -> None:
        self._bytes_of = tokens.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, tokens: Iterable[int]) -> str:
        """The characters that these further tokens complete. An id that is no plain token counts as
        U+FFFD.
        """
        bytes_of = self._bytes_of
        return self._decoder.decode(b"".join([bytes_of.get(token, REPLACEMENT) for token in tokens]))

    def flush(self) -> str:
        """What still waits: nothing, or U+FFFD for half a character. Then it starts afresh."""
        return self._decoder.decode(b"", final=True)


def _without_control_tokens(description: dict[str, Any], control: dict[str, int]) -> Tokenizer:
    model = description["model"]
    plain = {
        **description,
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
        "model": {
            **model,
            "vocab": {piece: token for piece, token in model["vocab"].items() if piece not in control},
            "unk_token": None if model.get("unk_token") in control else model.get("unk_token"),
        },
    }
    try:
        return Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # tokenizers raises nothing narrower
        raise DialectError(f"control tokens are part of the tokenizer's merges: {error}") from error


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is not None and decoder["type"] == "Sequence":
        return [each["type"] for each in decoder["decoders"]] == ["ByteLevel"]
    return decoder is not None and decoder["type"] == "ByteLevel"


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's
    `bytes_to_unicode`).
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{byte: chr(byte) for byte in printable},
        **{byte: chr(256 + index) for index, byte in enumerate(others)},
    }


def _piece_bytes(piece: str, bytes_by_character: dict[str, int]) -> bytes:
    try:
        return bytes(bytes_by_character[character] for character in piece)
    except KeyError:
        return piece.encode()  # a piece in plain spelling: the family's decoder takes it as it stands
