"""Scripts and first steps that the tests of held runs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.harness import Json, Peer, call, custom_call, said, thought

TWO_LEGS = [[said("Let me look."), call("read_file", path="a")], [said("It is empty.")]]
PARALLEL = [
    [
        thought("Three at once."),
        call("read_file", path="a"),
        custom_call("apply_patch", "*** End"),
        call("run_tests"),
    ],
    [said("All done.")],
]
LONG_TALK = [[said("word " * 60)], [said("And more.")]]
LONG_THEN_CALL = [[said("word " * 50), call("read_file", path="a")], [said("done")], [said("extra")]]
ENDS = ("response.completed", "response.incomplete", "response.failed")
SCRIPTS = {"two": TWO_LEGS, "parallel": PARALLEL, "long": LONG_TALK, "calling": LONG_THEN_CALL}


def types(events: Sequence[Json]) -> list[str]:
    """What kinds of events these are."""
    return [event["type"].removeprefix("response.") for event in events]


def own(peer: Peer) -> list[Json]:
    """The numbered events: all but error frames."""
    return [event for event in peer.heard if event["type"] != "error"]


async def held(peer: Peer, model: str = "forced:two", **fields: Any) -> Json:
    """Create a run and wait until it is held; its `response.done`."""
    peer.create(model, **fields)
    return await peer.until("response.done")
