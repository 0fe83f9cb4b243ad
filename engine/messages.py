"""What crosses the line between the server and the engine: frozen structs, one message a step each way.

The server sends `Commands`, the engine answers `Ready` once and a `Step` after each step of its scheduler.
The same structs serve the engine process (msgpack over a socketpair) and the inline engine (handed over as
objects).

Vocabulary: a *sequence* is the engine's side of a conversation. The server keeps the ledger, all its tokens;
what the engine holds of a sequence is always a prefix of that ledger plus what has been sampled since. So a
sequence that is lost with a crashed engine is made again with `Open` and one `Extend` of the whole ledger,
and sampling goes on where the ledger ends: noise depends on (seed, position, token) only.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

FailureCode: TypeAlias = Literal["context_length_exceeded", "out_of_kv", "engine_error"]
StopReason: TypeAlias = Literal["stop", "length", "paused"]


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast an engine without weights is. Making it raises ValueError."""

    decode: float  # tokens a second of each sequence
    prefill: float  # tokens a second of all sequences together
    step: float = 0.0002  # seconds a forward pass takes at least: that of a small model on a fast device

    def __post_init__(self) -> None:
        for name, rate in (("decode", self.decode), ("prefill", self.prefill)):
            if not (rate > 0 and math.isfinite(rate)):
                raise ValueError(f"{name}={rate:g} is not a number of tokens a second above 0")
        if not (self.step >= 0 and math.isfinite(self.step)):
            raise ValueError(f"step={self.step:g} is not a number of seconds")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is started with. Making it raises ValueError."""

    model: str  # a folder, a hub id, or "random:SEED" (a tiny model with random weights, for tests)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_context: int | None = None  # tokens; None: what the checkpoint says
    kv_memory: int = 1 << 30  # bytes for the block pool, all layers together
    block_size: int = 16  # tokens a block
    max_batch: int = 256  # sequences that decode together in one step
    prefill_chunk: int = 512  # tokens of prompt a step: bounds how long decoding waits for a prefill
    prefix_cache: bool = True  # finished full blocks stay findable by content while there is room
    pace: Pace | None = None  # of the paced engine

    def __post_init__(self) -> None:
        if min(self.block_size, self.max_batch, self.prefill_chunk) < 1:
            raise ValueError("block_size, max_batch and prefill_chunk must be at least 1")


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. `temperature` 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0


# Commands, server to engine. `sequence` is a number that the server chooses and never uses again.


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Make an empty sequence. Blocks are shared by content only within one `namespace` (an API key's)."""

    sequence: int
    namespace: str = ""


class Extend(msgspec.Struct, frozen=True, tag="extend"):
    """Append tokens to a sequence and prefill them as soon as the schedule allows.

    `sampled` marks tokens that the model itself once sampled (a ledger sent again after a crash): penalties
    count them.
    """

    sequence: int
    tokens: list[int]
    sampled: bool = False


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Sample from the end of the sequence until a stop token, `max_tokens`, or `Pause`.

    `forced`: the tokens to "sample", one a step, instead of what the logits say; the leg stops (reason
    "stop") with the last of them. All other work is done as ever.
    """

    sequence: int
    sampling: Sampling
    max_tokens: int
    stop_tokens: tuple[int, ...] = ()
    forced: list[int] | None = None


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """A leg that samples nothing: answered by `Prefilled` and `Stopped(reason="length")` once all tokens
    given so far are in KV, but for the last, which is kept back for whatever is sampled later.
    """

    sequence: int


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Stop sampling before the next token; answered by `Stopped(reason="paused")` if the sequence was
    sampling.
    """

    sequence: int


class Truncate(msgspec.Struct, frozen=True, tag="truncate"):
    """Cut a sequence that is not sampling back to its first `length` tokens, KV included."""

    sequence: int
    length: int


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Make `child` a copy of a sequence that is not sampling; full blocks are shared, the partial last one is
    copied.
    """

    sequence: int
    child: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Forget a sequence, in whatever state it is. Nothing is answered, and no event of it follows."""

    sequence: int


Command: TypeAlias = Open | Extend | Sample | Prefill | Pause | Truncate | Fork | Release


class Commands(msgspec.Struct, frozen=True, tag="commands"):
    """All that the server has to say since its last message."""

    commands: list[Command]


# Events, engine to server.


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The first tokens of an extension entered a forward pass. `at`: seconds on CLOCK_MONOTONIC, shared by
    processes.
    """

    sequence: int
    at: float


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """Every token given so far is in KV, or will be with the first sampled one; comes once a leg, before its
    `Sampled`.

    prefilled: tokens that went through the model for this leg. reused: tokens whose KV was found by content
    (only the first leg of a sequence, or of one made again, can have any). queue_seconds: from the `Sample`
    (or the first `Extend` before it) to `Began`. prefill_seconds: time of the forward passes of this
    sequence's prefill.
    """

    sequence: int
    prefilled: int
    reused: int
    queue_seconds: float
    prefill_seconds: float


class Sampled(msgspec.Struct, frozen=True, tag="sampled"):
    """Tokens sampled since the last event of this sequence, in order."""

    sequence: int
    tokens: list[int]


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The leg is over; the sequence keeps its KV. A stop token is part of the sequence and was in a
    `Sampled`.
    """

    sequence: int
    reason: StopReason
    decode_seconds: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not go on with this sequence and has released it. No other sequence is disturbed."""

    sequence: int
    code: FailureCode
    message: str


Event: TypeAlias = Began | Prefilled | Sampled | Stopped | Failed


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A picture of the engine. Block classes are exclusive and add up to `blocks_total`."""

    sequences_running: int = 0  # prefilling or sampling, waiting ones included
    sequences_held: int = 0
    blocks_total: int = 0
    blocks_running: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    extents_per_sequence: float = 0.0
    steps: int = 0
    tokens_prefilled: int = 0
    tokens_reused: int = 0
    tokens_sampled: int = 0
    busy_seconds: float = 0.0  # time inside step()


class Step(msgspec.Struct, frozen=True, tag="step"):
    """What one step of the scheduler produced, all sequences in it."""

    events: list[Event]
    statistics: EngineStatistics


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine loaded."""

    model: str
    architecture: str
    path: str  # which code runs it, and why, for people
    folder: str  # where config, tokeniser and template lie on this machine
    device: str
    dtype: str
    parameters: int
    vocabulary: int
    max_context: int  # tokens
    kv_bytes_per_token: int
    kv_blocks: int
    block_size: int
    load_seconds: float
    simulated: bool = False  # no weights: times are set, not measured


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The first message of the engine: weights are loaded."""

    info: ModelInfo


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """Instead of `Ready`: the model cannot be loaded, and why. The engine ends after it; starting again will
    not help.
    """

    message: str


FromEngine: TypeAlias = Ready | Unusable | Step
