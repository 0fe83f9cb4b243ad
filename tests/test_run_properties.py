"""Whatever clients do, in whatever order: every response ends once, numbers go up, all KV comes back, and the
connection serves the next request.

Strategy: hypothesis makes lists of actions for two clients, one of which may be a prototype's. They are done
one after the other on a virtual clock, with as many turns of the event loop between them as the list says.
Then every timeout passes, and the books are checked. That nothing is ever stuck is `serving`'s deadline.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import (
    Bench,
    Json,
    Peer,
    answer,
    assembled,
    call,
    custom_call,
    result,
    said,
    serving,
    thought,
    turns,
    user,
)

SCRIPTS = {
    "two": [[said("Let me look."), call("read_file", path="a")], [said("It is empty.")]],
    "parallel": [
        [thought("hm"), call("read_file", path="a"), custom_call("apply_patch", "x"), call("run_tests")],
        [call("read_file", path="b")],
        [said("All done.")],
    ],
    "long": [[said("word " * 60)], [said("And more.")], [call("read_file", path="c")], [said("So.")]],
}
ENDS = ("response.completed", "response.incomplete", "response.failed")
HOLD_TIMEOUT = 600
LONG = 10 * HOLD_TIMEOUT  # s; every timeout but a connection's lifetime has passed

lanes = st.sampled_from([None, None, "a", "b"])
event_ids = st.sampled_from([None, None, None, "e1", "e2"])
actions = st.one_of(
    st.tuples(
        st.just("create"),
        lanes,
        event_ids,
        st.sampled_from(
            [
                {"model": "forced:two"},
                {"model": "forced:parallel"},
                {"model": "forced:parallel", "parallel_tool_calls": False},
                {"model": "forced:long", "max_output_tokens": 90},
                {"model": "calling", "seed": 1, "temperature": 1.0, "max_output_tokens": 60},
                {"model": "calling", "seed": 2, "max_output_tokens": 40, "parallel_tool_calls": False},
                {"model": "random", "max_output_tokens": 20, "temperature": 1.0},
                {"model": "forced:two", "generate": False},
                {"model": "forced:two", "input": "word " * 3000},
                {"model": "nobody"},
            ]
        ),
    ),
    st.tuples(
        st.just("append"),
        lanes,
        event_ids,
        st.sampled_from(["all", "all", "first", "last", "twice", "unknown", "echoed", "long", "nothing"]),
    ),
    st.tuples(
        st.just("continue"),
        lanes,
        event_ids,
        st.sampled_from(["forced:two", "forced:long", "forced:parallel", "calling", "nobody"]),
        lanes,
    ),
    st.tuples(st.just("message"), lanes, event_ids),
    st.tuples(st.just("steer"), lanes),
    st.tuples(st.just("cancel"), lanes),
    st.tuples(st.just("raw"), st.sampled_from(["nope", "{}", '{"type":"response.append"}'])),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 16, HOLD_TIMEOUT - 1, HOLD_TIMEOUT + 1])),
    st.tuples(st.just("turns"), st.integers(0, 40)),
    st.tuples(st.just("turns"), st.integers(0, 40)),
    st.tuples(st.just("stall"), st.integers(0, 5)),
    st.just(("go on",)),
    st.just(("drop",)),
    st.just(("crash",)),
)


@dataclass
class Client:
    """A client that comes back whenever its connection is gone."""

    bench: Bench
    prototype: bool
    peers: list[Peer] = field(default_factory=list)
    creates: Counter[int] = field(default_factory=Counter)  # by connection, those without an event_id

    @property
    def peer(self) -> Peer:
        if not self.peers or self.peers[-1].closed is not None:
            self.peers.append(self.bench.connect(prototype=self.prototype))
        return self.peers[-1]

    def last(self, lane: str | None, *types: str) -> Json | None:
        """The newest event of these types on a lane."""
        self.peer.read_now()
        for event in reversed(self.peer.heard):
            if event["type"] in types and event.get("stream_id") == lane:
                return event
        return None

    async def do(self, action: tuple[Any, ...]) -> None:
        kind, *rest = action
        on = {} if not rest or rest[0] is None else {"stream_id": rest[0]}
        tried = {} if len(rest) < 2 or rest[1] is None else {"event_id": rest[1]}
        match kind:
            case "create":
                self.peer.create(**{**on, **tried, **rest[2]})
                self.creates[len(self.peers)] += not tried
            case "continue":
                parent = self.last(rest[3], *ENDS)
                self.peer.create(
                    rest[2],
                    **{"input": outputs(parent), "lifecycle": "chained", "max_output_tokens": 80},
                    **({} if parent is None else {"previous_response_id": parent["response"]["id"]}),
                    **on,
                    **tried,
                )
                self.creates[len(self.peers)] += not tried
            case "append":
                done = self.last(rest[0], "response.done")
                if done is not None:
                    self.peer.append(*items_of(done, rest[2]), **on, **tried)
            case "message":
                self.peer.append(user("go on"), **on, **tried)
            case "steer" | "cancel":
                event = self.last(rest[0], "response.created", "response.done")
                if event is not None and kind == "steer":
                    self.peer.say(
                        "response.steer", previous_response_id=event["response"]["id"], input="go on"
                    )
                elif event is not None:
                    self.peer.say("response.cancel", response_id=event["response"]["id"])
            case "raw":
                self.peer.say_raw(rest[0])
            case "wait":
                await trio.sleep(rest[0])
            case "turns":
                await turns(rest[0])
            case "stall":
                self.peer.stall(rest[0])
            case "go on":
                self.peer.go_on()
            case "drop":
                self.peer.hang_up()
            case "crash":
                self.bench.engine.crash()


def outputs(ended: Json | None) -> list[Json]:
    """What continues a Response: a result for each of its calls, and a word of the user."""
    calls = [] if ended is None else [item for item in ended["response"]["output"] if "call_id" in item]
    results = [
        {"type": f"{each['type']}_output", "call_id": each["call_id"], "output": "1"} for each in calls
    ]
    return [*results, user("go on")]


def items_of(done: Json, kind: str) -> list[Json]:
    """What an append of this kind has for a run that waits."""
    required = done["required_input"]
    match kind:
        case "all":
            return [answer(each) for each in required]
        case "first" | "last":
            return [answer(required[0 if kind == "first" else -1])]
        case "twice":
            return [answer(required[0]), answer(required[0])]
        case "unknown":
            return [*[answer(each) for each in required], {**answer(required[0]), "call_id": "call_x"}]
        case "echoed":
            return [*done["response"]["output"], *[answer(each) for each in required], user("go on")]
        case "long":
            return [answer(required[0], "word " * 3000)]
    return []


def showings(events: list[Json]) -> dict[tuple[str, int], list[Json]]:
    """The numbered events of each response, each time that it was shown from its start."""
    times: Counter[str] = Counter()
    current: dict[str | None, tuple[str, int]] = {}  # by lane: the response that is being shown
    found: dict[tuple[str, int], list[Json]] = {}
    for event in events:
        lane = event.get("stream_id")
        if event["type"] == "response.created":
            response_id = event["response"]["id"]
            times[response_id] += 1
            current[lane] = response_id, times[response_id]
            found[current[lane]] = []
        if "response" in event or not event["type"].endswith(("error", ".failed", ".pending")):
            found[current[lane]].append(event)
    return found


def check_connection(peer: Peer, creates: int) -> None:
    errors = sum(event["type"] == "error" for event in peer.heard)
    shown = showings(peer.heard)
    for events in shown.values():
        items = assembled(events)  # numbers from 0 up by one, nothing after the end
        ends = [event for event in events if event["type"] in ENDS]
        if ends:
            assert ends[0]["response"]["output"] == items
            work = ends[0]["response"]["work"]
            assert (work["pre_passes"], work["post_passes"]) == (1, 1) or not items
    if peer.closed is None:
        assert len(shown) + errors >= creates, "every create is answered"


async def act(script: list[tuple[int, tuple[Any, ...]]], prototype: bool) -> None:
    async with serving(
        SCRIPTS, hold_timeout=HOLD_TIMEOUT, engine={"max_context": 2048}, connection_lifetime=10 * LONG
    ) as bench:
        clients = [Client(bench, prototype), Client(bench, prototype=False)]
        for who, action in script:
            await clients[who].do(action)
        for client in clients:
            for peer in client.peers:
                peer.go_on()
        await trio.sleep(LONG)
        await bench.settle()
        assert not bench.runs
        for client in clients:
            for number, peer in enumerate(client.peers, 1):
                peer.read_now()
                check_connection(peer, client.creates[number])
        heard = [peer.heard for client in clients for peer in client.peers if peer.closed is None]
        unended = sum(
            not any(event["type"] in ENDS for event in events)
            for each in heard
            for events in showings(each).values()
        )
        excused = sum(
            event["type"] == "error" and event["error"]["code"] == "response_taken_over"
            for each in heard
            for event in each
        )
        excused += bench.service._ended["superseded"] if prototype else 0
        assert unended <= excused, "what is created ends, where it is shown"
        for client in clients:
            peer = client.peer
            before = len(peer.heard)
            peer.create("forced:two", stream_id="a")
            done = await peer.until("response.done")
            peer.append(result(done), stream_id="a")
            completed = await peer.until("response.completed")
            assert assembled(peer.heard[before:]) == completed["response"]["output"]
        for client in clients:
            client.peer.hang_up()  # chains keep their KV until then
        await bench.check_nothing_is_left()


@given(script=st.lists(st.tuples(st.integers(0, 1), actions), max_size=25), prototype=st.booleans())
def test_whatever_clients_do_every_response_ends_once_and_nothing_is_left(
    script: list[tuple[int, tuple[Any, ...]]], prototype: bool
) -> None:
    trio.run(act, script, prototype, clock=trio.testing.MockClock(autojump_threshold=0))
