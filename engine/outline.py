"""A checkpoint without its weights: what a model's name stands for, and what config.json says of its size.

It knows no architecture and no tensor, imports no torch, and never reads a weight: whatever model has a
tokeniser and a config.json can be outlined.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DESCRIBING_FILES = ["*.json", "*.jinja", "*.model"]  # of a model on the hub
WEIGHT_FILES = ["*.safetensors"]


class ModelError(Exception):
    """The model that was asked for cannot be used; the message says why."""


class ConfigFile(dict[str, Any]):
    """What a config.json says. To ask for what it does not say is a ModelError, and so is to read none."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        try:
            says = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{folder} has no config.json: it is not a checkpoint") from None
        except ValueError as error:
            raise ModelError(f"{self.path} is not JSON: {error}") from error
        if not isinstance(says, dict):
            raise ModelError(f"{self.path} is not a JSON object")
        super().__init__(says)

    def __missing__(self, name: str) -> Any:
        raise ModelError(f"{self.path} does not say {name}")


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What has to be known of a model to keep its books and to bound its contexts."""

    architecture: str
    vocabulary: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    max_context: int  # tokens

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of one token in all layers, in bytes."""
        return 2 * self.layers * self.kv_heads * self.head_size * DTYPE_BYTES[dtype]


def resolve(model: str, *, weights: bool = True) -> Path:
    """The folder of a checkpoint, given by its path or its hub id. ModelError if there is none.

    Files of a hub's model that are not on this machine are fetched; weights only where they are asked for.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelError(f"there is no folder {model}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    files = DESCRIBING_FILES + (WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(model, allow_patterns=files))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(f"{model} is neither a folder nor a model that the hub gives: {error}") from error


def read_outline(config: ConfigFile) -> Outline:
    """What the file says of the size of things; ModelError if it does not."""
    heads = config["num_attention_heads"]
    return Outline(
        architecture=(config.get("architectures") or ["unnamed"])[0],
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        max_context=config["max_position_embeddings"],
    )
