"""What each command does to the books of a scheduler, real or paced. It knows nothing of steps or clocks."""

from __future__ import annotations

from engine.books import Books
from engine.legs import Sequence
from engine.messages import Command, Extend, Fork, Open, Pause, Prefill, Release, Sample, Truncate


def obey(books: Books, command: Command, now: float) -> None:
    """Enter a command; its work is done by the steps that follow.

    Raises KeyError for a sequence that is not open and ValueError for a command that its state does not
    allow: bugs of whoever sends them. A command for a sequence that has failed is ignored, since it may have
    crossed the news.
    """
    if command.sequence in books.failed:
        _after_failure(books, command)
        return
    match command:
        case Open(number, namespace):
            _check_unused(books, number)
            books.sequences[number] = Sequence(number, books.pool.open(namespace))
        case Extend():
            _extend(books, command, now)
        case Sample():
            _sample(books, command, now)
        case Prefill(number):
            sequence = _not_sampling(books, number, "prefilled")
            books.leg_of(sequence, now).only_prefills = True
            books.queue(sequence)
            if sequence.to_prefill <= 0:
                books.settled(sequence, now)
        case Pause(number):
            sequence = books.sequences[number]
            if sequence.sampling:
                books.withdraw(sequence)
                books.stop(sequence, "paused", now)
        case Truncate(number, length):
            _truncate(books, number, length)
        case Fork(number, child):
            _fork(books, number, child, now)
        case Release(number):
            books.release(books.sequences[number])
            books.events = [event for event in books.events if event.sequence != number]


def _after_failure(books: Books, command: Command) -> None:
    """There is nothing left to do, but to fail the forks."""
    match command:
        case Fork(number, child):
            books.lose(child, "engine_error", f"sequence {number}, to be forked, has failed before")
        case Release(number):
            del books.failed[number]


def _extend(books: Books, command: Extend, now: float) -> None:
    sequence = _not_sampling(books, command.sequence, "extended")
    if not command.tokens:
        return
    length = len(sequence.tokens) + len(command.tokens)
    if length > books.max_context:
        message = f"{length} tokens do not fit into a context of {books.max_context}"
        books.fail(sequence, "context_length_exceeded", message)
    elif _are_known(books, sequence, command.tokens):
        sequence.append(command.tokens, sampled=command.sampled)
        books.leg_of(sequence, now).announce = True
        books.queue(sequence)


def _sample(books: Books, command: Sample, now: float) -> None:
    sequence = books.sequences[command.sequence]
    if sequence.sampling:
        raise ValueError(f"sequence {sequence.number} is sampling already")
    if not sequence.tokens:
        raise ValueError(f"sequence {sequence.number} has no tokens to sample after")
    if command.forced and not _are_known(books, sequence, command.forced):
        return
    leg = books.leg_of(sequence, now)
    leg.sample = command
    leg.stop_tokens = frozenset(command.stop_tokens)
    if command.max_tokens < 1 or len(sequence.tokens) >= books.max_context:
        books.stop(sequence, "length", now)
    elif command.forced is not None and not command.forced:
        books.stop(sequence, "stop", now)
    else:
        leg.announce |= leg.began_at is None
        books.queue(sequence)


def _truncate(books: Books, number: int, length: int) -> None:
    sequence = _not_sampling(books, number, "truncated")
    if not 0 <= length <= len(sequence.tokens):
        raise ValueError(f"sequence {number} has {len(sequence.tokens)} tokens and cannot be cut to {length}")
    books.withdraw(sequence)
    sequence.cut(length)
    books.pool.truncate(sequence.table, max(0, min(sequence.table.length, length - 1)))
    books.queue(sequence)


def _fork(books: Books, number: int, child_number: int, now: float) -> None:
    sequence = _not_sampling(books, number, "forked")
    _check_unused(books, child_number)
    books.withdraw(sequence)
    child = books.sequences[child_number] = Sequence(
        child_number,
        books.pool.fork(sequence.table),
        sequence.tokens.copy(),
        [span.copy() for span in sequence.sampled_spans],
    )
    if child.to_prefill > 0:
        books.leg_of(child, now)
        books.queue(child)


def _not_sampling(books: Books, number: int, participle: str) -> Sequence:
    sequence = books.sequences[number]
    if sequence.sampling:
        raise ValueError(f"sequence {number} cannot be {participle} while it is sampling")
    return sequence


def _check_unused(books: Books, number: int) -> None:
    if number in books.sequences:
        raise ValueError(f"sequence {number} is open already")


def _are_known(books: Books, sequence: Sequence, tokens: list[int]) -> bool:
    """Whether these token ids exist; if not, the sequence has failed."""
    vocabulary = books.outline.vocabulary
    if min(tokens) >= 0 and max(tokens) < vocabulary:
        return True
    books.fail(sequence, "engine_error", f"token ids must be in 0 to {vocabulary - 1}")
    return False
