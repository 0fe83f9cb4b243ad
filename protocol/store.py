"""Stored Responses: what a finished run leaves for later, in SQLite. It knows rows, and nothing of runs.

Strategy. A finished run hands over what it leaves and goes on: it is found from that moment on, in memory,
and a task of the store encodes and writes it, many in one transaction, in a thread, while the next request is
already being served. What is left when that task ends, `aclose` writes. Rows belong to the caller that made
them and resolve for nobody else.

One connection, one thread at a time. WAL with synchronous=NORMAL: a process that is killed loses nothing that
was written, a power cut may lose the last transactions. Without a folder the same rows are in memory, where
nothing waits for a disk: no thread then, and the oldest make room for the newest.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
import trio

from protocol.edge.metrics import Value

FILE_NAME = "responses.sqlite"
SCHEMA_VERSION = 1
MEMORY_BYTES = 256 << 20  # of rows without a folder: thousands of ordinary conversations
BUSY_TIMEOUT = 5.0  # s to wait for another process that has the file, such as a backup
MAX_UNWRITTEN = 1024  # Responses; a disk that is this far behind gets no more
RETRY_AFTER = 1.0  # s until a write that failed (disk full) is tried again

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    vocabulary TEXT NOT NULL,
    response BLOB NOT NULL,
    state BLOB NOT NULL
)
"""

COLUMNS = "id, owner, vocabulary, response, state"

T = TypeVar("T")

log: structlog.stdlib.BoundLogger = structlog.get_logger("protocol.store")


class StoreError(Exception):
    """The file cannot be used; the message says which and why."""


class StoreFull(Exception):
    """So many Responses wait to be written that no more are taken."""


class Left(msgspec.Struct, frozen=True):
    """What one finished run leaves. Nobody changes either part any more."""

    id: str
    owner: str
    vocabulary: str  # what tokens mean in the state
    response: Any  # as the client got it
    state: Any  # as a run that continues it needs it

    def encoded(self) -> Record:
        """Both parts as JSON."""
        response, state = msgspec.json.encode(self.response), msgspec.json.encode(self.state)
        return Record(self.id, self.owner, self.vocabulary, response, state)


class Record(msgspec.Struct, frozen=True):
    """What one finished run left, as JSON."""

    id: str
    owner: str
    vocabulary: str
    response: bytes
    state: bytes


class Store:
    """Responses by id and owner, in a file of `folder`, which is made if need be. None: in memory.

    Raises StoreError.
    """

    def __init__(self, folder: Path | None) -> None:
        self._in_memory = folder is None
        self._unwritten: dict[str, Left] = {}
        self._something = trio.Event()
        self._one_at_a_time = trio.CapacityLimiter(1)
        self._written = 0
        self._failed_writes = 0
        path = ":memory:" if folder is None else folder / FILE_NAME
        try:
            if folder is not None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = _open(path)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{path} cannot be used to store responses: {error}") from error
        log.info("store_opened", path=str(path), kept_over_a_restart=not self._in_memory)

    def put(self, left: Left) -> None:
        """Take what a run left. It is found at once and written soon. Never waits. Raises StoreFull."""
        if len(self._unwritten) >= MAX_UNWRITTEN:
            raise StoreFull
        self._unwritten[left.id] = left
        self._something.set()

    async def get(self, response_id: str, owner: str) -> Record | None:
        """What is stored under this id, if this owner made it. Cancelled, it has changed nothing."""
        left = self._unwritten.get(response_id)
        if left is None:
            return await self._work(lambda: self._select(response_id, owner))
        return await self._work(left.encoded) if left.owner == owner else None

    async def delete(self, response_id: str, owner: str) -> bool:
        """Forget what is stored under this id, if this owner made it. Whether there was something.
        Cancelled, it may or may not be gone.
        """
        left = self._unwritten.get(response_id)
        was_unwritten = left is not None and left.owner == owner
        if was_unwritten:
            del self._unwritten[response_id]  # a batch that has it is written before what follows
        return await self._work(lambda: self._delete(response_id, owner)) or was_unwritten

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write what comes, until cancelled; `aclose` then."""
        task_status.started()
        while True:
            await self._something.wait()
            self._something = trio.Event()
            if not await self._write():
                await trio.sleep(RETRY_AFTER)
                self._something.set()

    async def aclose(self) -> None:
        """Write what is left, even if cancelled, and close the file: nothing may be asked of it any more."""
        with trio.CancelScope(shield=True):  # one transaction, and SQLite's own waits have their timeout
            await self._write()
            await self._work(self._database.close)

    def statistics(self) -> dict[str, Value]:
        """The section "store" of /metrics."""
        return {
            "unwritten": len(self._unwritten),
            "written_total": self._written,
            "failed_writes_total": self._failed_writes,
        }

    async def _write(self) -> bool:
        """Write everything there is. False if that failed; then it is all still there."""
        while batch := list(self._unwritten.values()):
            try:
                await self._work(lambda batch=batch: self._insert(batch))  # type: ignore[misc]
            except sqlite3.Error as error:
                self._failed_writes += 1
                log.error("store_write_failed", error=str(error), unwritten=len(batch))
                return False
            except Exception:  # ours: what cannot be written must not keep others from being written
                self._failed_writes += 1
                log.exception("store_lost_responses", lost=len(batch))
            else:
                self._written += len(batch)
            for left in batch:
                self._unwritten.pop(left.id, None)
        return True

    async def _work(self, function: Callable[[], T]) -> T:
        """Have this done in the thread, after what was asked for before."""
        if self._in_memory:
            await trio.lowlevel.checkpoint()
            return function()
        return await trio.to_thread.run_sync(function, limiter=self._one_at_a_time)

    # ---- in the thread ----

    def _insert(self, batch: list[Left]) -> None:
        rows = [msgspec.structs.astuple(left.encoded()) for left in batch]
        with self._transaction() as database:
            database.executemany(f"INSERT OR REPLACE INTO responses ({COLUMNS}) VALUES (?, ?, ?, ?, ?)", rows)
            while self._in_memory and _bytes_used(database) > MEMORY_BYTES:
                database.execute("DELETE FROM responses WHERE number = (SELECT MIN(number) FROM responses)")

    def _delete(self, response_id: str, owner: str) -> bool:
        with self._transaction() as database:
            cursor = database.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            )
        return cursor.rowcount > 0

    def _select(self, response_id: str, owner: str) -> Record | None:
        row = self._database.execute(
            f"SELECT {COLUMNS} FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
        ).fetchone()
        return None if row is None else Record(*row)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def _open(path: Path | str) -> sqlite3.Connection:
    """The database of this path, with its table. Raises sqlite3.Error, StoreError."""
    database = sqlite3.connect(path, timeout=BUSY_TIMEOUT, check_same_thread=False, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=NORMAL")
    [version] = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA_VERSION):
        raise StoreError(f"{path} was written by another version of this server ({version})")
    database.execute(SCHEMA)
    database.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    return database


def _bytes_used(database: sqlite3.Connection) -> int:
    """Bytes of the pages that have something in them."""
    page_size, pages, free = (
        database.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_size", "page_count", "freelist_count")
    )
    return int(page_size * (pages - free))
