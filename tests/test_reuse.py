"""What is found again: KV by content, within a key or across keys, and what stored tokens are good for."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.edge.access import Caller
from protocol.service import engine_config
from protocol.settings import Settings
from tests.harness import Json, Peer, said, serving

SCRIPTS = {"two": [[said("first")], [said("second")]]}
LONG = "one two three four five six seven eight nine ten " * 10


async def turn(peer: Peer, **fields: Any) -> Json:
    """One chained Response of the script, as it ended."""
    peer.create("forced:two", lifecycle="chained", **fields)
    response: Json = (await peer.until("response.completed"))["response"]
    return response


def cached(response: Json) -> int:
    """Tokens of the input whose KV was there."""
    tokens: int = response["usage"]["input_tokens_details"]["cached_tokens"]
    return tokens


async def test_the_same_prompt_is_found_by_content(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input=LONG)
        again = await turn(peer, input=LONG)
        block = bench.scheduler.info.block_size
        assert cached(first) == 0
        assert again["usage"]["input_tokens"] - cached(again) <= block, "at most one block is prefilled again"


async def test_a_conversation_sent_whole_costs_one_block_a_turn(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input=[{"role": "user", "content": LONG}], store=False)
        history = [
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": "first"},
            {"role": "user", "content": "and?"},
        ]
        second = await turn(peer, input=history, store=False)
        new = (
            second["usage"]["input_tokens"] - first["usage"]["input_tokens"] - first["usage"]["output_tokens"]
        )
        assert second["work"]["tokens_prefilled"] <= new + bench.scheduler.info.block_size


@pytest.mark.parametrize("shared", [False, True])
async def test_what_one_key_sent_is_found_for_another_only_if_told(autojump_clock: Any, shared: bool) -> None:
    async with serving(SCRIPTS, share_prefix=shared) as bench:
        one, other = bench.connect(caller=Caller("one")), bench.connect(caller=Caller("other"))
        await turn(one, input=LONG)
        assert (cached(await turn(other, input=LONG)) > 0) is shared


@pytest.mark.parametrize("rehydrate", ["ledger", "items"])
async def test_a_stored_conversation_goes_on_from_its_tokens_or_its_items(
    autojump_clock: Any, rehydrate: Any
) -> None:
    async with serving(SCRIPTS, rehydrate=rehydrate) as bench:
        peer = bench.connect()
        first = await turn(peer, input=LONG)
        peer.hang_up()
        second = await turn(bench.connect(), input="and?", previous_response_id=first["id"])
        rendered = second["work"]["characters_rendered"] - first["work"]["characters_rendered"]
        assert (rendered > 0) is (rehydrate == "items")
        assert second["output"][0]["content"][0]["text"] == "second"


def test_the_prefix_cache_can_be_switched_off() -> None:
    assert engine_config(Settings(prefix_cache="on")).prefix_cache
    assert not engine_config(Settings(prefix_cache="off")).prefix_cache
