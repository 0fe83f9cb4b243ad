"""What the held run costs, measured: prints ratios, each from one run of this script, with an A/A row beside
them.

    python -m scripts.bench_held [--repeats N] [--runs N] [--model FOLDER]

1. From the frame of an append to the engine's first step with its tokens, at 1k and at 32k of history.
2. A run of 20 calls through the server (socket, lanes, log, engine process) against the bare engine in this
   process, on the very same tokens, forced, without tool time.
3. Held = fresh: random runs, split at random places and with random companions in the batch, against one
   fresh prefill of the same ledger.
4. What 64 held runs cost while nothing happens.

Repetitions are interleaved; the figures are medians. Machines are noisy: believe a ratio only as far as its
A/A row.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter, process_time

import msgspec
import trio
from rich.console import Console
from rich.table import Table

from engine.messages import (
    EngineConfig,
    Event,
    Extend,
    Open,
    Release,
    Sample,
    Sampled,
    Sampling,
    Stopped,
)
from engine.scheduler import Scheduler
from protocol.client import Connection, Run, connect
from protocol.client.views import Event as ServerEvent
from protocol.dialects.load import load_dialect
from protocol.ledger import Ledger
from protocol.settings import EMBEDDED_MODEL
from protocol.wire import FunctionCallOutput, parse_items, parse_tools
from scripts.local_server import LocalServer, local_server

CALLS = 20
IDLE_RUNS = 64
IDLE_SECONDS = 5.0

TOOL = {
    "type": "function",
    "name": "read_file",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
CALL = {"type": "function_call", "name": "read_file", "arguments": '{"path": "garden/rose.txt"}'}
LEGS = [[CALL]] * CALLS + [[{"type": "message", "role": "assistant", "content": "It is 42."}]]
RESULT = "garden/rose.txt: 42\nnext: garden/fern.txt"

console = Console()


def main() -> None:
    """Run every part and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15, help="of each timed run (15)")
    parser.add_argument("--runs", type=int, default=200, help="random runs for held = fresh (200)")
    parser.add_argument("--model", default=str(EMBEDDED_MODEL), help="a checkpoint's folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trio.run(measure, options, Path(folder))


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """The parts, on one server."""
    scripts = {"calls": LEGS, "many": [[CALL]] * 10_000}
    for name, legs in scripts.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(leg) for leg in legs))
    arguments = ["--model", options.model, "--script", str(folder), "--max-held", "256"]
    async with local_server(*arguments, log=folder / "server.log") as server:
        async with connect(server.url) as connection:
            await resume_latency(connection, options.repeats)
            await against_bare_engine(connection, server, options)
        await idle(server)
    held_equals_fresh(options.model, options.runs)


# ---- 1 ----


async def resume_latency(connection: Connection, repeats: int) -> None:
    """Milliseconds from the append's frame to the first forward pass with its tokens, by the server's own
    clock.
    """
    lengths = {"1k": 1_000, "1k again": 1_000, "32k": 32_000}
    runs = {name: await start_with_history(connection, tokens) for name, tokens in lengths.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    actual = {name: done.response.usage.input_tokens for name, (_, done) in runs.items()}  # type: ignore[union-attr]
    order = list(runs)
    shuffle = random.Random(0)
    for _ in range(4 * repeats):
        shuffle.shuffle(order)
        for name in order:
            run, done = runs[name]
            done = await answer(run, done)
            runs[name] = run, done
            times[name].append(done.response.work["times_ms"]["first_step"])  # type: ignore[union-attr]
    for run, _ in runs.values():
        await run.aclose()
    middle = {name: statistics.median(values) for name, values in times.items()}
    table = Table(title="append received → first engine step with its tokens", title_justify="left")
    for column in ("history", "tokens at start", "p50 ms", "p90 ms", "ratio to 1k"):
        table.add_column(column, justify="right")
    for name, values in times.items():
        p90 = statistics.quantiles(values, n=10)[8]
        label = "1k (A/A)" if name == "1k again" else name
        table.add_row(
            label,
            str(actual[name]),
            f"{middle[name]:.3f}",
            f"{p90:.3f}",
            f"{middle[name] / middle['1k']:.3f}",
        )
    console.print(table)


async def start_with_history(connection: Connection, tokens: int) -> tuple[Run, ServerEvent]:
    """A held run whose history has about this many tokens."""
    words = "one two three four five six seven eight nine ten "
    sample_run, sample_done = await start(connection, "forced:many", words * 10)
    per_word = (sample_done.response.usage.input_tokens) / 100  # type: ignore[union-attr]
    await sample_run.aclose()
    return await start(connection, "forced:many", words * max(1, round(tokens / per_word / 10)))


async def start(connection: Connection, model: str, text: str) -> tuple[Run, ServerEvent]:
    """A held run, at its first pause."""
    run = await connection.held(model=model, input=text, tools=[TOOL])
    return run, await pause(run)


async def answer(run: Run, done: ServerEvent) -> ServerEvent:
    """Send every result that is owed; the next pause or the end."""
    results = [{"type": each.type, "call_id": each.call_id, "output": RESULT} for each in done.required_input]
    await run.append(results)
    return await pause(run)


async def pause(run: Run) -> ServerEvent:
    """Read on to `response.done` or the terminal event."""
    async for event in run:
        if event.type == "response.done" or event.terminal:
            return event
    raise AssertionError("a run ends with an event")


# ---- 2 ----


async def against_bare_engine(
    connection: Connection, server: LocalServer, options: argparse.Namespace
) -> None:
    """One agent run of 20 calls: through the server, and on a scheduler in this process, token for token the
    same.
    """
    ledger = ledger_of_run(options.model)
    sampled = sum(len(tokens) for tokens, was_sampled in ledger.since(0) if was_sampled)
    scheduler = Scheduler(EngineConfig(model=options.model, device="cpu", prefix_cache=False))
    bare: list[float] = []  # seconds, here and below
    bare_again: list[float] = []
    served: list[float] = []
    server_cpu: list[float] = []
    engine_cpu: list[float] = []
    bare_cpu: list[float] = []
    for repeat in range(options.repeats + 1):
        before = server.cpu_seconds()
        begin = perf_counter()
        run, done = await start(connection, "forced:calls", "Read.")
        while not done.terminal:
            done = await answer(run, done)
        took = perf_counter() - begin
        after = server.cpu_seconds()
        assert done.response is not None
        assert done.response.usage is not None
        usage = done.response.usage
        assert (usage.input_tokens, usage.output_tokens) == (len(ledger) - sampled, sampled), (
            "the same tokens"
        )
        with timed_cpu(bare_cpu), timed(bare):
            replay(scheduler, ledger, 3 * repeat)
        with timed(bare_again):
            replay(scheduler, ledger, 3 * repeat + 1)
        served.append(took)
        server_cpu.append(after[0] - before[0])
        engine_cpu.append(after[1] - before[1])
    # The first repetition warms both up.
    ratio = statistics.median(a / b for a, b in zip(served[1:], bare[1:], strict=True))
    ratio_aa = statistics.median(a / b for a, b in zip(bare_again[1:], bare[1:], strict=True))
    legs = CALLS + 1
    extra = statistics.median(a - b for a, b in zip(served[1:], bare[1:], strict=True)) / legs * 1e3
    total = options.repeats * sampled
    table = Table(
        title=f"a run of {CALLS} calls, {sampled} sampled tokens of {len(ledger)}", title_justify="left"
    )
    table.add_column("")
    table.add_column("median", justify="right")
    table.add_row("bare engine, inline", f"{statistics.median(bare[1:]) * 1e3:.1f} ms")
    table.add_row("through the server", f"{statistics.median(served[1:]) * 1e3:.1f} ms")
    table.add_row("added per leg", f"{extra:.2f} ms")
    table.add_row("ratio", f"{ratio:.3f}")
    table.add_row("ratio of the bare engine to itself (A/A)", f"{ratio_aa:.3f}")
    table.add_row("CPU per sampled token, server process", f"{sum(server_cpu[1:]) / total * 1e6:.0f} µs")
    table.add_row("CPU per sampled token, engine process", f"{sum(engine_cpu[1:]) / total * 1e6:.0f} µs")
    table.add_row("CPU per sampled token, bare engine", f"{sum(bare_cpu[1:]) / total * 1e6:.0f} µs")
    console.print(table)


def ledger_of_run(model: str) -> Ledger:
    """The ledger of that run, as the dialect writes it."""
    dialect = load_dialect(Path(model))
    opening = dialect.opening(None, parse_tools([raw(TOOL)], []))
    question = dialect.items(parse_items("Read.", []))
    result = dialect.items([FunctionCallOutput(call_id="", output=RESULT)])
    ledger = Ledger()
    ledger.append(dialect.tokenize([*opening, *question, *dialect.turn_start()]), sampled=False)
    for leg in LEGS:
        said = dialect.tokenize(
            dialect.sampled(parse_items([raw({"call_id": "", **item}) for item in leg], []))
        )
        ledger.append(said, sampled=True)
        if leg is not LEGS[-1]:
            ledger.append(
                dialect.tokenize([*dialect.turn_end(said[-1]), *result, *dialect.turn_start()]), sampled=False
            )
    return ledger


def raw(value: object) -> msgspec.Raw:
    """A value as it would come in a frame."""
    return msgspec.Raw(msgspec.json.encode(value))


def replay(scheduler: Scheduler, ledger: Ledger, sequence: int) -> None:
    """The engine's part of a run, and nothing else."""
    scheduler.submit([Open(sequence)])
    for tokens, was_sampled in ledger.since(0):
        if was_sampled:
            sample = Sample(sequence, Sampling(), max_tokens=len(tokens), forced=list(tokens))
            scheduler.submit([sample])
            list(until_stopped(scheduler, sequence))
        else:
            scheduler.submit([Extend(sequence, list(tokens))])
    scheduler.submit([Release(sequence)])


def until_stopped(scheduler: Scheduler, sequence: int) -> Iterator[Event]:
    """Step until this sequence's leg is over; its events."""
    while True:
        for event in scheduler.step().events:
            if event.sequence == sequence:
                yield event
                if isinstance(event, Stopped):
                    return


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Append the wall time of the block."""
    begin = perf_counter()
    yield
    seconds.append(perf_counter() - begin)


@contextmanager
def timed_cpu(seconds: list[float]) -> Iterator[None]:
    """Append the CPU time that this process used in the block."""
    begin = process_time()
    yield
    seconds.append(process_time() - begin)


# ---- 3 ----


@dataclass(slots=True)
class RandomRun:
    """A run with random legs: what was fed and what was sampled, as it goes on."""

    sequence: int
    sampling: Sampling
    legs: list[tuple[list[int], int]]  # tokens that come in (in random pieces), tokens to sample
    ledger: Ledger = field(default_factory=Ledger)


def held_equals_fresh(model: str, runs: int) -> None:
    """Random runs side by side on one scheduler; then each leg once more, alone, after one prefill."""
    scheduler = Scheduler(EngineConfig(model=model, device="cpu", prefix_cache=False))
    chance = random.Random(1)
    numbers = count()
    finished: list[RandomRun] = []
    going: dict[int, RandomRun] = {}
    while len(finished) < runs:
        while len(going) < 8 and len(going) + len(finished) < runs:
            run = random_run(next(numbers), chance, scheduler.info.vocabulary)
            going[run.sequence] = run
            scheduler.submit([Open(run.sequence)])
            feed_leg(scheduler, run, chance)
        for event in scheduler.step().events:
            run = going[event.sequence]
            if isinstance(event, Sampled):
                run.ledger.append(event.tokens, sampled=True)
            elif isinstance(event, Stopped):
                if run.legs:
                    feed_leg(scheduler, run, chance)
                else:
                    scheduler.submit([Release(run.sequence)])
                    finished.append(going.pop(run.sequence))
    compared = different = legs = 0
    for run in finished:
        start = 0
        for tokens, was_sampled in run.ledger.since(0):
            if was_sampled:
                fresh = fresh_leg(scheduler, next(numbers), run, start, len(tokens))
                legs += 1
                compared += len(tokens)
                different += sum(a != b for a, b in zip(tokens, fresh, strict=True))
            start += len(tokens)
    table = Table(title=f"held = fresh: {runs} random runs, half greedy, half seeded", title_justify="left")
    for column in ("legs", "tokens compared", "tokens different"):
        table.add_column(column, justify="right")
    table.add_row(str(legs), str(compared), str(different))
    console.print(table)


def random_run(sequence: int, chance: random.Random, vocabulary: int) -> RandomRun:
    """2 to 6 legs, greedy or seeded."""
    greedy = chance.random() < 0.5
    sampling = Sampling() if greedy else Sampling(temperature=1.0, top_p=0.95, seed=chance.getrandbits(63))
    legs = [
        (chance.choices(range(vocabulary), k=chance.randint(1, 200)), chance.randint(1, 40))
        for _ in range(chance.randint(2, 6))
    ]
    return RandomRun(sequence, sampling, legs)


def feed_leg(scheduler: Scheduler, run: RandomRun, chance: random.Random) -> None:
    """The next leg's input, in one to three pieces with steps between them, then its sampling."""
    tokens, to_sample = run.legs.pop(0)
    cuts = sorted({0, len(tokens), *(chance.randint(0, len(tokens)) for _ in range(chance.randint(0, 2)))})
    for begin, end in pairwise(cuts):
        scheduler.submit([Extend(run.sequence, tokens[begin:end])])
    run.ledger.append(tokens, sampled=False)
    scheduler.submit([Sample(run.sequence, run.sampling, max_tokens=to_sample)])


def fresh_leg(scheduler: Scheduler, sequence: int, run: RandomRun, start: int, tokens: int) -> list[int]:
    """What is sampled after one prefill of the ledger up to `start`."""
    scheduler.submit(
        [
            Open(sequence),
            Extend(sequence, run.ledger.tokens[:start]),
            Sample(sequence, run.sampling, max_tokens=tokens),
        ]
    )
    events = list(until_stopped(scheduler, sequence))
    scheduler.submit([Release(sequence)])
    return [token for event in events if isinstance(event, Sampled) for token in event.tokens]


# ---- 4 ----


async def idle(server: LocalServer) -> None:
    """CPU time of both processes while runs are held and while there are none (the A row)."""
    table = Table(title=f"idle for {IDLE_SECONDS:g} s", title_justify="left")
    for column in ("held runs", "server CPU ms/s", "engine CPU ms/s"):
        table.add_column(column, justify="right")
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connect(server.url)) for _ in range(2)]
        for held in (0, IDLE_RUNS):
            for index in range(held):
                await start(connections[index % 2], "forced:many", "Read.")
            before = server.cpu_seconds()
            await trio.sleep(IDLE_SECONDS)
            after = server.cpu_seconds()
            used = [(b - a) / IDLE_SECONDS * 1e3 for a, b in zip(before, after, strict=True)]
            table.add_row(str(held), f"{used[0]:.1f}", f"{used[1]:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
