"""The store of Responses: found at once, written soon, by owner, over a restart, with a disk that fails."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from protocol import store
from protocol.store import FILE_NAME, MAX_UNWRITTEN, Left, Record, Store, StoreError, StoreFull
from scripts import cli

DEADLINE = 60.0  # s, on the real clock: a virtual one would run while a thread writes


def left(number: int, owner: str = "me") -> Left:
    """What run `number` leaves."""
    return Left(f"resp_{number}", owner, "v", response={"number": number}, state={"tokens": [number]})


def record(number: int, owner: str = "me") -> Record:
    """The same as JSON."""
    return Record(f"resp_{number}", owner, "v", b'{"number":%d}' % number, b'{"tokens":[%d]}' % number)


@asynccontextmanager
async def running(folder: Path | None) -> AsyncIterator[Store]:
    """A store that writes; closed in the end, as a service does it."""
    opened = Store(folder)
    try:
        with trio.fail_after(DEADLINE):
            async with trio.open_nursery() as nursery:
                await nursery.start(opened.run)
                yield opened
                nursery.cancel_scope.cancel()
    finally:
        await opened.aclose()


def written(folder: Path) -> list[str]:
    """The ids in the file."""
    database = sqlite3.connect(folder / FILE_NAME)
    try:
        return [row[0] for row in database.execute("SELECT id FROM responses ORDER BY number")]
    finally:
        database.close()


@pytest.fixture(params=["file", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "a" / "b" if request.param == "file" else None


async def test_what_was_put_is_found_at_once_and_after_it_was_written(folder: Path | None) -> None:
    async with running(folder) as opened:
        opened.put(left(1))
        assert await opened.get("resp_1", "me") == record(1)
        while opened.statistics()["unwritten"]:
            await trio.lowlevel.checkpoint()
        assert opened.statistics()["written_total"] == 1
        assert await opened.get("resp_1", "me") == record(1)
        assert await opened.get("resp_2", "me") is None


@pytest.mark.parametrize("is_written", [True, False])
async def test_another_owner_finds_and_deletes_nothing(folder: Path | None, is_written: bool) -> None:
    async with running(folder) as opened:
        opened.put(left(1))
        while is_written and opened.statistics()["unwritten"]:
            await trio.lowlevel.checkpoint()
        assert await opened.get("resp_1", "you") is None
        assert not await opened.delete("resp_1", "you")
        assert await opened.get("resp_1", "me") == record(1)


@pytest.mark.parametrize("is_written", [True, False])
async def test_what_was_deleted_is_gone(folder: Path | None, is_written: bool) -> None:
    async with running(folder) as opened:
        opened.put(left(1))
        while is_written and opened.statistics()["unwritten"]:
            await trio.lowlevel.checkpoint()
        assert await opened.delete("resp_1", "me")
        assert not await opened.delete("resp_1", "me")
        assert await opened.get("resp_1", "me") is None
        opened.put(left(2))
    assert folder is None or written(folder) == ["resp_2"]


async def test_a_restart_finds_everything(tmp_path: Path) -> None:
    async with running(tmp_path) as opened:
        for number in range(50):
            opened.put(left(number))
    async with running(tmp_path) as opened:
        for number in range(50):
            assert await opened.get(f"resp_{number}", "me") == record(number)


async def test_what_comes_after_the_writer_was_cancelled_is_written_when_it_closes(tmp_path: Path) -> None:
    opened = Store(tmp_path)
    opened.put(left(1))
    with trio.CancelScope() as scope:
        scope.cancel()
        await opened.aclose()
    assert written(tmp_path) == ["resp_1"]


async def test_what_is_there_is_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    insert = Store._insert

    def count(self: Store, batch: list[Left]) -> None:
        batches.append(len(batch))
        insert(self, batch)

    monkeypatch.setattr(Store, "_insert", count)
    async with running(tmp_path) as opened:
        for number in range(20):
            opened.put(left(number))
    assert batches == [20]


async def test_a_write_that_fails_is_tried_again_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "RETRY_AFTER", 0.0)
    insert, failures = Store._insert, [1, 2, 3]

    def fail_first(self: Store, batch: list[Left]) -> None:
        if failures:
            failures.pop()
            raise sqlite3.OperationalError("database or disk is full")
        insert(self, batch)

    monkeypatch.setattr(Store, "_insert", fail_first)
    async with running(tmp_path) as opened:
        opened.put(left(1))
        while opened.statistics()["unwritten"]:
            assert await opened.get("resp_1", "me") == record(1)
        assert opened.statistics()["failed_writes_total"] == 3
    assert written(tmp_path) == ["resp_1"]


async def test_a_batch_that_cannot_be_encoded_does_not_stop_the_others(tmp_path: Path) -> None:
    async with running(tmp_path) as opened:
        opened.put(Left("resp_1", "me", "v", response=object(), state=None))
        while opened.statistics()["unwritten"]:
            await trio.lowlevel.checkpoint()
        opened.put(left(2))
    assert written(tmp_path) == ["resp_2"]


async def test_a_disk_that_is_too_far_behind_gets_no_more(tmp_path: Path) -> None:
    opened = Store(tmp_path)
    for number in range(MAX_UNWRITTEN):
        opened.put(left(number))
    with pytest.raises(StoreFull):
        opened.put(left(MAX_UNWRITTEN))
    await opened.aclose()
    assert len(written(tmp_path)) == MAX_UNWRITTEN


async def test_in_memory_the_oldest_make_room(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(store, "MEMORY_BYTES", 1 << 20)
    async with running(None) as opened:
        for number in range(20):
            opened.put(Left(f"resp_{number}", "me", "v", response="x" * 100_000, state=None))
        await trio.testing.wait_all_tasks_blocked()
        kept = [number for number in range(20) if await opened.get(f"resp_{number}", "me")]
    assert kept == list(range(kept[0], 20))
    assert 8 <= len(kept) <= 10


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        Store(tmp_path / "file")


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("something else " * 100)
    with pytest.raises(StoreError, match="not a database"):
        Store(tmp_path)


def test_a_file_of_another_version_is_named(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FILE_NAME)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreError, match=r"another version .*99"):
        Store(tmp_path)


def test_only_its_user_may_look_into_a_folder_that_was_made(tmp_path: Path) -> None:
    Store(tmp_path / "made")
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0


def test_the_command_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.serve.set_up_logging", lambda *_: None)
    (tmp_path / FILE_NAME).write_text("something else " * 100)
    assert cli.main(["serve", "--port=0", f"--state-dir={tmp_path}"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fermata serve: {tmp_path / FILE_NAME} cannot be used to store responses")
