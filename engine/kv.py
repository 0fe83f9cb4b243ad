"""Where the keys and values of every sequence lie: the block pool's books, and the tensors they speak of.

``BlockPool`` is bookkeeping alone: block numbers, reference counts, a content index. It knows nothing of
tensors, models or schedules. ``KvTensors`` is the memory: one key and one value tensor per layer, addressed
by slot (block times block size plus offset). The scheduler keeps the two in step.

Strategy. A sequence's ``Table`` is a list of extents, runs of consecutive blocks, so attention reads an
extent as one view and bookkeeping costs by the extent, never by the token. Room to grow is not recorded
anywhere: a new extent starts in the middle of the largest free run, which leaves the first half to whoever
ends where that run begins, and can be taken by anybody when room is short. Forks share every block; whoever
writes first into a shared partial block gets a copy of it. Full blocks are found again by a hash chained over
their tokens and all before them; blocks that nobody uses keep their content, least recently used evicted
first, the ends of chains before their beginnings.

A block is in exactly one class: running (some sequence that is running uses it), else held (some sequence
uses it), else cached (nobody uses it, its content can be found), else free.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

from engine.free_runs import FreeRuns

if TYPE_CHECKING:
    import torch

EVICTION_RUN = 64  # blocks evicted at a time, so that the end of a chain becomes one free run
KEY_BYTES = 16  # of the content hash: 128 bits make an accidental match impossible in practice


class OutOfBlocks(Exception):
    """The pool has no room even without its cached blocks. Nothing has been changed."""


@dataclass(slots=True)
class Extent:
    """The consecutive blocks `start` to `stop` (exclusive)."""

    start: int
    stop: int


@dataclass(slots=True, eq=False)
class Table:
    """The blocks of one sequence, in the order of its tokens. Only ``BlockPool`` changes it."""

    namespace: str
    extents: list[Extent] = field(default_factory=list)
    blocks: int = 0
    length: int = 0  # tokens whose keys and values are written
    keys: list[bytes] = field(default_factory=list)  # content hash of each full block
    running: bool = False


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The content of block `source` has to be copied to block `target` before the next write."""

    source: int
    target: int


class BlockPool:
    """Blocks 0 to `blocks` - 1 of `block_size` tokens each, and who uses them."""

    def __init__(self, blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, not {blocks} of {block_size}")
        self.blocks = blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.tables = 0
        self.extents = 0  # of all tables together
        self._references = np.zeros(blocks, np.int32)  # tables that use a block
        self._running = np.zeros(blocks, np.int32)  # running tables that use it
        self._used_count = 0
        self._running_count = 0
        self._free = FreeRuns(blocks)
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._cached: dict[int, None] = {}  # least recently used first

    @property
    def running_blocks(self) -> int:
        """Blocks that a running sequence uses."""
        return self._running_count

    @property
    def held_blocks(self) -> int:
        """Blocks that only sequences at rest use."""
        return self._used_count - self._running_count

    @property
    def cached_blocks(self) -> int:
        """Blocks that nobody uses and whose content can be found."""
        return len(self._cached)

    @property
    def free_blocks(self) -> int:
        """Blocks without content."""
        return self._free.count

    def open(self, namespace: str = "") -> Table:
        """An empty table whose content is shared only within `namespace`."""
        self.tables += 1
        return Table(namespace)

    def match(self, table: Table, tokens: Sequence[int]) -> int:
        """Share the longest known run of whole blocks that `tokens` begins with; the number of tokens found.

        The table must be empty. At least one token is left to compute, since logits are not kept.
        """
        assert not table.blocks
        if not self.prefix_cache:
            return 0
        for index in range((len(tokens) - 1) // self.block_size):
            key = self._key(table, tokens, index)
            block = self._block_of.get(key)
            if block is None:
                break
            self._cached.pop(block, None)
            self._append(table, block, block + 1)
            table.keys.append(key)
        table.length = table.blocks * self.block_size
        return table.length

    def grow(self, table: Table, length: int, expected: int = 0) -> BlockCopy | None:
        """Give the table blocks for `length` tokens, writable from `table.length` on.

        `expected` tokens are likely in all: the table is placed where they fit. A shared last block is
        replaced, and the copy that is then due is returned. Raises OutOfBlocks, and then nothing has changed.
        """
        own_blocks = -(-length // self.block_size)
        partial = self._partial_block(table)
        shared = partial if partial is not None and self._references[partial] > 1 else None
        needed = own_blocks - table.blocks + (shared is not None)
        if needed > self._free.count + len(self._cached):
            raise OutOfBlocks(f"{needed} blocks needed, {self._free.count} free, {len(self._cached)} cached")
        if shared is not None:
            self._cut_blocks(table, 1)
        elif partial is not None:
            self._forget(partial)  # a full block once, cut since
        expected_blocks = max(needed, -(-expected // self.block_size) - table.blocks)
        largest = self._free.largest()
        if largest is None or largest[1] - largest[0] < needed:
            self._evict(max(needed - self._free.count, EVICTION_RUN))
        first_new_block: int | None = None
        while table.blocks < own_blocks:
            start, stop = self._allocate(table, own_blocks - table.blocks, expected_blocks)
            first_new_block = start if first_new_block is None else first_new_block
            self._append(table, start, stop)
        if shared is None:
            return None
        assert first_new_block is not None
        return BlockCopy(shared, first_new_block)

    def wrote(self, table: Table, tokens: Sequence[int], length: int) -> None:
        """The keys and values of `tokens[: length]` are written: blocks that are now full can be found."""
        table.length = length
        if not self.prefix_cache:
            return
        for index in range(len(table.keys), length // self.block_size):
            key = self._key(table, tokens, index)
            table.keys.append(key)
            if key not in self._block_of:
                block = self.block_at(table, index)
                self._block_of[key] = block
                self._key_of[block] = key

    def fork(self, table: Table) -> Table:
        """A second table with the same content, at rest. Needs no room."""
        self.tables += 1
        child = Table(table.namespace, keys=table.keys.copy())
        for extent in table.extents:
            self._append(child, extent.start, extent.stop)
        child.length = table.length
        return child

    def truncate(self, table: Table, length: int) -> None:
        """Forget all but the first `length` tokens."""
        assert length <= table.length
        table.length = length
        del table.keys[length // self.block_size :]
        self._cut_blocks(table, table.blocks - -(-length // self.block_size))

    def release(self, table: Table) -> None:
        """Give everything back; the table is of no more use."""
        self.truncate(table, 0)
        self.tables -= 1

    def set_running(self, table: Table, running: bool) -> None:
        """Say whether the sequence has work; costs by the extent."""
        if table.running == running:
            return
        table.running = running
        for extent in table.extents:
            uses = self._running[extent.start : extent.stop]
            if running:
                self._running_count += uses.size - int(np.count_nonzero(uses))
                uses += 1
            else:
                uses -= 1
                self._running_count -= uses.size - int(np.count_nonzero(uses))

    def block_at(self, table: Table, index: int) -> int:
        """The block number of the table's `index`-th block."""
        for extent in reversed(table.extents):  # work happens at the end
            before = extent.stop - extent.start
            if index >= table.blocks - before:
                break
            index += before
        return extent.stop - (table.blocks - index)

    def slots(self, table: Table, start: int, stop: int) -> list[tuple[int, int]]:
        """Where the tokens `start` to `stop` lie, as runs of slots (start, stop) in order."""
        if start == 0 and len(table.extents) == 1:
            first = table.extents[0].start * self.block_size
            return [(first, first + stop)] if stop else []
        runs = []
        end = table.blocks * self.block_size
        for extent in reversed(table.extents):
            begin = end - (extent.stop - extent.start) * self.block_size
            first, last = max(start, begin), min(stop, end)
            if first < last:
                offset = extent.start * self.block_size - begin
                runs.append((first + offset, last + offset))
            end = begin
            if end <= start:
                break
        runs.reverse()
        return runs

    def check_integrity(self, tables: Sequence[Table]) -> None:
        """Recount everything from the living `tables`; AssertionError where the books differ."""
        references = np.zeros(self.blocks, np.int32)
        running = np.zeros(self.blocks, np.int32)
        for table in tables:
            blocks = [block for extent in table.extents for block in range(extent.start, extent.stop)]
            assert len(blocks) == table.blocks == len(set(blocks)), (
                "a table's blocks are distinct and counted"
            )
            assert table.length <= table.blocks * self.block_size, "no more tokens than room"
            for left, right in pairwise(table.extents):
                assert left.stop != right.start, "neighbouring extents are one"
            references[blocks] += 1
            running[blocks] += table.running
        free = np.zeros(self.blocks, np.bool_)
        for start, stop in self._free:
            assert not free[start:stop].any(), "free runs do not overlap"
            free[start:stop] = True
        cached = np.zeros(self.blocks, np.bool_)
        cached[list(self._cached)] = True
        assert (references == self._references).all(), "reference counts match the tables"
        assert (running == self._running).all(), "running counts match the tables"
        assert ((references > 0).astype(int) + cached + free == 1).all(), (
            "every block is in exactly one class"
        )
        assert int(np.count_nonzero(references)) == self._used_count
        assert int(np.count_nonzero(running)) == self._running_count
        assert int(free.sum()) == self._free.count
        assert self.running_blocks + self.held_blocks + self.cached_blocks + self.free_blocks == self.blocks
        assert {block: key for key, block in self._block_of.items()} == self._key_of, (
            "the index and its reverse agree"
        )
        assert all(block in self._key_of for block in self._cached), "cached blocks can be found"
        assert not any(free[block] for block in self._key_of), "free blocks cannot"
        assert self.tables == len(tables)
        assert self.extents == sum(len(table.extents) for table in tables)

    def _key(self, table: Table, tokens: Sequence[int], index: int) -> bytes:
        parent = table.keys[index - 1] if index else table.namespace.encode()
        content = array("i", tokens[index * self.block_size : (index + 1) * self.block_size])
        return blake2b(content.tobytes() + parent, digest_size=KEY_BYTES).digest()

    def _partial_block(self, table: Table) -> int | None:
        if table.length == table.blocks * self.block_size:
            return None
        return self.block_at(table, table.length // self.block_size)

    def _cut_blocks(self, table: Table, surplus: int) -> None:
        while surplus > 0:
            last = table.extents[-1]
            cut = min(surplus, last.stop - last.start)
            surplus -= cut
            last.stop -= cut
            table.blocks -= cut
            if last.start == last.stop:
                table.extents.pop()
                self.extents -= 1
            self._unuse(last.stop, last.stop + cut, running=table.running)

    def _allocate(self, table: Table, needed: int, expected: int) -> tuple[int, int]:
        if table.extents:
            start = table.extents[-1].stop
            taken = self._free.take_from(start, needed)
            if taken:
                return start, start + taken
        largest = self._free.largest()
        assert largest is not None, "grow() has made room"
        start, stop = largest
        if start > 0:  # somebody may end here and want to grow
            middle = start + max(0, min((stop - start) // 2, stop - start - expected))
            self._free.split(start, stop, middle)
            start = middle
        return start, start + self._free.take_from(start, needed)

    def _append(self, table: Table, start: int, stop: int) -> None:
        uses = self._references[start:stop]
        self._used_count += uses.size - int(np.count_nonzero(uses))
        uses += 1
        if table.running:
            uses = self._running[start:stop]
            self._running_count += uses.size - int(np.count_nonzero(uses))
            uses += 1
        table.blocks += stop - start
        if table.extents and table.extents[-1].stop == start:
            table.extents[-1].stop = stop
        else:
            table.extents.append(Extent(start, stop))
            self.extents += 1

    def _unuse(self, start: int, stop: int, *, running: bool) -> None:
        if running:
            uses = self._running[start:stop]
            uses -= 1
            self._running_count -= uses.size - int(np.count_nonzero(uses))
        uses = self._references[start:stop]
        uses -= 1
        self._used_count -= uses.size - int(np.count_nonzero(uses))
        for offset in np.flatnonzero(uses == 0)[::-1].tolist():  # the end of a chain is evicted first
            block = start + offset
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.add(block, block + 1)

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def _evict(self, wanted: int) -> None:
        for block in list(islice(self._cached, wanted)):
            del self._cached[block]
            self._forget(block)
            self._free.add(block, block + 1)


class KvTensors:
    """Keys and values of all layers; slot `b * block_size + i` is token `i` of block `b`.

    One key and one value tensor per layer, heads first, so that a run of slots is one view for a product over
    heads. Memory that was never written costs nothing: pages are touched by the first write.
    """

    def __init__(
        self, layers: int, heads: int, head_size: int, slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        import torch

        shape = (heads, slots, head_size)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]

    def copy_block(self, copy: BlockCopy, block_size: int) -> None:
        """Copy one block in every layer."""
        source, target = copy.source * block_size, copy.target * block_size
        for tensor in (*self.keys, *self.values):
            tensor[:, target : target + block_size] = tensor[:, source : source + block_size]
