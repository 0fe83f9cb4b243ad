"""Small incremental readers of characters: free text next to marks, and the extent of a JSON object.

They know nothing of tokens, marks or tools. Strategy: each keeps what it needs of the past in a few
fields, so a character is looked at once, however the text is cut.
"""

from __future__ import annotations

import re

import msgspec

_ANY_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Trimmed:
    """Free text between marks, without the newline that the template writes next to a mark.

    A text of white space alone is nothing, unless `keep_blank`. `after_mark`: a first newline is not its own.
    """

    def __init__(self, *, after_mark: bool = False, keep_blank: bool = False) -> None:
        self._after_mark = after_mark
        self._begun = keep_blank
        self._held = ""

    def feed(self, text: str) -> str:
        """What of the text so far is now certain to be text."""
        text = self._held + text
        if not self._begun:
            if not text or text.isspace():
                self._held = text
                return ""
            self._begun = True
            if self._after_mark:
                text = text.removeprefix("\n")
        self._held = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")

    def end(self) -> str:
        """What still waited, if the text ends with no mark after it."""
        return self._held if self._begun else ""


class ObjectScanner:
    """Finds where a JSON object ends. It looks at brackets and strings only, and at each character once."""

    _OUTSIDE = re.compile(r'["{}\[\]]')
    _INSIDE = re.compile(r'["\\]')

    def __init__(self) -> None:
        self.in_string = False
        self._escaped = False
        self._depth = 0

    def feed(self, text: str) -> int | None:
        """The index in `text` just after the object's last bracket, None if it goes on."""
        position = 0
        if self._escaped and text:
            self._escaped = False
            position = 1
        while found := (self._INSIDE if self.in_string else self._OUTSIDE).search(text, position):
            position = found.end()
            match found[0]:
                case '"':
                    self.in_string = not self.in_string
                case "\\":
                    self._escaped = position == len(text)
                    position += 1
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        return position
        return None


def is_json_object(text: str) -> bool:
    """Whether the text is one valid JSON object. An escaped half of a surrogate pair is not valid."""
    try:
        _ANY_OBJECT.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True
