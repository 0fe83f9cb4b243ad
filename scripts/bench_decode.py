"""How fast the engine is, inline and on one thread: decoding beside transformers, batches, prefill, appends.

All rows are measured in one run, repetition by repetition in turn, so that a machine that is slow for a while
slows all of them; medians are printed, and ratios of medians. The A/A row measures the same thing twice: what
differs there is noise. Times are those of this thread on its processor (``--wall``: by the clock, for a
machine with nothing else to do).

    python -m scripts.bench_decode [--model FOLDER] [--repetitions N] [--wall]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from itertools import count

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

from engine.checkpoint import EMBEDDED_FOLDER
from engine.messages import Began, EngineConfig, Extend, Open, Release, Sample, Sampling, Truncate
from engine.scheduler import Scheduler

PROMPT = 64  # tokens
SAMPLED = 128  # tokens a run
TOGETHER = 16  # sequences
PREFILLED = 2048  # tokens
APPENDED = 16  # tokens, as of a short tool result
HISTORIES = (1024, 32768)  # tokens before an append
APPENDS = 5  # a repetition


class Bench:
    """One engine, and what is done to it, each as a function that returns a rate or a time."""

    def __init__(self, model: str, clock: Callable[[], float]) -> None:
        self.engine = Scheduler(EngineConfig(model=model, prefix_cache=False, device="cpu"))
        self.clock = clock
        self.chance = random.Random(0)
        self.numbers = count()
        self.held: dict[int, int] = {}  # history: its sequence
        torch.set_num_threads(1)
        from transformers import AutoModelForCausalLM

        self.reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def tokens(self, length: int) -> list[int]:
        """Random ones."""
        return [self.chance.randrange(self.engine.info.vocabulary) for _ in range(length)]

    def transformers_rate(self) -> float:
        """Tokens per second of generate(), its prefill of the prompt included."""
        prompt = torch.tensor([self.tokens(PROMPT)])
        started = self.clock()
        with torch.inference_mode():
            result = self.reference.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=SAMPLED,
                min_new_tokens=SAMPLED, pad_token_id=0,
            )  # fmt: skip
        assert result.shape[1] == PROMPT + SAMPLED
        return SAMPLED / (self.clock() - started)

    def decode_rate(self, sequences: int) -> float:
        """Tokens per second of sequences that run together, their prefill included."""
        numbers = [next(self.numbers) for _ in range(sequences)]
        started = self.clock()
        for number in numbers:
            self.engine.submit(
                [Open(number), Extend(number, self.tokens(PROMPT)), Sample(number, Sampling(), SAMPLED)]
            )
        while self.engine.has_work:
            self.engine.step()
        rate = sequences * SAMPLED / (self.clock() - started)
        self.engine.submit([Release(number) for number in numbers])
        return rate

    def step_time(self) -> float:
        """Milliseconds of a step that decodes one sequence."""
        number = next(self.numbers)
        self.engine.submit(
            [Open(number), Extend(number, self.tokens(PROMPT)), Sample(number, Sampling(), SAMPLED)]
        )
        self.engine.step()
        times = []
        while self.engine.has_work:
            started = self.clock()
            self.engine.step()
            times.append(self.clock() - started)
        self.engine.submit([Release(number)])
        return 1000 * statistics.median(times)

    def prefill_rate(self) -> float:
        """Tokens per second of one long prompt."""
        number = next(self.numbers)
        tokens = self.tokens(PREFILLED)
        started = self.clock()
        self.engine.submit([Open(number), Extend(number, tokens)])
        while self.engine.has_work:
            self.engine.step()
        rate = PREFILLED / (self.clock() - started)
        self.engine.submit([Release(number)])
        return rate

    def append_times(self, history: int) -> tuple[float, float]:
        """Milliseconds from an append to the forward pass that it is in, and of the whole step."""
        number = self.held.get(history)
        if number is None:
            number = self.held[history] = next(self.numbers)
            self.engine.submit([Open(number), Extend(number, self.tokens(history))])
            while self.engine.has_work:
                self.engine.step()
        appended = self.tokens(APPENDED)
        submitted, started = time.monotonic(), self.clock()
        self.engine.submit([Extend(number, appended), Sample(number, Sampling(), 1)])
        events = self.engine.step().events
        step = self.clock() - started
        began = next(event.at for event in events if isinstance(event, Began))
        self.engine.submit([Truncate(number, history)])
        return 1000 * (began - submitted), 1000 * step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(EMBEDDED_FOLDER))
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--wall", action="store_true", help="measure by the clock, not by processor time")
    arguments = parser.parse_args()
    bench = Bench(arguments.model, time.perf_counter if arguments.wall else time.thread_time)
    info = bench.engine.info
    print(f"{info.model}: {info.parameters:,} parameters, {info.dtype}, {torch.get_num_threads()} thread")

    rows: dict[str, Callable[[], float]] = {
        "transformers": bench.transformers_rate,
        "one": lambda: bench.decode_rate(1),
        "one again": lambda: bench.decode_rate(1),
        "together": lambda: bench.decode_rate(TOGETHER),
        "step": bench.step_time,
        "prefill": bench.prefill_rate,
    }
    measured: dict[str, list[float]] = {name: [] for name in rows}
    appends: dict[int, list[tuple[float, float]]] = {history: [] for history in HISTORIES}
    for repetition in range(arguments.repetitions + 1):
        for name, measure in rows.items():
            measured[name].append(measure())
        for history in HISTORIES:
            appends[history] += [bench.append_times(history) for _ in range(APPENDS)]
        if repetition == 0:  # it has warmed up caches and buffers
            measured = {name: [] for name in measured}
            appends = {history: [] for history in appends}
    median = {name: statistics.median(values) for name, values in measured.items()}
    one = median["one"]

    def line(name: str, value: float, unit: str, note: str = "") -> None:
        print(f"{name:40}{value:12.3f} {unit:10}{note}")

    line("transformers generate()", median["transformers"], "tokens/s")
    line("one sequence", one, "tokens/s", f"{one / median['transformers']:.2f} x transformers")
    line(
        "one sequence again (A/A)", median["one again"], "tokens/s", f"{median['one again'] / one:.2f} x one"
    )
    line(
        f"{TOGETHER} sequences together",
        median["together"],
        "tokens/s",
        f"{median['together'] / one:.2f} x one",
    )
    line("decode step of one", median["step"], "ms")
    line(f"prefill of {PREFILLED} tokens", median["prefill"], "tokens/s")
    for index, what in enumerate(("to its forward pass", "to its first token")):
        times = [statistics.median(pair[index] for pair in appends[history]) for history in HISTORIES]
        for history, milliseconds in zip(HISTORIES, times, strict=True):
            ratio = f"{milliseconds / times[0]:.2f} x {HISTORIES[0]}"
            line(f"append to {history}, {what}", milliseconds, "ms", ratio)


if __name__ == "__main__":
    main()
