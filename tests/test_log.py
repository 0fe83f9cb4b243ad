"""The event log: what every cursor reads, against a list; merging, the bound, and the end."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from protocol import wire
from protocol.errors import RequestError
from protocol.log import EventLog, EventsExpired

DEADLINE = 60.0  # s of virtual time


def text(delta: str, item_id: str = "msg_1") -> wire.TextDelta:
    return wire.TextDelta(item_id=item_id, output_index=0, delta=delta)


def item_added() -> wire.ItemAdded:
    return wire.ItemAdded(output_index=0, item=wire.OutputMessage("msg_1", "in_progress", []))


def the_end() -> wire.Completed:
    response = wire.Response(
        id="resp_1", created_at=0, status="completed", model="m", output=[], lifecycle="held"
    )
    return wire.Completed(response=response)


def read_all(cursor: Any) -> list[dict[str, Any]]:
    frames = []
    while (frame := cursor.take()) is not None:
        frames.append(json.loads(frame))
    return frames


def deltas(frames: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(frame["sequence_number"], frame["delta"]) for frame in frames]


async def test_numbers_go_up_by_one_and_the_end_ends_it(autojump_clock: trio.abc.Clock) -> None:
    log = EventLog()
    cursor = log.cursor()
    for event in (item_added(), text("a"), item_added(), the_end()):
        log.append(event)
    assert [frame["sequence_number"] for frame in read_all(cursor)] == [0, 1, 2, 3]
    assert cursor.finished
    assert log.ended
    with pytest.raises(AssertionError):
        log.append(text("late"))


async def test_unread_deltas_become_one_and_a_read_one_is_frozen(autojump_clock: trio.abc.Clock) -> None:
    log = EventLog()
    behind, keeping_up = log.cursor(), log.cursor()
    log.append(text("a"))
    log.append(text("b"))
    assert deltas(read_all(keeping_up)) == [(0, "ab")]
    log.append(text("c"))
    log.append(text("d"))
    assert deltas(read_all(behind)) == [(0, "ab"), (1, "cd")]
    assert log.next_number == 2


@pytest.mark.parametrize(
    "other",
    [
        text("b", "msg_2"),
        wire.ReasoningDelta(item_id="msg_1", output_index=0, delta="b"),
        wire.ArgumentsDelta(item_id="msg_1", output_index=0, delta="b"),
    ],
)
async def test_deltas_of_another_kind_or_item_are_not_merged(
    other: wire.Delta, autojump_clock: trio.abc.Clock
) -> None:
    log = EventLog()
    log.append(text("a"))
    log.append(other)
    assert deltas(read_all(log.cursor())) == [(0, "a"), (1, "b")]


async def test_a_delta_that_another_event_follows_is_frozen(autojump_clock: trio.abc.Clock) -> None:
    log = EventLog()
    for event in (text("a"), item_added(), text("b")):
        log.append(event)
    frames = read_all(log.cursor())
    assert [frame.get("delta") for frame in frames] == ["a", None, "b"]


@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("delta"), st.integers(0, 1)),
            st.tuples(st.just("event"), st.just(0)),
            st.tuples(st.just("read"), st.integers(0, 2)),
            st.tuples(st.just("open"), st.integers(0, 10)),
        ),
        max_size=60,
    )
)
def test_every_cursor_reads_the_same_whatever_the_interleaving(actions: list[tuple[str, int]]) -> None:
    async def main() -> None:
        log = EventLog()
        cursors = [(0, log.cursor()) for _ in range(3)]
        seen: list[list[dict[str, Any]]] = [[], [], []]
        by_number: dict[int, dict[str, Any]] = {}
        written: list[tuple[int, str]] = []  # item and text, one entry a delta
        for count, (kind, which) in enumerate(actions):
            if kind == "delta":
                log.append(text(f"<{count}>", f"msg_{which}"))
                written.append((which, f"<{count}>"))
            elif kind == "event":
                log.append(item_added())
            elif kind == "read" and (frame := cursors[which % len(cursors)][1].take()) is not None:
                seen[which % len(cursors)].append(json.loads(frame))
            elif kind == "open" and which < log.next_number:
                cursors.append((which + 1, log.cursor(after=which)))
                seen.append([])
        log.append(the_end())
        for index, (start, cursor) in enumerate(cursors):
            seen[index] += read_all(cursor)
            assert cursor.finished
            assert [frame["sequence_number"] for frame in seen[index]] == list(range(start, log.next_number))
            for each in seen[index]:
                assert by_number.setdefault(each["sequence_number"], each) == each
        for item in (0, 1):
            read = "".join(f["delta"] for f in seen[0] if f.get("item_id") == f"msg_{item}")
            assert read == "".join(delta for of, delta in written if of == item)

    trio.run(main)


async def test_the_oldest_go_when_the_bound_is_passed_and_who_needed_them_is_told(
    autojump_clock: trio.abc.Clock,
) -> None:
    log = EventLog(limit_bytes=1000)
    behind = log.cursor()
    for _ in range(50):
        log.append(item_added())
    statistics = log.statistics()
    assert statistics["events"] == 50
    assert statistics["bytes"] <= 1000
    with pytest.raises(EventsExpired):
        behind.take()
    oldest = 50 - statistics["kept"]
    with pytest.raises(EventsExpired):
        log.cursor(after=oldest - 2)
    frames = read_all(log.cursor(after=oldest - 1))
    assert [frame["sequence_number"] for frame in frames] == list(range(oldest, 50))


async def test_one_event_larger_than_the_bound_can_be_read(autojump_clock: trio.abc.Clock) -> None:
    log = EventLog(limit_bytes=10)
    log.append(item_added())
    assert len(read_all(log.cursor())) == 1


async def test_a_refused_log_has_the_error_and_nothing_else(autojump_clock: trio.abc.Clock) -> None:
    log = EventLog()
    cursor = log.cursor()
    log.refuse(RequestError("no", code="context_length_exceeded", param="input"))
    frames = read_all(cursor)
    assert [frame["type"] for frame in frames] == ["error"]
    assert "sequence_number" not in frames[0]
    assert cursor.finished
    begun = EventLog()
    begun.append(item_added())
    with pytest.raises(AssertionError):
        begun.refuse(RequestError("too late"))


async def test_a_restored_log_goes_on_with_its_numbers(autojump_clock: trio.abc.Clock) -> None:
    log = EventLog(next_number=7)
    with pytest.raises(EventsExpired):
        log.cursor()
    cursor = log.cursor(after=6)
    assert cursor.take() is None
    log.append(text("a"))
    assert deltas(read_all(cursor)) == [(7, "a")]


async def test_next_waits_and_cancellation_loses_nothing(autojump_clock: trio.abc.Clock) -> None:
    log = EventLog()
    cursor = log.cursor()
    with trio.move_on_after(5) as waiting:
        await cursor.next()
    assert waiting.cancelled_caught
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            read: list[str | None] = []

            async def read_to_the_end() -> None:
                while (frame := await cursor.next()) is not None:
                    read.append(frame)

            nursery.start_soon(read_to_the_end)
            await trio.testing.wait_all_tasks_blocked()
            log.append(text("a"))
            await trio.testing.wait_all_tasks_blocked()
            log.append(the_end())
    assert len(read) == 2


async def test_a_cursor_is_told_of_what_is_there_and_of_all_that_comes(
    autojump_clock: trio.abc.Clock,
) -> None:
    log = EventLog()
    log.append(item_added())
    calls: list[int] = []
    cursor = log.cursor(on_ready=lambda: calls.append(log.next_number))
    assert calls == [1]
    read_all(cursor)
    log.append(text("a"))
    assert calls == [1, 2]
    cursor.close()
    cursor.close()
    log.append(item_added())
    assert calls == [1, 2]
    assert log.statistics()["cursors"] == 0
