"""The models a server offers: defaults of sampling, and scripts of forced legs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from engine.messages import Sampling
from protocol.models import ScriptError, generation_config, load_scripts, sampling_defaults
from protocol.wire import Create, CustomToolCall, FunctionCall, Message, Reasoning
from tests.harness import Json, call, custom_call, said, serving, thought, write_scripts

LEG = [
    thought("hm"),
    said("Let me look."),
    call("read_file", path="a"),
    custom_call("apply_patch", "*** End"),
]


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_scripts_are_files_and_folders_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "more"
    folder.mkdir()
    write(folder, b='[{"type":"message","content":"b"}]\n\n', a="[]\n")
    write(tmp_path, single='[{"type":"message","content":"one"}]')
    scripts = load_scripts([tmp_path / "single.jsonl", folder])
    assert list(scripts) == ["single", "a", "b"]
    assert scripts["b"] == [[Message("assistant", "b")]]
    assert scripts["a"] == [[]]


def test_a_leg_has_all_kinds_of_items_that_a_model_says(tmp_path: Path) -> None:
    leg = load_scripts(write_scripts(tmp_path, {"s": [LEG]}))["s"][0]
    assert [type(item) for item in leg] == [Reasoning, Message, FunctionCall, CustomToolCall]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nope", "not JSON"),
        ("{}", "a leg is a JSON array"),
        ("[5]", "a leg is a JSON array"),
        ('[{"type":"function_call"}]', "name"),
        ('[{"type":"web_search_call"}]', "cannot be said by a model"),
    ],
)
def test_a_script_that_cannot_be_used_says_where(line: str, why: str, tmp_path: Path) -> None:
    write(tmp_path, bad=f'[{{"type":"message","content":"fine"}}]\n{line}\n')
    with pytest.raises(ScriptError) as unusable:
        load_scripts([tmp_path])
    assert "bad.jsonl:2" in str(unusable.value)
    assert why in str(unusable.value)


def test_two_scripts_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    write(tmp_path, same="[]")
    write(tmp_path / "more", same="[]")
    with pytest.raises(ScriptError, match="another script is called same"):
        load_scripts([tmp_path / "same.jsonl", tmp_path / "more"])


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="nowhere"):
        load_scripts([tmp_path / "nowhere.jsonl"])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, Sampling()),
        ({"do_sample": False, "temperature": 0.3}, Sampling()),
        ({"do_sample": True}, Sampling(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1},
            Sampling(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1),
        ),
    ],
)
def test_a_checkpoint_recommends_how_to_sample(
    config: Json | None, expected: Sampling, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(generation_config(tmp_path)) == expected


async def test_a_leg_without_a_limit_has_the_one_that_the_checkpoint_recommends(
    autojump_clock: trio.abc.Clock,
) -> None:
    """Models ramble; a script's legs are as long as they are, and a request's own limit counts alone."""
    async with serving({"long": [[{"type": "message", "content": "word " * 40}]]}) as bench:
        bench.model("random").longest_leg = 5
        peer = bench.connect()
        peer.create("random", lifecycle="chained", temperature=1.0, seed=1)
        response = (await peer.until("response.incomplete"))["response"]
        assert response["incomplete_details"]["reason"] == "max_output_tokens"
        assert response["usage"]["output_tokens"] == 5
        peer.create("random", lifecycle="chained", temperature=1.0, seed=1, max_output_tokens=7)
        response = (await peer.until("response.incomplete"))["response"]
        assert response["usage"]["output_tokens"] == 7
        peer.create("forced:long", lifecycle="chained")
        assert (await peer.until("response.completed"))["response"]["usage"]["output_tokens"] > 40


async def test_a_request_changes_only_what_it_names(autojump_clock: trio.abc.Clock) -> None:
    async with serving() as bench:
        model = bench.model("calling")
        assert model.sampling(Create(seed=3)) == Sampling(temperature=1.0, seed=3)
        asked: dict[str, Any] = {"temperature": 0.0, "top_p": 0.5, "top_k": 7, "min_p": 0.1}
        asked |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "seed": 0}
        assert model.sampling(Create(**asked)) == Sampling(**asked)


async def test_a_forced_model_says_its_script_and_then_nothing(autojump_clock: trio.abc.Clock) -> None:
    async with serving({"s": [LEG, [said("Done.")]]}) as bench:
        model = bench.model("forced:s")
        assert model.forced
        assert bench.model("random").forced_turn(0) is None
        assert not bench.model("random").forced
        stop = model.dialect.stop_tokens[0]
        first, second, third = (model.forced_turn(turn) for turn in range(3))
        assert first is not None
        assert second is not None
        assert first[-1] == second[-1] == stop
        assert first != second
        assert third == [stop]
        described = bench.service.models()
        assert [each["id"] for each in described] == ["random", "forced:s", "calling"]
        assert {"id", "object", "created", "owned_by"} <= described[0].keys()


@pytest.mark.parametrize("history", [0, 1, 2, 3])
async def test_a_script_goes_on_where_a_history_ends(history: int, autojump_clock: trio.abc.Clock) -> None:
    async with serving({"s": [[said(f"turn {turn}")] for turn in range(3)]}) as bench:
        peer = bench.connect()
        turns = [
            item
            for turn in range(history)
            for item in ({"role": "user", "content": "next"}, said(f"turn {turn}"))
        ]
        peer.create("forced:s", input=[*turns, {"role": "user", "content": "next"}])
        completed = await peer.until("response.completed")
        texts = [item["content"][0]["text"] for item in completed["response"]["output"]]
        assert texts == ([f"turn {history}"] if history < 3 else [])


async def test_what_is_read_back_is_what_the_script_says(autojump_clock: trio.abc.Clock) -> None:
    async with serving({"s": [LEG]}) as bench:
        peer = bench.connect()
        peer.create("forced:s")
        output = (await peer.until("response.done"))["response"]["output"]
        assert [item["type"] for item in output] == [item["type"] for item in LEG]
        assert output[0]["content"][0]["text"] == "hm"
        assert output[1]["content"][0]["text"] == "Let me look."
        assert json.loads(output[2]["arguments"]) == {"path": "a"}
        assert output[3]["input"] == "*** End"


async def test_a_model_leaves_room_for_one_more_turn(autojump_clock: trio.abc.Clock) -> None:
    async with serving(engine={"max_context": 500}) as bench:
        model = bench.model("random")
        assert model.max_context == 500
        closing = len(model.dialect.tokenize(model.dialect.turn_end(-1)))
        assert model.max_input == 500 - closing - len(model.turn_start) - 1
