"""The agent: its loop against scripted runs, how a run looks, and the command as a process of its own."""

from __future__ import annotations

import argparse
import io
import json
import signal
import sys
import unicodedata
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from fake_responses import Peer, ScriptedLeg, peer_over, serve_script
from harness import Bench, call, said, serving
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from protocol.client import Connection, ConnectionLost, ServerError, connect
from protocol.client.agent import AgentResult, Call, Leg, Tokens, run_agent
from protocol.edge.rest import Rest
from protocol.edge.server import Server
from protocol.settings import Settings
from protocol.websocket import serve_connection
from scripts import agent, cli
from scripts.timeline import Timeline, arguments, duration, one_line, printable
from scripts.tools import TOOLS, Workspace

ROOT = Path(__file__).parent.parent
URL = "ws://fake.test/v1/responses"
NASTY = "\x1b[2J\x1b]0;owned\x07 [bold]loud[/bold] \x9b31m \u202eevil\u202c \r\x08"

LEGS = (
    ScriptedLeg(calls=[("c1", "list_files", '{"folder": "oak"}')], prefilled=300, sampled=18),
    ScriptedLeg(
        text="Both at once.",
        calls=[
            ("c2", "read_file", '{"path": "oak/elm.txt"}'),
            ("c3", "read_file", '{"path": "oak/fern.txt"}'),
        ],
        prefilled=20,
        sampled=40,
    ),
    ScriptedLeg(text="The total is 42.", prefilled=30, sampled=9),
)


@asynccontextmanager
async def scripted(legs: Sequence[ScriptedLeg]) -> AsyncIterator[tuple[Connection, list[dict[str, Any]]]]:
    """A connection to a server that plays `legs`, and the frames that the server gets."""
    ours, theirs = trio.testing.memory_stream_pair()
    received: list[dict[str, Any]] = []

    async def serve() -> None:
        await serve_script(await peer_over(theirs, nursery), legs, received)

    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            async with connect(URL, stream=ours) as connection:
                yield connection, received
            nursery.cancel_scope.cancel()


async def run(connection: Connection, call_tool: Any, **options: Any) -> AgentResult:
    return await run_agent(
        connection, model="m", instructions=None, tools=[], task="Add.", call_tool=call_tool, **options
    )


async def say_name(name: str, arguments: str) -> str:
    return f"{name} {arguments}"


async def never_answer(name: str, arguments: str) -> str:
    await trio.sleep_forever()
    raise AssertionError


async def test_a_run_of_three_legs(autojump_clock):
    async with scripted(LEGS) as (connection, received):
        result = await run(connection, say_name, seed=7)
    assert (result.status, result.reason, result.answer) == ("completed", "", "The total is 42.")
    assert [call.name for call in result.calls] == ["list_files", "read_file", "read_file"]
    assert result.calls[1].output == 'read_file {"path": "oak/elm.txt"}'
    create, first, second = received
    assert (create["lifecycle"], create["seed"]) == ("held", 7)
    assert create["input"] == [{"type": "message", "role": "user", "content": "Add."}]
    assert [frame["response_id"] for frame in (first, second)] == ["resp_1", "resp_1"]
    assert [item["call_id"] for item in second["input"]] == ["c2", "c3"]


async def test_each_leg_has_its_own_tokens_also_the_last_whose_event_counts_the_run(autojump_clock):
    async with scripted(LEGS) as (connection, _received):
        result = await run(connection, say_name)
    assert [leg.tokens for leg in result.legs] == [
        Tokens(18, 300, 0),
        Tokens(40, 20, 318),
        Tokens(9, 30, 378),
    ]
    assert result.tokens.sampled == result.work["tokens_sampled"] == 67


async def test_parallel_calls_are_made_in_parallel_and_answered_in_order(autojump_clock):
    begun: list[str] = []
    both = trio.Event()

    async def wait_for_the_other(name: str, arguments: str) -> str:
        if name == "list_files":
            return "oak:"
        begun.append(arguments)
        if len(begun) == 2:
            both.set()
        await both.wait()
        await trio.sleep(1 if "elm" in arguments else 0)  # the first call answers last
        return arguments

    async with scripted(LEGS) as (connection, received):
        result = await run(connection, wait_for_the_other)
    assert [item["call_id"] for item in received[-1]["input"]] == ["c2", "c3"]
    assert [call.seconds for call in result.calls] == pytest.approx([0, 1, 0], abs=0.01)
    assert result.legs[1].waiting == pytest.approx(1, abs=0.01)


async def test_what_watches_sees_every_state_once_it_is_there(autojump_clock):
    seen: list[tuple[int, str, int]] = []

    def watch(result: AgentResult) -> None:
        seen.append((len(result.legs), result.status, sum(call.output is not None for call in result.calls)))

    async with scripted(LEGS) as (connection, _received):
        await run(connection, say_name, watch=watch)
    assert seen == sorted(seen, key=lambda state: (state[0], state[2], state[1] == "completed"))
    assert seen[0] == (1, "in_progress", 0)
    assert seen[-1] == (3, "completed", 3)


async def test_too_many_calls_end_the_run_on_both_sides(autojump_clock):
    async with scripted(LEGS) as (connection, received):
        result = await run(connection, say_name, max_calls=2)
    assert (result.status, result.reason) == ("incomplete", "max_calls")
    assert received[-1]["type"] == "response.cancel"
    assert [call.output is None for call in result.calls] == [False, True, True]


async def test_a_cancelled_agent_cancels_its_run(autojump_clock):
    async with scripted(LEGS) as (connection, received):
        with trio.move_on_after(5):
            await run(connection, never_answer)
        assert received[-1] == {"type": "response.cancel", "response_id": "resp_1", "stream_id": "lane-1"}


@asynccontextmanager
async def rude_server(behaviour: Any) -> AsyncIterator[Connection]:
    ours, theirs = trio.testing.memory_stream_pair()

    async def serve() -> None:
        peer = await peer_over(theirs, nursery)
        await behaviour(peer, await peer.receive())

    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            async with connect(URL, stream=ours) as connection:
                yield connection
            nursery.cancel_scope.cancel()


async def test_a_refused_create(autojump_clock):
    async def refuse(peer: Peer, create: dict[str, Any]) -> None:
        await peer.refuse("model_not_found", create["stream_id"], status=404)

    async with rude_server(refuse) as connection:
        with pytest.raises(ServerError, match="model_not_found"):
            await run(connection, say_name)


async def test_a_server_that_goes_in_the_middle_of_a_leg(autojump_clock):
    async def go(peer: Peer, create: dict[str, Any]) -> None:
        await peer.begin(create)
        await trio.aclose_forcefully(peer.websocket._stream)

    seen: list[AgentResult] = []
    async with rude_server(go) as connection:
        with pytest.raises(ConnectionLost):
            await run(connection, say_name, watch=seen.append)
    assert seen[-1].status == "in_progress"


async def test_a_failed_response_tells_why(autojump_clock):
    async def fail(peer: Peer, create: dict[str, Any]) -> None:
        await peer.begin(create)
        error = {"code": "server_error", "message": "The engine is gone."}
        failed = {"id": "resp_1", "status": "failed", "error": error}
        await peer.send("response.failed", create["stream_id"], response=failed)

    async with rude_server(fail) as connection:
        result = await run(connection, say_name)
    assert (result.status, result.reason) == ("failed", "The engine is gone.")


async def test_an_event_that_makes_no_sense_is_survived(autojump_clock):
    async def babble(peer: Peer, create: dict[str, Any]) -> None:
        lane = create["stream_id"]
        await peer.begin(create)
        await peer.send("response.function_call_arguments.delta", lane, delta="{}")
        never_begun = {"type": "function_call", "call_id": "never"}
        await peer.send("response.output_item.done", lane, item=never_begun)
        await peer.send("response.output_item.added", lane)
        completed = {"id": "resp_1", "status": "completed"}
        await peer.send("response.completed", lane, response=completed)

    async with rude_server(babble) as connection:
        assert (await run(connection, say_name)).status == "completed"


# ---- how it looks ------------------------------------------------------------------------------------------


def drawn(result: AgentResult, **console: Any) -> str:
    """What a console shows of a finished result."""
    file = io.StringIO()
    timeline = Timeline(Console(file=file, **console))
    timeline.heading("fermata agent", "model", "Add.")
    timeline.watch(result)
    timeline.conclusion(result, 1.25)
    return file.getvalue()


def example(text: str = "The total is 42.") -> AgentResult:
    call = Call("c1", "list_files", '{"folder": "oak"}', "oak:\nelm.txt\nend", began=1.5, ended=1.504)
    first = Leg(1, 0.0, 0.253, 1.5, 1.505, text="Looking.", calls=[call], tokens=Tokens(18, 312, 0))
    last = Leg(2, 1.505, 1.508, 1.6, None, text=text, tokens=Tokens(9, 30, 330))
    times = {"prefill": 12.5, "safety_in": 0.0}
    work = {"legs": 2, "tokens_sampled": 27, "pre_passes": 1, "times_ms": times}
    return AgentResult("resp_1", "completed", "", [first, last], work)


def test_a_file_gets_plain_lines():
    assert (
        drawn(example())
        == """\
fermata agent  model
> Add.

 leg                                  kept  prefilled  sampled  first token     tools   waiting
   1  ++++++++++++++++++++++++++##       0        312       18       253 ms    4.0 ms    5.0 ms
      Looking.
      list_files folder=oak                             4.0 ms  oak: elm.txt end
   2  -------------------------++#     330         30        9       3.0 ms

      The total is 42.

      work of the whole run                time
      legs                            2    prefill         12 ms  ━━━━━━━━━━━━━━━━━━━━
      passes before inference         1
      tokens sampled                 27

completed · 2 legs · 1 call · 27 tokens · 1.2 s
"""
    )


def test_a_leg_is_printed_when_it_is_finished_and_once():
    file = io.StringIO()
    timeline = Timeline(Console(file=file))
    whole = example()
    partial_result = AgentResult("resp_1", legs=whole.legs[:1])
    for _ in range(3):
        timeline.watch(partial_result)
    partial_result.legs.append(Leg(2, 1.505))
    timeline.watch(partial_result)
    assert file.getvalue().count("list_files") == 1
    timeline.watch(whole)
    assert file.getvalue().count("\n   2  ") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_text_of_models_and_tools_steers_no_terminal(terminal):
    nasty_call = Call("c", NASTY, NASTY, NASTY, began=0.0, ended=0.0)
    leg = Leg(1, 0.0, 0.0, 0.0, 0.0, text=NASTY, calls=[nasty_call], tokens=Tokens(1, 1, 1))
    work = {"characters_classified": {NASTY: 3}, "times_ms": {NASTY: 1.0}}
    result = AgentResult("resp_1", "failed", NASTY, [leg, Leg(2, 0.0, text=NASTY, tokens=Tokens())], work)
    shown = drawn(result, force_terminal=terminal, color_system=None, width=200)
    assert "\x1b" not in shown
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert "[bold]loud[/bold]" in shown
    assert "\\x1b[2J" in shown


def test_a_narrow_terminal_loses_the_bar_first():
    lines = drawn(example(), force_terminal=True, color_system=None, width=70).splitlines()
    leg = next(line for line in lines if line.startswith("   1"))
    assert leg.split() == ["1", "0", "312", "18", "253", "ms", "4.0", "ms", "5.0", "ms"]


async def test_the_leg_that_goes_on_is_drawn_live(autojump_clock):
    file = io.StringIO()
    timeline = Timeline(Console(file=file, force_terminal=True, color_system=None, width=100))
    result = AgentResult(legs=[Leg(1, trio.current_time())])
    async with timeline, trio.open_nursery() as nursery:
        timeline.watch(result)
        nursery.start_soon(timeline.draw)
        await trio.sleep(1)
        assert "waiting for the first token, 0.9 s" in file.getvalue()
        result.legs[0].first_token = trio.current_time()
        result.legs[0].calls.append(Call("c", "count", '{"path": "o'))
        await trio.sleep(1)
        assert 'count {"path": "o' in file.getvalue()
        timeline._drawing.cancel()


@given(st.text())
def test_what_is_printable_holds_no_control(text):
    for character in printable(text):
        harmless = unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        assert harmless or character in "\n\t\u200c\u200d"
    assert "\n" not in one_line(text, 40)
    assert len(one_line(text, 40)) <= 40


@given(st.text(st.characters(categories=["L", "N", "P"])))
def test_ordinary_text_is_printed_as_it_is(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"path": "oak"}', "path=oak"),
        ('{"n": 1, "deep": {"a": [1]}}', 'n=1 deep={"a": [1]}'),
        ("{}", ""),
        ('{"path": "oa', '{"path": "oa'),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments(text, shown):
    assert arguments(text) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, ""), (0, "0.0 ms"), (0.00412, "4.1 ms"), (0.0412, "41 ms"), (1, "1.0 s"), (4321, "4,321.0 s")],
)
def test_durations(seconds, shown):
    assert duration(seconds) == shown


# ---- the command -------------------------------------------------------------------------------------------


@asynccontextmanager
async def tcp_server(legs: Sequence[ScriptedLeg]) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A scripted server on a free port: its URL, and the frames that it gets."""
    received: list[dict[str, Any]] = []

    async def handle(stream: trio.SocketStream) -> None:
        async with trio.open_nursery() as nursery:
            await serve_script(await peer_over(stream, nursery), legs, received)
            nursery.cancel_scope.cancel()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(partial(trio.serve_tcp, handle, 0, host="127.0.0.1"))
            port = listener.socket.getsockname()[1]
            yield f"ws://127.0.0.1:{port}/v1/responses", received
            nursery.cancel_scope.cancel()


def command(folder: Path, url: str, *options: str) -> list[str]:
    fermata = [sys.executable, "-m", "scripts.cli", "agent"]
    defaults = ["--workspace", str(folder), "--url", url, "--model", "m"]
    return [*fermata, *defaults, *options, "Add the numbers."]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "oak").mkdir()
    (tmp_path / "oak" / "elm.txt").write_text("17\n")
    (tmp_path / "oak" / "fern.txt").write_text("25\n")
    return tmp_path


async def test_the_command_works_in_its_folder_and_prints_plain_lines(folder):
    async with tcp_server(LEGS) as (url, received):
        done = await trio.run_process(command(folder, url), capture_stdout=True, cwd=ROOT)
    assert received[-1]["input"][0]["output"] == "oak/elm.txt: 17\nnext: oak/fern.txt"
    lines = done.stdout.decode().splitlines()
    assert lines[1] == "> Add the numbers."
    assert "      The total is 42." in lines
    assert lines[-1].startswith("completed · 3 legs · 3 calls · 67 tokens")
    assert b"\x1b" not in done.stdout


async def test_ctrl_c_cancels_the_run_and_exits_with_130(folder):
    begun = trio.Event()
    frames: list[str] = []

    async def handle(stream: trio.SocketStream) -> None:
        async with trio.open_nursery() as nursery:
            peer = await peer_over(stream, nursery)
            create = await peer.receive()
            await peer.begin(create)
            begun.set()
            frames.append((await peer.receive())["type"])
            cut = {"id": "resp_1", "status": "incomplete"}
            await peer.send("response.incomplete", create["stream_id"], response=cut)
            nursery.cancel_scope.cancel()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(partial(trio.serve_tcp, handle, 0, host="127.0.0.1"))
            url = f"ws://127.0.0.1:{listener.socket.getsockname()[1]}/v1/responses"
            words = partial(trio.run_process, command(folder, url), check=False, cwd=ROOT)
            process = await nursery.start(partial(words, capture_stdout=True, capture_stderr=True))
            await begun.wait()
            process.send_signal(signal.SIGINT)
            await process.wait()
            nursery.cancel_scope.cancel()
    assert (process.returncode, frames) == (130, ["response.cancel"])


async def run_command(folder: Path, url: str, *options: str) -> int:
    """The exit code of `fermata agent`, run in this process."""
    parser = argparse.ArgumentParser()
    agent.add_arguments(parser)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            exit_code = await agent.run_task(nursery, parser.parse_args(command(folder, url, *options)[4:]))
            nursery.cancel_scope.cancel()
    return exit_code


async def test_the_command_prints_json(folder, capsys):
    async with tcp_server(LEGS) as (url, received):
        assert (
            await run_command(folder, url, "--json", "--temperature", "0", "--instructions", "Be brief.") == 0
        )
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], told["answer"]) == ("completed", "The total is 42.")
    assert [leg["tokens_kept"] for leg in told["legs"]] == [0, 318, 378]
    assert told["legs"][1]["calls"][1]["output"] == "oak/fern.txt: 25\nnext: none"
    assert (received[0]["temperature"], received[0]["instructions"]) == (0, "Be brief.")
    assert "seed" not in received[0]


@pytest.mark.parametrize(
    ("options", "exit_code", "complaint"),
    [
        (["--max-calls", "1"], 1, ""),
        (["--workspace", "/nowhere/at/all"], 2, "--workspace /nowhere/at/all: No such file"),
        (["--url", "http://127.0.0.1:1"], 1, "not a ws://"),
        (["--url", "ws://127.0.0.1:1/v1/responses"], 1, "Cannot connect to 127.0.0.1:1"),
    ],
)
async def test_other_ends_have_other_exit_codes(folder, capsys, options, exit_code, complaint):
    async with tcp_server(LEGS) as (url, _received):
        assert await run_command(folder, url, *options) == exit_code
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == bool(complaint)


def test_wrong_options_are_refused_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["agent", "--workspace", str(tmp_path), "--max-calls", "0", "Add."])
    assert capsys.readouterr().err == "fermata agent: argument --max-calls: 0 is not a whole number above 0\n"


# ---- the real server ---------------------------------------------------------------------------------------

REAL_LEGS = [
    [call("list_files", folder="oak")],
    [said("Both at once."), call("read_file", path="oak/elm.txt"), call("read_file", path="oak/fern.txt")],
    [call("write_file", path="oak/sum.txt", text="42")],
    [said("The total is 42.")],
]


@asynccontextmanager
async def real_server(bench: Bench) -> AsyncIterator[Connection]:
    """A connection to the real server: its edge, its service and an engine, over streams in memory."""
    ours, theirs = trio.testing.memory_stream_pair()
    serve_socket = partial(serve_connection, service=bench.service)
    edge = Server(Settings(), bench.service, Rest(bench.service), serve_socket)
    bench.nursery.start_soon(edge.serve_stream, theirs)
    async with connect("ws://127.0.0.1:8765/v1/responses", stream=ours) as connection:
        yield connection


async def test_real_tools_through_the_real_server(autojump_clock, folder):
    workspace = Workspace(folder)

    async def call_tool(name: str, arguments: str) -> str:
        return workspace.call(name, arguments)

    async with serving({"sum": REAL_LEGS}) as bench, real_server(bench) as connection:
        result = await run_agent(
            connection,
            model="forced:sum",
            instructions="Use the tools.",
            tools=TOOLS,
            task="Add up all numbers in oak. Write it to oak/sum.txt.",
            call_tool=call_tool,
        )
    assert (result.status, result.answer) == ("completed", "The total is 42.")
    assert (folder / "oak" / "sum.txt").read_text() == "42"
    assert [call.output for call in result.calls][1:3] == [
        "oak/elm.txt: 17\nnext: oak/fern.txt",
        "oak/fern.txt: 25\nnext: none",
    ]
    assert result.legs[1].text.strip() == "Both at once."
    work = result.work
    assert (work["legs"], work["pre_passes"], work["post_passes"]) == (4, 1, 1)
    told = Tokens(work["tokens_sampled"], work["tokens_prefilled"], work["tokens_reused"])
    assert result.tokens == told
    for before, after in pairwise(leg.tokens for leg in result.legs):
        in_kv = (
            before.kept + before.prefilled + before.sampled - 1
        )  # the last token is forwarded with the next
        assert after.kept == in_kv


async def test_a_cancelled_agent_leaves_nothing_on_the_real_server(autojump_clock):
    async with serving({"sum": REAL_LEGS}) as bench, real_server(bench) as connection:
        with trio.move_on_after(5):
            await run_agent(
                connection,
                model="forced:sum",
                instructions=None,
                tools=TOOLS,
                task="Add.",
                call_tool=never_answer,
            )
        assert trio.current_time() < 6
        await bench.check_nothing_is_left()


async def test_the_real_server_refuses_an_unknown_model(autojump_clock):
    async with serving() as bench, real_server(bench) as connection:
        with pytest.raises(ServerError, match="model_not_found"):
            await run(connection, say_name)


async def test_three_agents_on_one_connection_to_the_real_server(autojump_clock, folder):
    workspace = Workspace(folder)
    results: list[AgentResult] = []

    async def one() -> None:
        async def call_tool(name: str, arguments: str) -> str:
            return workspace.call(name, arguments)

        task = {"model": "forced:sum", "instructions": None, "tools": TOOLS, "task": "Add."}
        results.append(await run_agent(connection, call_tool=call_tool, **task))

    async with (
        serving({"sum": REAL_LEGS}) as bench,
        real_server(bench) as connection,
        trio.open_nursery() as nursery,
    ):
        for _ in range(3):
            nursery.start_soon(one)
    assert [result.answer for result in results] == ["The total is 42."] * 3
    assert len({result.response_id for result in results}) == 3
