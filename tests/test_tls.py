"""TLS on the port: https and wss, and peers that speak something else. What `tls/` has is for tests only."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import pytest
import trio
import trio.testing
from edge_fakes import (
    UPGRADE,
    ask,
    get,
    make_server,
    over_memory,
    over_tcp,
    read_replies,
    until_eof,
    websocket,
)
from hypothesis import given
from hypothesis import strategies as st
from trio_websocket import ConnectionClosed

from protocol.edge.server import Server
from protocol.edge.tls import CertificateError, server_context
from protocol.settings import Settings, SettingsError
from scripts import cli

FOLDER = Path(__file__).parent / "tls"
CERTIFICATE, KEY = FOLDER / "certificate.pem", FOLDER / "key.pem"
HEALTH = get("/healthz")


@pytest.fixture
def server() -> Server:
    return make_server(tls_cert=CERTIFICATE, tls_key=KEY)


def inside_tls(stream: trio.abc.Stream) -> trio.SSLStream[trio.abc.Stream]:
    """The client's end of TLS, which trusts the certificate of these tests and no other."""
    context = ssl.create_default_context(cafile=str(CERTIFICATE))
    return trio.SSLStream(stream, context, server_hostname="localhost", https_compatible=True)


async def test_requests_and_keep_alive(server: Server) -> None:
    async with over_memory(server) as stream:
        client = inside_tls(stream)
        assert (await ask(client, HEALTH))[0] == 200
        await client.send_all(HEALTH + get("/v1/models", method="HEAD"))
        assert [status for status, _, _ in await read_replies(client, ["GET", "HEAD"])] == [200, 200]
        assert (await ask(client, get("/healthz", "Connection: close")))[0] == 200
        assert await until_eof(client) == b""


async def test_a_websocket(server: Server) -> None:
    async with over_memory(server) as stream, websocket(inside_tls(stream)) as client:
        assert await client.get_message() == "local False"
        await client.send_message("x" * 100_000)
        assert await client.get_message() == "x" * 100_000
        await client.aclose()
        assert client.closed.code == 1000


async def test_the_addresses_say_https(server: Server) -> None:
    stop = trio.Event()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(server.run, stop)
            assert address.startswith("https://127.0.0.1:")
            stream = await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]))
            async with websocket(inside_tls(stream)) as client:
                await client.get_message()
                stop.set()
                with pytest.raises(ConnectionClosed):
                    await client.get_message()
                assert client.closed.code == 1001


async def test_a_refusal_reaches_a_peer_that_still_sends() -> None:
    async with over_memory(make_server(tls_cert=CERTIFICATE, tls_key=KEY, max_body=1000)) as stream:
        client = inside_tls(stream)
        await client.send_all(get("/v1/responses", "Content-Length: 100000", method="POST"))
        for _ in range(10):
            await client.send_all(b"x" * 1000)
        assert (await until_eof(client)).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("wire", [HEALTH, get("/v1/responses", *UPGRADE), b"", b"\x16\x03\x01"])
async def test_a_peer_without_tls_is_let_go(
    server: Server, wire: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    async with over_memory(server) as client:
        await client.send_all(wire)
        assert b"HTTP" not in await until_eof(client)
        assert trio.current_time() <= 10
    assert server.statistics()["server"]["connections_failed_total"] == 0
    assert server.statistics()["server"]["connections_open"] == 0


@given(wire=st.binary(max_size=100), after=st.booleans())
async def test_random_bytes_do_no_harm(wire: bytes, after: bool) -> None:
    server = make_server(tls_cert=CERTIFICATE, tls_key=KEY)
    with trio.fail_after(30):
        async with over_memory(server) as stream, trio.open_nursery() as nursery:
            if after:
                client = inside_tls(stream)
                assert (await ask(client, HEALTH))[0] == 200
            nursery.start_soon(until_eof, stream)
            await stream.send_all(wire)
            await stream.send_eof()
    assert server.statistics()["server"]["connections_failed_total"] == 0
    assert server.statistics()["server"]["connections_open"] == 0


async def test_one_connection_too_many_is_closed() -> None:
    async with over_tcp(make_server(tls_cert=CERTIFICATE, tls_key=KEY, max_connections=1)) as address:
        kept = inside_tls(await trio.open_tcp_stream(*address))
        assert (await ask(kept, HEALTH))[0] == 200
        assert await until_eof(await trio.open_tcp_stream(*address)) == b""
        assert (await ask(kept, HEALTH))[0] == 200


@pytest.mark.parametrize(
    ("certificate", "key", "reason"),
    [
        (KEY, KEY, "NO_CERTIFICATE|PEM|no start line"),
        (CERTIFICATE, CERTIFICATE, "PEM|no start line"),
        (CERTIFICATE, FOLDER / "other_key.pem", "KEY_VALUES_MISMATCH|key values mismatch"),
        (FOLDER, KEY, "directory|cannot be used"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_named(certificate: Path, key: Path, reason: str) -> None:
    with pytest.raises(CertificateError, match=f"(?s){certificate.name}.*({reason})"):
        server_context(certificate, key)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"tls_cert": CERTIFICATE}, "--tls-key"),
        ({"tls_key": KEY}, "--tls-cert"),
        ({"tls_cert": CERTIFICATE, "tls_key": FOLDER / "nothing.pem"}, "--tls-key"),
        ({"tls_cert": FOLDER, "tls_key": KEY}, "--tls-cert"),
    ],
)
def test_a_file_that_is_missing_is_named(options: dict[str, Path], option: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Settings(**options)  # type: ignore[arg-type]
    assert raised.value.option == option


async def test_health_is_json(server: Server) -> None:
    async with over_memory(server) as stream:
        assert json.loads((await ask(inside_tls(stream), HEALTH))[2]) == {"status": "ok"}


def test_the_command_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.serve.set_up_logging", lambda *_: None)
    options = ["--port=0", f"--tls-cert={CERTIFICATE}", f"--tls-key={FOLDER / 'other_key.pem'}"]
    assert cli.main(["serve", *options]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fermata serve: {CERTIFICATE} with {FOLDER / 'other_key.pem'} cannot be used")
