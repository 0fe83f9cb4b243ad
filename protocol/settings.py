"""What a server is started with, checked. It knows neither the command line nor the environment.

Every field has one option of the same name, so that an error can name it. A `Settings` that exists is
usable: whatever can be said to be wrong without opening a port or a model is said in `__post_init__`.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from engine.messages import Pace

Device: TypeAlias = Literal["auto", "cpu", "cuda"]
Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
Lifecycle: TypeAlias = Literal["chained", "held"]
Switch: TypeAlias = Literal["on", "off"]
Rehydrate: TypeAlias = Literal["ledger", "items"]
LogFormat: TypeAlias = Literal["console", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

EMBEDDED_MODEL = Path(__file__).resolve().parent.parent / "engine" / "embedded"

# The largest request of the public service, in bytes, and room for what the largest client puts around it.
MESSAGE_LIMIT = 16 * 1024 * 1024
MESSAGE_SLACK = 64 * 1024


class SettingsError(ValueError):
    """A value that no server can be started with. `option` is how a person writes it: ``--port``."""

    def __init__(self, field_name: str, message: str) -> None:
        self.option = "--" + field_name.replace("_", "-")
        self.message = message
        super().__init__(f"{self.option}: {message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a server needs to be told. Times in seconds, sizes in bytes. Making it raises `SettingsError`."""

    host: str = "127.0.0.1"
    port: int = 8765  # 0: any free one
    model: str = str(EMBEDDED_MODEL)  # a folder or a hub id
    engine: str = "torch"  # or ``paced:decode=1000,prefill=20000``, see `pace`
    device: Device = "auto"
    dtype: Dtype = "auto"
    threads: int = 1  # of the engine: the event loop wants a core for itself
    lifecycle: Lifecycle = "chained"  # of a create that does not name one
    scripts: tuple[Path, ...] = ()  # files, or folders of files

    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: every caller is "local"
    insecure: bool = False  # a port that others can reach, without a key
    allow_origins: tuple[str, ...] = ()  # ``https://name:port`` as a browser sends it; ``*``: any

    tls_cert: Path | None = None  # a chain of certificates, PEM; then everything on the port is TLS
    tls_key: Path | None = None  # the key of the first one, PEM

    max_context: int | None = None  # tokens; None: what the checkpoint says
    kv_memory: int = 1 << 30
    max_held: int = 64  # runs that one caller may keep waiting with their KV in memory
    hold_timeout: float = 600.0  # how long a held run waits for its client
    state_dir: Path | None = None  # where Responses are stored; None: in memory, until the process ends
    prefix_cache: Switch = "on"  # whether KV of ended sequences is found again by content
    share_prefix: bool = False  # KV is found across keys: `cached_tokens` then tells one what another sent
    rehydrate: Rehydrate = "ledger"  # what a stored conversation goes on from: its tokens, or its items anew
    max_in_flight: int = 64  # Responses over HTTP that one caller may wait for at once

    max_connections: int = 512  # half of the usual limit of open files (1024)
    max_message: int = MESSAGE_LIMIT + MESSAGE_SLACK  # of a text frame, in characters
    max_body: int = MESSAGE_LIMIT + MESSAGE_SLACK  # of an HTTP request
    connection_lifetime: float = 3600.0  # of a WebSocket, as at the public service
    heartbeat: float = 15.0  # the longest silence of a run that works: clients count text frames only
    ping_interval: float = 20.0
    ping_timeout: float = 20.0
    send_timeout: float = 30.0  # a peer that does not take one frame in this time has stalled
    grace: float = 30.0  # from SIGTERM until what still runs is cut off

    log_format: LogFormat = "console"
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingsError("port", f"{self.port} is not a port; 0 to 65535")
        if not self.host:
            raise SettingsError("host", "is empty")
        if not self.model:
            raise SettingsError("model", "is empty")
        if self.model.startswith(("/", ".")) and not Path(self.model).is_dir():
            raise SettingsError("model", f"there is no folder {self.model}")
        _read_pace(self.engine)
        for name, other in (("tls_cert", self.tls_key), ("tls_key", self.tls_cert)):
            path: Path | None = getattr(self, name)
            if path is None and other is not None:
                raise SettingsError(name, "a certificate and its key are given together")
            if path is not None and not path.is_file():
                raise SettingsError(name, f"there is no file {path}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise SettingsError(name, f"{getattr(self, name)!r} is none of {', '.join(allowed)}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise SettingsError(name, f"{value} is not a number above 0")
        if not (self.grace >= 0 and math.isfinite(self.grace)):
            raise SettingsError("grace", f"{self.grace} is not a number of seconds")
        for path in self.scripts:
            if not path.exists():
                raise SettingsError("script", f"there is no {path}")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise SettingsError("api_key", "a key is printable ASCII without spaces, and not empty")
        if not (self.is_loopback or self.api_keys or self.insecure):
            raise SettingsError(
                "host",
                f"{self.host} can be reached from other machines and there is no key: "
                "give --api-key (or --api-key-file, FERMATA_API_KEYS), or --insecure to serve everybody",
            )

    @property
    def pace(self) -> Pace | None:
        """How fast the paced engine is to be; None: the engine is the real one."""
        return _read_pace(self.engine)

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """The certificate and its key; None: connections are not encrypted."""
        return None if self.tls_cert is None or self.tls_key is None else (self.tls_cert, self.tls_key)

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name, which may resolve to anything


PACED = "paced:"


def _read_pace(engine: str) -> Pace | None:
    if engine == "torch":
        return None
    if not engine.startswith(PACED):
        raise SettingsError("engine", f"{engine!r} is neither torch nor {PACED}decode=RATE,prefill=RATE")
    rates: dict[str, float] = {}
    for part in engine.removeprefix(PACED).split(","):
        name, _, value = part.partition("=")
        if name not in Pace.__struct_fields__ or name in rates:
            raise SettingsError("engine", f"{part!r}: one of decode, prefill and step is set here, each once")
        try:
            rates[name] = float(value)
        except ValueError:
            raise SettingsError("engine", f"{part!r}: {value!r} is not a number") from None
    if missing := {"decode", "prefill"} - rates.keys():
        raise SettingsError("engine", f"{engine!r} does not say {' and '.join(sorted(missing))}")
    try:
        return Pace(**rates)
    except ValueError as error:
        raise SettingsError("engine", str(error)) from None


_CHOICES: dict[str, tuple[str, ...]] = {
    "device": get_args(Device),
    "prefix_cache": get_args(Switch),
    "rehydrate": get_args(Rehydrate),
    "dtype": get_args(Dtype),
    "lifecycle": get_args(Lifecycle),
    "log_format": get_args(LogFormat),
    "log_level": get_args(LogLevel),
}

_POSITIVE = (
    "threads",
    "max_context",
    "kv_memory",
    "max_held",
    "hold_timeout",
    "max_in_flight",
    "max_connections",
    "max_message",
    "max_body",
    "connection_lifetime",
    "heartbeat",
    "ping_interval",
    "ping_timeout",
    "send_timeout",
)
