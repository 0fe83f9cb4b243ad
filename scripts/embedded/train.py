"""Makes the embedded model from nothing: the recipe whose result is in engine/embedded.

Knows batches, the optimiser and when to save. The world, the text of conversations, the tokenizer,
the decoder and the score each have a file of their own.

Strategy: five stages. First pure copying (copying.py), until following names and numbers is second
nature. Then conversations, in which folders and trails grow longer, with copying mixed in so that
words that are held out of the tasks stay usable as names. Then names of all kinds, so that a name is
a name by its place alone; then more files read together, and copying of lists of paths, which are
learned last. Batches hold conversations of like length behind one shared system prompt. One thread,
fixed seeds and step counts: the same kind of CPU makes the same weights again.
"""

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import cos, pi
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from scripts.embedded.copying import IGNORED, Alphabet, copying_batch
from scripts.embedded.kinds import draw_conversation
from scripts.embedded.maker import Mix
from scripts.embedded.score import report_line, score_answers
from scripts.embedded.tiny_llama import Shape, TinyLlama, load
from scripts.embedded.transcript import CHAT_TEMPLATE, random_system_text, training_row
from scripts.embedded.vocabulary import (
    END_TOKEN,
    FOLDER_AND_FILE_WORDS,
    PAD_TOKEN,
    SPECIAL_TOKENS,
    build_tokenizer,
    save_tokenizer,
    token_id,
)
from scripts.embedded.world import Message

WARMUP_STEPS = 100
BATCH_TOKENS = 2560  # of conversations, padding included; the shared system prompt comes on top
COPYING_ROWS, COPYING_LENGTH = 32, 96
POOL = 384  # conversations drawn at a time and sorted by length, so that a batch needs little padding
SAVE_EVERY = 1000  # steps, some minutes


LEARNED = Mix(long_share=0.35)
NAMES = replace(LEARNED, varied=True)
TOGETHER = replace(NAMES, together=0.25)  # reading files together is the hardest of the short kinds


@dataclass(frozen=True)
class Stage:
    """A part of the recipe: a fixed number of steps with one mix of batches."""

    name: str
    seed: int
    steps: int
    copying_every: int  # 1: only copying
    learning_rate: float  # at its highest
    horizon: int = 0  # steps at which a cosine would bring the learning rate to nothing; 0: it stays
    grows: bool = False  # folders and trails grow longer over the horizon
    mix: Mix = LEARNED  # of conversations
    path_rows: float = 0.0  # share of copying rows that are lists of paths


STAGES = (
    Stage("copying", 1, 1600, 1, 2e-3),
    Stage("tasks", 2, 3000, 8, 2e-3, horizon=9000, grows=True),
    Stage("names", 3, 1000, 8, 1.5e-3, horizon=8000, mix=NAMES),
    Stage("together", 4, 3000, 8, 1.4e-3, horizon=7000, mix=TOGETHER),
    Stage("paths", 5, 4000, 5, 1e-3, horizon=4000, mix=TOGETHER, path_rows=0.6),
)


@dataclass(frozen=True)
class Batch:
    """Token ids [P] before all rows, [B, T], and the wanted next tokens [B, T] or IGNORED."""

    prefix: Tensor
    tokens: Tensor
    targets: Tensor


def learning_rate(stage: Stage, step: int) -> float:
    """A short rise, then constant, or half a cosine down to 1 % at the horizon."""
    rise = min(1.0, (step + 1) / WARMUP_STEPS)
    fall = 0.01 + 0.99 * (1 + cos(pi * step / stage.horizon)) / 2 if stage.horizon else 1.0
    return stage.learning_rate * rise * fall


def grown(mix: Mix, progress: float) -> Mix:
    """The mix at a point (0 to 1) of growing up."""
    if progress < 0.1:
        return replace(mix, longest_folder=2, longest_trail=3, long_share=0.2)
    if progress < 0.2:
        return replace(mix, longest_folder=4, longest_trail=6, long_share=0.3)
    if progress < 0.35:
        return replace(mix, longest_folder=6, longest_trail=11, long_share=0.3)
    return mix


def copying_batches(rng: random.Random, tokenizer: Tokenizer, path_rows: float) -> Iterator[Batch]:
    """Endless copying practice over all tokens but the control tokens."""

    def ids(texts: Iterable[str]) -> list[int]:
        return [token_id(tokenizer, text) for text in texts]

    alphabet = Alphabet(
        tokens=list(range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size())),
        digits=ids("0123456789"),
        words=ids(FOLDER_AND_FILE_WORDS),
        slash=token_id(tokenizer, "/"),
        extensions=ids((".txt", ".md", ".log")),
        separators=[
            tokenizer.encode(text, add_special_tokens=False).ids[0] for text in (", ", "\n", " ", '"')
        ],
    )
    prefix = torch.tensor([token_id(tokenizer, "<|im_start|>")])
    while True:
        yield Batch(prefix, *copying_batch(rng, alphabet, COPYING_ROWS, COPYING_LENGTH, path_rows))


def conversation_batches(rng: random.Random, tokenizer: Tokenizer, stage: Stage) -> Iterator[Batch]:
    """Endless conversations in batches of like length, each batch behind a system prompt of its own."""
    made = 0
    while True:
        mix = grown(stage.mix, made / stage.horizon) if stage.grows else stage.mix
        drawn = [draw_conversation(rng, mix) for _ in range(POOL)]
        rows = sorted(
            ((training_row(tokenizer, messages), messages) for messages in drawn),
            key=lambda row: len(row[0][0]),
        )
        groups: list[list[tuple[tuple[list[int], list[bool]], list[Message]]]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * len(row[0][0]) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            used = {call.name for _, messages in group for message in messages for call in message.calls}
            system = tokenizer.encode(random_system_text(rng, used), add_special_tokens=False).ids
            width = max(len(ids) for (ids, _), _ in group)
            pad = token_id(tokenizer, PAD_TOKEN)
            tokens = torch.tensor([ids + [pad] * (width - len(ids)) for (ids, _), _ in group])
            counts = torch.tensor(
                [produced + [False] * (width - len(produced)) for (_, produced), _ in group]
            )
            targets = tokens.masked_fill(~counts, IGNORED)
            yield Batch(torch.tensor(system), tokens[:, :-1], targets[:, 1:])
            made += 1


def train(stage: Stage, model: TinyLlama, tokenizer: Tokenizer, folder: Path) -> None:
    """Runs one stage, saving the weights into `folder` and printing loss and held-out scores as it goes."""
    rng = random.Random(stage.seed)
    copying = copying_batches(rng, tokenizer, stage.path_rows)
    conversations = conversation_batches(rng, tokenizer, stage)
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    started, losses, right = time.monotonic(), [], []
    for step in range(stage.steps):
        batch = next(copying if step % stage.copying_every == 0 else conversations)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(stage, step)
        wanted = batch.targets != IGNORED
        logits = model.logits(model(batch.prefix, batch.tokens)[wanted])
        loss = functional.cross_entropy(logits, batch.targets[wanted])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % stage.copying_every or stage.copying_every == 1:
            losses.append(loss.item())
            right.append((logits.argmax(-1) == batch.targets[wanted]).float().mean().item())
        if (step + 1) % 100 == 0:
            minutes = (time.monotonic() - started) / 60
            mean_loss, mean_right = sum(losses) / len(losses), sum(right) / len(right)
            print(
                f"{stage.name} {step + 1}: loss {mean_loss:.4f} tokens {mean_right:.4f} {minutes:.1f} min",
                flush=True,
            )
            losses, right = [], []
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == stage.steps:
            save(model, folder)
            if stage.copying_every > 1:
                print(
                    report_line("held-out tasks right", score_answers(model, tokenizer, seed=step, tasks=6)),
                    flush=True,
                )


def save(model: TinyLlama, folder: Path) -> None:
    """Writes the weights; a reader sees the old file or the new one."""
    weights = {name: weight.detach().contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors.new", metadata={"format": "pt"})
    (folder / "model.safetensors.new").chmod(0o644)  # safetensors makes it private
    (folder / "model.safetensors.new").rename(folder / "model.safetensors")


def save_settings(shape: Shape, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes everything of the model folder but weights and card."""
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = token_id(tokenizer, END_TOKEN), token_id(tokenizer, PAD_TOKEN)
    (folder / "config.json").write_text(json.dumps(shape.config(end, pad), indent=2) + "\n")
    generation = {"eos_token_id": end, "pad_token_id": pad, "do_sample": False, "max_new_tokens": 1024}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.lstrip())


def main() -> None:
    """Runs the stages in order."""
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("folder", type=Path, help="model folder to write")
    parser.add_argument("--stages", nargs="+", default=[stage.name for stage in STAGES], help="stages to run")
    parser.add_argument(
        "--start", type=Path, help="model folder to start from, when the first stage is left out"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(STAGES[0].seed)
    tokenizer = build_tokenizer()
    model = load(options.start) if options.start else TinyLlama(Shape())
    save_settings(model.shape, tokenizer, options.folder)
    for stage in STAGES:
        if stage.name in options.stages:
            train(stage, model, tokenizer, options.folder)


if __name__ == "__main__":
    main()
