"""From an EngineConfig to a decoder with its weights on a device: what runs a model is chosen here alone."""

from __future__ import annotations

import torch

from engine.checkpoint import (
    EMBEDDED_FOLDER,
    DecoderConfig,
    Weights,
    random_checkpoint,
    read_config,
    read_weights,
)
from engine.messages import EngineConfig
from engine.model import Decoder
from engine.outline import ModelError, resolve

RANDOM_PREFIX = "random:"  # of the names of models with random weights


def load(config: EngineConfig) -> tuple[Decoder, str]:
    """The decoder of `config.model`, and the folder of its tokeniser. ModelError if it cannot be used."""
    device = _device(config.device)
    shape, weights, folder = _checkpoint(config.model)
    decoder = Decoder(shape, weights, dtype=_dtype(config.dtype, device), device=device)
    weights.check_all_taken(shape)
    return decoder, folder


def _checkpoint(model: str) -> tuple[DecoderConfig, Weights, str]:
    """Shape, weights and folder of what EngineConfig.model names."""
    if model.startswith(RANDOM_PREFIX):
        seed = model.removeprefix(RANDOM_PREFIX)
        if not seed.isdecimal():
            raise ModelError(f"{model}: the seed of a random model is a number")
        return *random_checkpoint(int(seed)), str(EMBEDDED_FOLDER)
    folder = resolve(model)
    return read_config(folder), read_weights(folder), str(folder)


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ModelError("there is no CUDA device")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
