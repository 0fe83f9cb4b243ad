"""Creates that are sent twice, on one connection or on another: one run, on the lane that asked last."""

from __future__ import annotations

import trio
import trio.testing

from protocol.edge.access import Caller
from tests.harness import (
    Json,
    Peer,
    assembled,
    call,
    result,
    said,
    serving,
    turns,
)

SCRIPTS = {
    "two": [[said("Let me look."), call("read_file", path="a")], [said("It is empty.")]],
    "long": [[said("word " * 60)], [said("And more.")]],
    "endless": [[said("word " * 5000)]],
    "parallel": [[call("read_file", path="a"), call("run_tests")], [said("Done.")]],
}
ENDS = ("response.completed", "response.incomplete", "response.failed")


def of_lane(peer: Peer, stream_id: str | None) -> list[Json]:
    return [event for event in peer.heard if event.get("stream_id") == stream_id]


async def hear(peer: Peer, count: int, *types: str) -> list[Json]:
    """So many events of these types, whatever comes between."""
    found: list[Json] = []
    while len(found) < count:
        event = await peer.next()
        if event["type"] in types:
            found.append(event)
    return found


async def test_a_create_sent_twice_on_its_lane_is_one_run(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        for _ in range(3):
            peer.create("forced:two", event_id="e")
        done = await peer.until("response.done")
        assert len(bench.runs) == 1
        peer.create("forced:two", event_id="e")
        await bench.settle()
        assert not peer.read_now()
        peer.append(result(done))
        completed = await peer.until("response.completed")
        assert assembled(peer.heard) == completed["response"]["output"]
        first = list(peer.heard)
        peer.create("forced:two", event_id="e")
        await bench.settle()
        again = peer.read_now()
        assert again[-1] == first[-1], "what has ended is shown once more"
        assert assembled(again) == completed["response"]["output"]
        await bench.check_nothing_is_left()


async def test_a_create_that_is_refused_can_be_sent_again(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("nobody", event_id="e")
        await peer.until("error")
        peer.create("forced:long", event_id="e")
        await peer.until("response.completed")


async def test_other_callers_have_other_event_ids(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peers = [bench.connect(caller=Caller(name)) for name in ("key-1", "key-2")]
        ids = []
        for peer in peers:
            peer.create("forced:long", event_id="e")
            ids.append((await peer.until("response.completed"))["response"]["id"])
        assert ids[0] != ids[1]


async def test_a_create_sent_again_elsewhere_moves_its_run(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        first, second = bench.connect(), bench.connect()
        first.create("forced:two", event_id="e")
        await first.until("response.done")
        second.create("forced:two", event_id="e")
        done = await second.until("response.done")
        lost = await first.until("error")
        assert lost["error"]["code"] == "response_taken_over"
        first.hang_up()
        await bench.settle()
        second.append(result(done))
        completed = await second.until("response.completed")
        assert assembled(second.heard) == completed["response"]["output"]
        await bench.check_nothing_is_left()


async def test_the_lane_that_lost_its_run_goes_on_with_the_next(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        first, second = bench.connect(), bench.connect()
        first.create("forced:endless", event_id="e")
        await first.until("response.output_text.delta")
        first.create("forced:long", metadata={"next": "yes"})
        await turns(3)
        second.create("forced:endless", event_id="e")
        assert (await first.until("error"))["error"]["code"] == "response_taken_over"
        completed = await first.until("response.completed")
        assert completed["response"]["metadata"] == {"next": "yes"}
        second.create("forced:long")
        await second.until("response.output_text.delta")
        second.say("response.cancel", response_id=bench.runs[0].state.id)
        await second.until("response.incomplete")
        await second.until("response.completed")
        await bench.check_nothing_is_left()


async def test_a_run_that_never_started_moves_too(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        first, second = bench.connect(), bench.connect()
        first.create("forced:endless")
        await first.until("response.output_text.delta")
        first.create("forced:two", event_id="e")
        await turns(3)
        second.create("forced:two", event_id="e")
        second.append(result(await second.until("response.done")))
        completed = await second.until("response.completed")
        assert assembled(second.heard) == completed["response"]["output"]
        first.hang_up()
        await bench.check_nothing_is_left()


async def test_a_create_whose_connection_went_before_it_started_is_made_anew(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        first, second = bench.connect(), bench.connect()
        first.create("forced:endless")
        await first.until("response.output_text.delta")
        first.create("forced:two", event_id="e")
        await turns(3)
        first.hang_up()
        await bench.settle()
        second.create("forced:two", event_id="e")
        await second.until("response.done")
        second.hang_up()
        await bench.check_nothing_is_left()


async def test_a_run_that_ended_with_its_connection_is_shown_to_who_asks_again(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        first, second = bench.connect(), bench.connect()
        first.create("forced:two", event_id="e")
        await first.until("response.done")
        first.hang_up()
        await bench.settle()
        second.create("forced:two", event_id="e")
        second.create("forced:long")
        ended = await second.until("response.incomplete")
        assert ended["response"]["incomplete_details"] == {"reason": "cancelled"}
        await second.until("response.completed")
