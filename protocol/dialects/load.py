"""A model's folder to its dialect: reads the files, chooses the dialect, and has it proven before anyone uses
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol.dialects.base import Dialect
from protocol.dialects.chatml import ChatMLDialect
from protocol.dialects.proof import prove
from protocol.dialects.template import ChatTemplate
from protocol.dialects.tokens import DialectError, Tokens

__all__ = ["DialectError", "load_dialect"]


def load_dialect(folder: Path) -> Dialect:
    """The dialect of the model in `folder` (tokenizer.json, tokenizer_config.json, chat_template.jinja).

    Takes some tens of milliseconds: the forms of the chat template are derived and proven. Raises
    DialectError with the reason: files that are missing or unreadable, a tokenizer or a template that this
    project cannot use soundly.
    """
    tokens = Tokens(_text(folder / "tokenizer.json"))
    config = _config(folder / "tokenizer_config.json")
    special = {key: _spelling(value) for key, value in config.items() if key.endswith("_token")}
    spelled = {key: text for key, text in special.items() if text is not None}
    if (folder / "chat_template.jinja").exists():
        source = _text(folder / "chat_template.jinja")
    elif isinstance(config.get("chat_template"), str):
        source = config["chat_template"]
    else:
        raise DialectError(f"{folder} has no chat template")
    template = ChatTemplate(source, spelled)
    dialect = ChatMLDialect(template, tokens, eos_token=spelled.get("eos_token"))
    prove(dialect, template, tokens)
    return dialect


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DialectError(f"{path} cannot be read: {error}") from error


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_text(path))
    except ValueError as error:
        raise DialectError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise DialectError(f"{path} is not a JSON object")
    return config


def _spelling(token: object) -> str | None:
    """A special token is written as a string, or as an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
