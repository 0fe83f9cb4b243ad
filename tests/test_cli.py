"""The command line: what options come to, what is said about bad ones, and the life of the process."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from protocol.settings import EMBEDDED_MODEL, Settings, SettingsError
from scripts import cli, serve

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 60  # s for a process to do what it is waited for, on a busy machine
SECRET = "sk-never-in-a-log"

# `fermata serve` without an engine; draining takes for ever if the first word says so.
FAKE = """
import sys
sys.path.insert(0, "tests")
import edge_fakes, trio, scripts.cli, scripts.serve

class FakeService(edge_fakes.FakeBackend):
    def __init__(self, settings):
        super().__init__()
        if sys.argv[1] == "stuck":
            self.let_drain = trio.Event()

async def serve_connection(socket, *, service, **about):
    await edge_fakes.echo(socket, **about)

scripts.serve.Service = FakeService
scripts.serve.serve_connection = serve_connection
sys.exit(scripts.cli.main(["serve", "--port", "0", "--log-format", "json", *sys.argv[2:]]))
"""

REAL = """
import sys, scripts.cli
code = scripts.cli.main(["serve", "--port", "0", "--log-format", "json", *sys.argv[1:]])
print(sorted({"torch", "transformers"} & set(sys.modules)))
sys.exit(code)
"""


def parse(*words: str, keys_variable: str = "") -> Settings:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.settings_from(parser.parse_args(list(words)), keys_variable)


def test_without_options_the_settings_are_the_defaults() -> None:
    assert parse() == Settings()
    assert Settings().model == str(EMBEDDED_MODEL)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--port 0", "port", 0),
        ("--kv-memory 2GiB", "kv_memory", 2 << 30),
        ("--kv-memory 1.5mib", "kv_memory", 3 << 19),
        ("--kv-memory 4096", "kv_memory", 4096),
        ("--lifecycle held", "lifecycle", "held"),
        ("--max-context 4096", "max_context", 4096),
        ("--hold-timeout 0.5", "hold_timeout", 0.5),
        ("--api-key a --api-key b", "api_keys", ("a", "b")),
        ("--allow-origin https://a --allow-origin *", "allow_origins", ("https://a", "*")),
        ("--script tests --script pyproject.toml", "scripts", (Path("tests"), Path("pyproject.toml"))),
        ("--host 0.0.0.0 --api-key a", "host", "0.0.0.0"),
        ("--host 0.0.0.0 --insecure", "insecure", True),
        ("--host ::1", "host", "::1"),
        ("--model org/name", "model", "org/name"),
    ],
)
def test_an_option_becomes_a_setting(
    words: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert getattr(parse(*words.split()), field) == value


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--port 65536", "--port"),
        ("--port x", "--port"),
        ("--host 0.0.0.0", "--host"),
        ("--host machine.example", "--host"),
        ("--model /nowhere", "--model"),
        ("--device gpu", "--device"),
        ("--dtype int8", "--dtype"),
        ("--threads 0", "--threads"),
        ("--lifecycle stored", "--lifecycle"),
        ("--max-context 0", "--max-context"),
        ("--kv-memory 2GB", "--kv-memory"),
        ("--kv-memory 0", "--kv-memory"),
        ("--kv-memory -1", "--kv-memory"),
        ("--max-held 0", "--max-held"),
        ("--hold-timeout nan", "--hold-timeout"),
        ("--hold-timeout inf", "--hold-timeout"),
        ("--grace -1", "--grace"),
        ("--log-format xml", "--log-format"),
        ("--script /nowhere", "--script"),
        ("--api-key-file /nowhere", "--api-key-file"),
        ("--allow-orig x", "--allow-orig"),
        ("--unknown", "--unknown"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_option(
    words: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(["serve", *words.split()])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("fermata serve: ")
    assert option in line


@pytest.mark.parametrize("key", ["", "two words", "kéy", "tab\t"])
def test_a_key_that_no_client_can_send_is_refused(key: str) -> None:
    with pytest.raises(SettingsError, match="--api-key"):
        Settings(api_keys=(key,))


def test_keys_come_from_options_the_environment_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  third  \nfourth\n")
    settings = parse("--api-key", "first", "--api-key-file", str(file), keys_variable=" second,, ")
    assert settings.api_keys == ("first", "second", "third", "fourth")
    assert "first" not in repr(settings)


def test_a_file_without_a_key_opens_no_door(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(SettingsError, match="--api-key-file"):
        parse("--api-key-file", str(file))


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("localhost", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("a.example", False),
    ],
)
def test_loopback_is_what_others_cannot_reach(host: str, is_loopback: bool) -> None:
    assert Settings(host=host, insecure=True).is_loopback is is_loopback


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 0, "usage: fermata SUBCOMMAND"),
        (["--help"], 0, "  serve  run the server"),
        (["--version"], 0, "fermata "),
        (["server"], 2, "no subcommand 'server'"),
        (["os"], 2, "no subcommand 'os'"),
    ],
)
def test_the_command_itself(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


@pytest.mark.parametrize("name", cli.SUBCOMMANDS)
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: fermata {name}")


class Process:
    """A server process and the log lines it writes."""

    def __init__(self, script: str, *words: str) -> None:
        environment = {**os.environ, "FERMATA_API_KEYS": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []

    def wait_for(self, event: str) -> dict[str, Any]:
        """The next log line of this event."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if (fields := json.loads(line)).get("event") == event:
                return dict(fields)
        raise AssertionError(f"no {event} in {self.log}")

    def address(self) -> str:
        return str(self.wait_for("listening")["addresses"][0])

    def end(self) -> tuple[int, str]:
        """Exit code and standard output."""
        out, err = self.process.communicate(timeout=TIMEOUT)
        self.log += err.splitlines()
        return self.process.returncode, out


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[Process] = []

    def start_process(script: str, *words: str) -> Process:
        started.append(Process(script, *words))
        return started[-1]

    yield start_process
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0(start: Any, number: int) -> None:
    process = start(FAKE, "free")
    with urlopen(process.address() + "/healthz", timeout=TIMEOUT) as reply:
        assert reply.status == 200
    process.process.send_signal(number)
    assert process.end()[0] == 0


def test_a_second_signal_ends_it_at_once(start: Any) -> None:
    process = start(FAKE, "stuck", "--grace", "1000")
    process.address()
    process.process.terminate()
    process.wait_for("draining")
    process.process.terminate()
    assert process.end()[0] == -signal.SIGTERM


def test_a_port_in_use_is_one_line_and_exit_1(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = start(FAKE, "free", "--port", port)
        assert process.end()[0] == 1
    [line] = process.log
    assert line.startswith("fermata serve: cannot listen on 127.0.0.1 port " + port)


def test_keys_are_not_logged(start: Any) -> None:
    process = start(FAKE, "free", "--api-key", SECRET, "--log-level", "debug")
    address = process.address()
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"{address}/v1/models?key={SECRET}", timeout=TIMEOUT)
    process.process.terminate()
    assert process.end()[0] == 0
    assert any('"reply"' in line for line in process.log)
    assert not any(SECRET in line for line in process.log)


def test_the_server_answers_while_the_engine_loads_and_never_imports_torch(start: Any) -> None:
    process = start(REAL)
    with pytest.raises(HTTPError) as loading:
        urlopen(process.address() + "/healthz", timeout=TIMEOUT)
    assert loading.value.code == 503
    assert json.loads(loading.value.read())["status"] == "loading"
    process.process.terminate()
    assert process.end() == (0, "[]\n")


LOGGING = """
import logging, sys, structlog
from protocol.edge.logs import set_up_logging
set_up_logging(sys.argv[1], "info", sys.stdout)
log = structlog.get_logger()
with structlog.contextvars.bound_contextvars(connection="conn_1"):
    log.debug("too_small")
    log.info("ours", count=2)
    logging.getLogger("library").warning("theirs %d", 3)
    try:
        password = "hunter2"
        raise KeyError("why")
    except KeyError:
        log.exception("failed")
log.info("after")
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_all_logging_goes_through_one_pipe(log_format: str) -> None:
    out = subprocess.run(
        [sys.executable, "-c", LOGGING, log_format], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "hunter2" not in out.replace('password = "hunter2"', "")
    assert "too_small" not in out
    assert "\x1b" not in out  # no colours into a file
    if log_format == "json":
        ours, theirs, failed, after = map(json.loads, out.splitlines())
        assert (ours["event"], ours["count"], ours["connection"], ours["level"]) == (
            "ours",
            2,
            "conn_1",
            "info",
        )
        assert (theirs["event"], theirs["connection"], theirs["level"]) == ("theirs 3", "conn_1", "warning")
        assert "KeyError: 'why'" in failed["exception"]
        assert "connection" not in after
    else:
        assert "theirs 3" in out
        assert "KeyError: 'why'" in out
