"""A checkpoint without its weights: what its config.json says about the size of things.

It knows no architecture and no tensor, imports no torch, and never reads or fetches a weight: whatever model
has a tokeniser and a config.json can be outlined.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPE_BYTES = {"auto": 4, "float32": 4, "bfloat16": 2, "float16": 2}  # auto as on a CPU
DESCRIBING_FILES = (
    "*.json",
    "*.jinja",
    "*.model",
)  # of a model on the hub


class OutlineError(Exception):
    """There is no such checkpoint, or it does not say what it must; the message says which and what."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What has to be known of a model to keep its books and to bound its contexts."""

    folder: Path
    architecture: str
    vocabulary: int
    layers: int
    kv_heads: int
    head_size: int
    max_context: int  # tokens

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of one token in all layers, in bytes; `dtype` as in an EngineConfig."""
        return 2 * self.layers * self.kv_heads * self.head_size * DTYPE_BYTES[dtype]


def read_outline(model: str) -> Outline:
    """The outline of a checkpoint given by its folder or hub id. Raises OutlineError."""
    folder = _folder(model)
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OutlineError(f"{folder} has no config.json: it is not a checkpoint") from None
    except ValueError as error:
        raise OutlineError(f"{path} is not JSON: {error}") from error
    try:
        heads: int = config["num_attention_heads"]
        return Outline(
            folder=folder,
            architecture=(config.get("architectures") or ["unnamed"])[0],
            vocabulary=config["vocab_size"],
            layers=config["num_hidden_layers"],
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            max_context=config["max_position_embeddings"],
        )
    except KeyError as error:
        raise OutlineError(f"{path} does not say {error.args[0]}") from None


def _folder(model: str) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise OutlineError(f"there is no folder {model}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(DESCRIBING_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise OutlineError(f"{model} is neither a folder nor a model that the hub gives: {error}") from error
