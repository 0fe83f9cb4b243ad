"""The models a server offers: the one that is loaded, and one more id for each script of forced legs.

It knows dialects, scripts and sampling defaults, and nothing of runs. A forced model is the loaded model
doing all its work, with each sampled token replaced by what a script says: leg n of a conversation takes line
n of the script.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.messages import ModelInfo, Sampling
from protocol.dialects.base import Dialect, RenderingError
from protocol.errors import RequestError
from protocol.wire import Create, Item, parse_items


class ScriptError(Exception):
    """A script of forced legs that cannot be used; the message says file, line and reason."""


class Model:
    """One model id: a dialect, the limits of what is loaded, and perhaps a script. Shared by all runs."""

    def __init__(
        self,
        model_id: str,
        info: ModelInfo,
        dialect: Dialect,
        *,
        defaults: Sampling,
        longest_leg: int | None = None,
        script: Sequence[Sequence[Item]] | None = None,
    ) -> None:
        self.id = model_id
        self.info = info
        self.dialect = dialect
        self.turn_start = dialect.tokenize(dialect.turn_start())
        self.longest_leg = longest_leg  # tokens, where a request has no limit of its own: models may ramble
        self._defaults = defaults
        self._script = script
        self._stop = list(dialect.stop_tokens[:1])
        turn_end = dialect.tokenize(dialect.turn_end(-1))
        self.max_input = info.max_context - len(turn_end) - len(self.turn_start) - 1
        """Tokens of input that leave room for closing a turn, opening the next, and one sampled token."""

    @property
    def max_context(self) -> int:
        """Tokens that a conversation can have, sampled ones included."""
        return self.info.max_context

    @property
    def forced(self) -> bool:
        """Whether what it says comes from a script."""
        return self._script is not None

    def sampling(self, request: Create) -> Sampling:
        """How this request samples; what it leaves open is what the checkpoint recommends. `seed` must be
        set.
        """

        def chosen(name: str) -> Any:
            value = getattr(request, name)
            return getattr(self._defaults, name) if value is None else value

        return Sampling(
            temperature=chosen("temperature"),
            top_p=chosen("top_p"),
            top_k=chosen("top_k"),
            min_p=chosen("min_p"),
            presence_penalty=chosen("presence_penalty"),
            frequency_penalty=chosen("frequency_penalty"),
            repetition_penalty=self._defaults.repetition_penalty,
            seed=chosen("seed"),
        )

    def forced_turn(self, turn: int) -> list[int] | None:
        """The tokens that a script makes the model say in its `turn`-th turn (from 0); None without a script.

        After the script's last line it says nothing: only its stop token.
        """
        if self._script is None:
            return None
        if turn >= len(self._script):
            return self._stop
        return self.dialect.tokenize(self.dialect.sampled(self._script[turn]))

    def describe(self) -> dict[str, Any]:
        """As an entry of `/v1/models`; what is beyond id, object, created and owned_by is ours."""
        return {
            "id": self.id,
            "object": "model",
            "created": 0,
            "owned_by": "fermata",
            "forced": self.forced,
            "dialect": self.dialect.name,
            "context": self.max_context,
            "parameters": self.info.parameters,
            "architecture": self.info.architecture,
            "runs_on": self.info.path,
            "simulated": self.info.simulated,
            "device": self.info.device,
            "dtype": self.info.dtype,
        }


def generation_config(folder: Path) -> dict[str, Any]:
    """What a checkpoint recommends for generation; empty if it recommends nothing."""
    try:
        config: dict[str, Any] = json.loads((folder / "generation_config.json").read_bytes())
    except FileNotFoundError:
        return {}
    return config


def sampling_defaults(config: dict[str, Any]) -> Sampling:
    """How a checkpoint recommends to sample: greedy unless it says that it samples."""
    if not config.get("do_sample"):
        return Sampling()
    return Sampling(
        temperature=config.get("temperature", 1.0),
        top_p=config.get("top_p", 1.0),
        top_k=config.get("top_k", 0),
        min_p=config.get("min_p") or 0.0,
        repetition_penalty=config.get("repetition_penalty", 1.0),
    )


def load_scripts(paths: Sequence[Path]) -> dict[str, list[list[Item]]]:
    """Scripts by name (the file's, without its ending), from `.jsonl` files and folders of them.

    A line is one leg: a JSON array of output items. Raises ScriptError.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ScriptError(f"{path}: there is no such file or folder")
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    scripts: dict[str, list[list[Item]]] = {}
    for file in files:
        if file.stem in scripts:
            raise ScriptError(f"{file}: another script is called {file.stem} too")
        lines = file.read_text(encoding="utf-8").splitlines()
        scripts[file.stem] = [
            _read_leg(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()
        ]
    return scripts


def _read_leg(line: str, where: str) -> list[Item]:
    try:
        leg = json.loads(line)
    except ValueError as error:
        raise ScriptError(f"{where}: not JSON: {error}") from error
    if not isinstance(leg, list) or not all(isinstance(item, dict) for item in leg):
        raise ScriptError(f"{where}: a leg is a JSON array of output items")
    # Scripts leave out what an output item has and means nothing here.
    raw = [msgspec.Raw(msgspec.json.encode({"role": "assistant", "call_id": "call", **item})) for item in leg]
    ignored: list[str] = []
    try:
        items = parse_items(raw, ignored, param="")
    except RequestError as error:
        raise ScriptError(f"{where}: {error.message}") from error
    if ignored:
        raise ScriptError(f"{where}: {ignored[0].lstrip(':')} cannot be said by a model")
    return items


def load_models(
    model_id: str, info: ModelInfo, dialect: Dialect, scripts: dict[str, list[list[Item]]]
) -> dict[str, Model]:
    """Every model id of a server: the loaded one, then `forced:NAME` for each script.

    Raises ScriptError for a script that this dialect cannot say.
    """
    config = generation_config(Path(info.folder))
    defaults = sampling_defaults(config)
    longest_leg = config.get("max_new_tokens")
    models = {model_id: Model(model_id, info, dialect, defaults=defaults, longest_leg=longest_leg)}
    for name, script in scripts.items():
        for number, leg in enumerate(script, 1):
            try:
                dialect.sampled(leg)
            except RenderingError as error:
                raise ScriptError(f"script {name}, leg {number}: {error}") from error
        forced_id = f"forced:{name}"
        models[forced_id] = Model(forced_id, info, dialect, defaults=defaults, script=script)
    return models
