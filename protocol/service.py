"""The service: one engine, its models, and every run, whatever connection it came by.

It knows requests and runs, and nothing of sockets. A run's task lives in this service's nursery. Admission is
here: what a request may ask for, which model answers, how many runs a caller may keep.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from pathlib import Path
from time import time
from typing import Any, Literal, TypeAlias

import structlog
import trio

from engine.handle import Engine, EngineUnavailable, ProcessEngine
from engine.messages import EngineConfig
from protocol import snapshot, wire
from protocol.counting import count_input
from protocol.dialects.load import DialectError, load_dialect
from protocol.edge.access import Caller
from protocol.edge.metrics import Sections
from protocol.errors import RequestError, overloaded
from protocol.ledger import Ledger
from protocol.models import Model, ScriptError, load_models, load_scripts
from protocol.past import NOTHING, Past, Shelf, not_found
from protocol.response import Run
from protocol.retries import Retries
from protocol.settings import EMBEDDED_MODEL, Settings
from protocol.state import Phase, RunState
from protocol.store import Left, Store, StoreFull
from protocol.work import Work

Lifecycle: TypeAlias = Literal["stateless", "stored", "chained", "held"]

log: structlog.stdlib.BoundLogger = structlog.get_logger("protocol.service")


class Service:
    """Everything behind the network edge. Make it, then `run` it once. The engine is a process of its own
    unless another one is given. Raises ScriptError, StoreError.
    """

    def __init__(self, settings: Settings, engine: Engine | None = None) -> None:
        self.settings = settings
        self.draining = False
        self._engine = engine or make_engine(settings)
        self._scripts = load_scripts(settings.scripts)
        self.store = Store(settings.state_dir)
        self._models: dict[str, Model] = {}
        self._vocabulary = ""  # of all its models
        self._unusable: str | None = None  # why there will be no model
        self._runs: dict[str, Run] = {}  # those that have not ended
        self._retries = Retries()
        self._nursery: trio.Nursery | None = None
        self._run_ended = trio.Event()
        self.shelf = Shelf(settings.max_held)
        self._ended: Counter[str] = Counter()
        self._work = Work()  # of all runs that have ended

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the engine and every Response until cancelled. Reports started at once, before weights are
        loaded.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self.store.run)
                await nursery.start(self._engine.run)
                nursery.start_soon(self._load_models)
                nursery.start_soon(self._show_life)
                task_status.started()
                await trio.sleep_forever()
        finally:
            await self.store.aclose()

    async def _load_models(self) -> None:
        try:
            await self._engine.wait_ready()
            info = self._engine.info
            dialect = await trio.to_thread.run_sync(load_dialect, Path(info.folder))
            self._vocabulary = await trio.to_thread.run_sync(_vocabulary_of, Path(info.folder))
            self._models = load_models(model_name(self.settings.model), info, dialect, self._scripts)
        except (EngineUnavailable, DialectError, ScriptError) as error:
            self._unusable = str(error)
            log.error("model_unusable", reason=self._unusable)
        else:
            log.info("models_ready", models=list(self._models), dialect=dialect.name, runs_on=info.path)

    async def _show_life(self) -> None:
        """Heartbeats: a run that works and has been silent for too long says that it goes on. One task for
        all runs, since a deadline for every token would cost more than the token's event.
        """
        while True:
            silent = [run.silent_since for run in self._runs.values()]
            now = trio.current_time()
            oldest = min((since for since in silent if since is not None), default=now)
            await trio.sleep_until(oldest + self.settings.heartbeat)
            for run in self._runs.values():
                if run.silent_since is not None and run.silent_since <= oldest:
                    run.show_life()

    # ---- runs ----

    def create(
        self,
        request: wire.Create,
        *,
        frame: str | bytes,
        caller: Caller,
        prototype: bool = False,
        over_http: bool = False,
        superseded: Run | None = None,
    ) -> tuple[Run, bool]:
        """A run for this request, not started; and whether it is new (a repeated `event_id` finds the run it
        made). `frame` is what it was decoded from. It is admitted as if the run that it supersedes had ended.

        Raises RequestError when the request cannot be done at all; what only rendering can tell, the run says
        itself.
        """
        if sent_before := self._retries.find(caller.name, request.event_id):
            return sent_before, False
        work = Work(bytes_in=wire.wire_size(frame))
        with work.timed("validate"):
            lifecycle = http_lifecycle(request) if over_http else self._lifecycle(request, prototype)
            self._check_admission(caller, lifecycle, superseded)
            model = self._model(request)
            check_supported(request)
            positions: list[int] = []
            items = wire.parse_items(request.input, work.ignored, positions=positions)
            wire.parse_tools(request.tools, work.ignored)
            request.tools = wire.without_ignored(request.tools)
            wire.unknown_fields(frame, work.ignored)
            work.items_validated = len(items)
        request.input = None
        if request.seed is None:
            request.seed = secrets.randbits(63)
        state = RunState(
            id=f"resp_{secrets.token_hex(16)}",
            owner=caller.name,
            lifecycle=lifecycle,
            prototype=prototype,
            created_at=int(time()),
            request=request,
            items=items,
            positions=positions,
            leg_work=work,
        )
        run = Run(
            state,
            model=model,
            engine=self._engine,
            namespace="" if self.settings.share_prefix else state.owner,
            hold_timeout=self.settings.hold_timeout,
        )
        self._runs[state.id] = run
        self._retries.remember(run)
        log.info("response_created", response=state.id, model=model.id, lifecycle=lifecycle)
        return run, True

    def start(self, run: Run) -> None:
        """Let a run go on its way, in a task that outlives whoever started it. Idempotent."""
        assert self._nursery is not None
        if not run.is_started:
            run.is_started = True
            self._nursery.start_soon(self._see_through, run)

    def forget(self, run: Run) -> None:
        """A run that was created and will never be started. Whoever waits for it is told so."""
        if not run.log.ended:
            run.log.refuse(overloaded("Its connection went before its turn. Please try again in 1s."))
        run.past.release()
        self._runs.pop(run.state.id, None)
        self._retries.forget(run)

    async def _see_through(self, run: Run) -> None:
        try:
            await run.run()
        except Exception:  # ours, in how a run ends: no other run may end with it
            log.exception("run_lost", response=run.state.id)
            run.abandon()
        self._runs.pop(run.state.id, None)
        ending = run.state.ending
        self._ended[(ending.reason or ending.status) if ending is not None else "lost"] += 1
        self._work.add(run.state.work)
        self._work.ignored.clear()
        self._retries.trim()
        self._run_ended.set()
        if run.response is not None and run.state.request.store is not False:
            self._keep(run)

    def _keep(self, run: Run) -> None:
        try:
            self.store.put(
                Left(run.state.id, run.state.owner, self._vocabulary, response=run.response, state=run.state)
            )
        except StoreFull:
            log.error("response_not_stored", response=run.state.id)

    def find(self, response_id: str, caller: Caller) -> Run | None:
        """The run with this id, if this caller made it, it was started and has not ended."""
        run = self._runs.get(response_id)
        return run if run is not None and run.is_started and run.state.owner == caller.name else None

    def response_of(self, run: Run) -> wire.Response:
        """The Response object of a run, as it stands."""
        model_id = run.state.request.model
        assert model_id is not None
        return run.response or snapshot.in_progress(run.state, self._models[model_id])

    async def find_past(self, response_id: str, caller: Caller) -> Past:
        """The Response of this id that the caller made and had stored. Raises RequestError."""
        record = await self.store.get(response_id, caller.name)
        if record is None:
            raise not_found(response_id)
        state = RunState.load(record.state)
        if not state.has_taken_in:
            raise not_found(response_id)
        if record.vocabulary != self._vocabulary or self.settings.rehydrate == "items":
            state.ledger = Ledger()  # its tokens mean something else here, or are not wanted: render items
        return Past(state)

    async def count_input(self, request: wire.Create, caller: Caller) -> int:
        """Tokens that the input of a Response to this request would have. Raises RequestError."""
        model = self._model(request)
        check_supported(request)
        previous = request.previous_response_id
        past = NOTHING if previous is None else await self.find_past(previous, caller)
        return await count_input(request, model, past)

    async def drain(self) -> None:
        """Take no new runs, end those that are held, and wait for the legs that are going on.

        The caller has the deadline: cancelled, this ends what is left within a step.
        """
        self.draining = True
        for run in self._runs.values():
            run.close()
        try:
            while self._runs:
                self._run_ended = trio.Event()
                await self._run_ended.wait()
        finally:
            for run in self._runs.values():  # the grace is over
                run.interrupt("shutdown")

    # ---- admission ----

    def _lifecycle(self, request: wire.Create, prototype: bool) -> Lifecycle:
        match request.lifecycle:
            case None:
                return "held" if prototype else self.settings.lifecycle
            case "held":
                return "held"
            case "chained":
                return "chained"
        raise RequestError(
            f"Unknown lifecycle {request.lifecycle!r}: it is 'held' or 'chained'.", param="lifecycle"
        )

    def _check_admission(self, caller: Caller, lifecycle: Lifecycle, superseded: Run | None) -> None:
        if self.draining:
            raise overloaded("This server is shutting down.")
        if lifecycle != "held":
            return
        kept = sum(
            run.state.owner == caller.name and run.state.lifecycle == "held" and run is not superseded
            for run in self._runs.values()
        )
        if kept >= self.settings.max_held:
            raise RequestError(
                f"You have {kept} held responses, this server's limit. End one, or please try again in 1s.",
                status=429,
                type="rate_limit_error",
                code="rate_limit_exceeded",
            )

    def _model(self, request: wire.Create) -> Model:
        if request.model is None:
            raise RequestError(
                "Missing required parameter: 'model'.", code="missing_required_parameter", param="model"
            )
        if not self._models:
            # No overload: clients that give up at that code come again at this one.
            raise RequestError(
                f"There is no model: {self._unusable or self._engine.reason}. Please try again in 5s.",
                status=503,
                type="server_error",
                code="server_error",
            )
        model = self._models.get(request.model)
        if model is None:
            raise RequestError(
                f"The model '{request.model}' does not exist; there is {', '.join(self._models)}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return model

    # ---- what the edge asks ----

    def models(self) -> list[dict[str, Any]]:
        """The data of /v1/models; empty until the weights are loaded."""
        return [model.describe() for model in self._models.values()]

    def health(self) -> tuple[int, dict[str, Any]]:
        """200 when Responses can be made; 503 with the reason otherwise."""
        if self.draining:
            return 503, {"status": "draining", "reason": "the server is shutting down"}
        if self._unusable is not None:
            return 503, {"status": "failed", "reason": self._unusable}
        if self._engine.state != "ready" or not self._models:
            status = "loading" if self._engine.state in ("starting", "ready") else self._engine.state
            return 503, {"status": status, "reason": self._engine.reason}
        return 200, {"status": "ok", "engine_restarts": self._engine.restarts}

    def statistics(self) -> Sections:
        """The sections of /metrics."""
        handle = self._engine.statistics()
        phases = Counter(run.state.phase.value for run in self._runs.values())
        work = self._work.as_json()
        times = work.pop("times_ms")
        return {
            "runs": {
                "live": {phase.value: phases[phase.value] for phase in Phase if phase is not Phase.ENDED},
                "ended_total": dict(self._ended),
            },
            "work": {
                **{f"{name}_total": value for name, value in work.items() if isinstance(value, int)},
                "seconds_total": {stage: ms / 1e3 for stage, ms in times.items()},
            },
            "store": self.store.statistics(),
            "engine": {
                "up": float(handle.state == "ready"),
                "restarts_total": handle.restarts,
                "sequences_open": handle.sequences_open,
                **{
                    name.removesuffix("_total") + "_total" * (name in ENGINE_COUNTERS): getattr(
                        handle.engine, name
                    )
                    for name in handle.engine.__struct_fields__
                },
            },
        }


ENGINE_COUNTERS = frozenset({"steps", "tokens_prefilled", "tokens_reused", "tokens_sampled", "busy_seconds"})


def engine_config(settings: Settings) -> EngineConfig:
    """What the engine needs to know of a server's settings."""
    return EngineConfig(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_context=settings.max_context,
        kv_memory=settings.kv_memory,
        prefix_cache=settings.prefix_cache == "on",
        pace=settings.pace,
    )


def make_engine(settings: Settings) -> Engine:
    """The engine that a server is to have, not yet running: a process of its own."""
    scheduler = "engine.scheduler:Scheduler" if settings.pace is None else "engine.paced:PacedScheduler"
    return ProcessEngine(engine_config(settings), threads=settings.threads, scheduler=scheduler)


def model_name(model: str) -> str:
    """The id under which a model folder or hub id is offered."""
    if model == str(EMBEDDED_MODEL):
        return "fermata-embedded"
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def _vocabulary_of(folder: Path) -> str:
    """What tells the tokens of this model's tokeniser from those of another one."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def http_lifecycle(request: wire.Create) -> Lifecycle:
    """Who keeps the conversation of a request over HTTP. Raises RequestError if it asks for anything else."""
    natural: Lifecycle = "stateless" if request.previous_response_id is None else "stored"
    if request.lifecycle not in (None, natural):
        raise RequestError(
            f"Over HTTP this response cannot be {request.lifecycle!r}: it is 'stateless', or 'stored' with a "
            "previous_response_id. Held and chained ones need a WebSocket.",
            param="lifecycle",
        )
    return natural


def check_supported(request: wire.Create) -> None:
    """Refuse what this server knows and cannot do, where leaving it out would change the answer. Raises
    RequestError.
    """
    text_format = (request.text or {}).get("format") or {"type": "text"}
    refused = {
        "background": bool(request.background),
        "conversation": request.conversation is not None,
        "prompt": request.prompt is not None,
        "top_logprobs": bool(request.top_logprobs),
        "truncation": request.truncation == "auto",
        "tool_choice": request.tool_choice not in (None, "auto", "none"),
        "text.format": text_format != {"type": "text"},
    }
    for param, is_asked in refused.items():
        if is_asked:
            raise RequestError(
                f"Unsupported parameter: '{param}' with this value is not supported by this server.",
                code="unsupported_parameter",
                param=param,
            )
