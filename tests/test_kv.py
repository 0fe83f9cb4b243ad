"""The block pool against a plain model: what is written under a token must be what is read under it later."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.free_runs import FreeRuns
from engine.kv import BlockCopy, BlockPool, KvTensors, OutOfBlocks, Table

Ledger = tuple[str, tuple[int, ...]]


@dataclass
class Plain:
    """A sequence as the test knows it."""

    table: Table
    namespace: str
    tokens: list[int] = field(default_factory=list)


class World:
    """A pool, its sequences, and a memory that holds under each slot the prefix that was computed there."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.pool = BlockPool(blocks, block_size)
        self.block_size = block_size
        self.memory: dict[int, Ledger] = {}
        self.sequences: list[Plain] = []
        self.matched = 0

    def open(self, namespace: str) -> None:
        self.sequences.append(Plain(self.pool.open(namespace), namespace))

    def extend(self, plain: Plain, tokens: list[int]) -> bool:
        """As the scheduler does it: match if empty, grow, write, tell; False if there was no room."""
        pool, table = self.pool, plain.table
        whole = plain.tokens + tokens
        if not table.blocks:
            self.matched += pool.match(table, whole) > 0
        before = pool.free_blocks + pool.cached_blocks
        try:
            copy = pool.grow(table, len(whole), expected=len(whole))
        except OutOfBlocks:
            assert pool.free_blocks + pool.cached_blocks == before
            return False
        if copy is not None:
            for offset in range(self.block_size):
                if copy.source * self.block_size + offset in self.memory:
                    self.memory[copy.target * self.block_size + offset] = self.memory[
                        copy.source * self.block_size + offset
                    ]
        slots = [
            slot for run in pool.slots(table, table.length, len(whole)) for slot in range(run[0], run[1])
        ]
        for position, slot in enumerate(slots, table.length):
            self.memory[slot] = (plain.namespace, tuple(whole[: position + 1]))
        pool.wrote(table, whole, len(whole))
        plain.tokens = whole
        return True

    def check(self) -> None:
        self.pool.check_integrity([plain.table for plain in self.sequences])
        for plain in self.sequences:
            assert plain.table.length == len(plain.tokens)
            runs = self.pool.slots(plain.table, 0, len(plain.tokens))
            slots = [slot for start, stop in runs for slot in range(start, stop)]
            assert len(slots) == len(plain.tokens)
            for position, slot in enumerate(slots):
                assert self.memory[slot] == (plain.namespace, tuple(plain.tokens[: position + 1]))


def random_operations(seed: int, operations: int, blocks: int, block_size: int) -> dict[str, int]:
    """Do `operations` random operations, checking after each; how often the rare things happened."""
    chance = random.Random(seed)
    world = World(blocks, block_size)
    happened = {"refused": 0, "forked": 0, "cut": 0}
    for _ in range(operations):
        operation = chance.choice(
            ["open", "extend", "extend", "extend", "fork", "truncate", "release", "running"]
        )
        if operation == "open" or not world.sequences:
            if len(world.sequences) < 12:
                world.open(chance.choice("ab"))
            continue
        plain = chance.choice(world.sequences)
        if operation == "extend":
            # few different tokens, so that prefixes are often known
            tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 4 * block_size))]
            if not world.extend(plain, tokens):
                happened["refused"] += 1
                world.pool.release(plain.table)
                world.sequences.remove(plain)
        elif operation == "fork" and len(world.sequences) < 12:
            happened["forked"] += 1
            child = Plain(world.pool.fork(plain.table), plain.namespace, plain.tokens.copy())
            world.sequences.append(child)
        elif operation == "truncate":
            length = chance.randrange(len(plain.tokens) + 1)
            happened["cut"] += 1
            world.pool.truncate(plain.table, length)
            del plain.tokens[length:]
        elif operation == "release":
            world.pool.release(plain.table)
            world.sequences.remove(plain)
        elif operation == "running":
            world.pool.set_running(plain.table, chance.random() < 0.5)
        world.check()
    for plain in world.sequences:
        world.pool.release(plain.table)
    world.sequences.clear()
    world.check()
    assert world.pool.free_blocks + world.pool.cached_blocks == blocks
    happened["matched"] = world.matched
    return happened


@pytest.mark.parametrize(("seed", "blocks", "block_size"), [(1, 40, 4), (2, 12, 3), (3, 200, 2), (4, 30, 1)])
def test_thousands_of_random_operations_keep_every_token(seed: int, blocks: int, block_size: int) -> None:
    happened = random_operations(seed, 1500, blocks, block_size)
    assert all(happened[what] for what in ("forked", "cut", "matched"))
    assert happened["refused"] or blocks == 200


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), blocks=st.integers(1, 30), block_size=st.integers(1, 5))
def test_random_operations_in_pools_of_any_size(seed: int, blocks: int, block_size: int) -> None:
    random_operations(seed, 60, blocks, block_size)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 8)), max_size=60))
def test_free_runs_are_the_maximal_runs_of_a_set(operations: list[tuple[bool, int, int]]) -> None:
    runs, plain = FreeRuns(32), set(range(32))
    for take, start, size in operations:
        if take:
            begins = start in plain and start - 1 not in plain
            taken = runs.take_from(start, size)
            assert (taken > 0) == begins
            plain -= set(range(start, start + taken))
        else:
            new = [block for block in range(start, min(32, start + size)) if block not in plain]
            for block in new:
                runs.add(block, block + 1)
            plain |= set(new)
        assert {block for a, b in runs for block in range(a, b)} == plain
        assert runs.count == len(plain)
        assert all(a - 1 not in plain and b not in plain for a, b in runs)
        sizes = [b - a for a, b in runs]
        largest = runs.largest()
        assert (largest is None) == (not sizes)
        assert largest is None or largest[1] - largest[0] == max(sizes)


def test_a_known_prefix_is_found_by_whole_blocks_and_leaves_one_token() -> None:
    pool = BlockPool(16, 4)
    first = pool.open()
    tokens = list(range(8))
    pool.grow(first, 8)
    pool.wrote(first, tokens, 8)
    for wanted, found in [
        (tokens, 4),
        ([*tokens, 8], 8),
        (tokens[:5], 4),
        (tokens[:4], 0),
        ([9, *tokens], 0),
    ]:
        table = pool.open()
        assert pool.match(table, wanted) == found
        pool.release(table)
    stranger = pool.open("another key")
    assert pool.match(stranger, [*tokens, 8]) == 0


def test_cached_blocks_are_found_after_release_and_evicted_oldest_first() -> None:
    pool = BlockPool(200, 2)
    for conversation in range(2):
        table = pool.open()
        tokens = [conversation] * 200
        pool.grow(table, 200)
        pool.wrote(table, tokens, 200)
        pool.release(table)
    assert (pool.cached_blocks, pool.free_blocks) == (200, 0)
    newcomer = pool.open()
    pool.grow(newcomer, 20)
    oldest, newest = pool.open(), pool.open()
    assert pool.match(oldest, [0] * 201) == 2 * (100 - 64), "the end of the older chain made room"
    assert pool.match(newest, [1] * 201) == 200


def test_sequences_that_grow_in_turn_stay_in_one_extent_each() -> None:
    pool = BlockPool(1024, 4, prefix_cache=False)
    tables = [pool.open() for _ in range(16)]
    for length in range(1, 200):
        for table in tables:
            pool.grow(table, length)
            pool.wrote(table, [], length)
    assert pool.extents == len(tables)


def test_a_prompt_lands_where_the_whole_of_it_fits() -> None:
    pool = BlockPool(100, 4, prefix_cache=False)
    small, large = pool.open(), pool.open()
    pool.grow(small, 4)
    for length in range(40, 4 * 90 + 1, 40):
        pool.grow(large, length, expected=4 * 90)
        pool.wrote(large, [], length)
    assert len(large.extents) == 1


def test_a_fork_copies_the_partial_block_only_when_one_of_the_two_writes() -> None:
    pool = BlockPool(8, 4)
    parent = pool.open()
    pool.grow(parent, 6)
    pool.wrote(parent, [0] * 6, 6)
    child = pool.fork(parent)
    assert pool.free_blocks == 6
    copy = pool.grow(child, 7)
    assert copy == BlockCopy(source=1, target=pool.block_at(child, 1))
    assert copy.target != 1
    assert pool.grow(parent, 7) is None
    pool.check_integrity([parent, child])


def test_a_shared_block_counts_as_running_while_one_user_runs() -> None:
    pool = BlockPool(8, 4)
    parent = pool.open()
    pool.grow(parent, 8)
    pool.wrote(parent, [0] * 8, 8)
    child = pool.fork(parent)
    assert (pool.running_blocks, pool.held_blocks) == (0, 2)
    pool.set_running(child, True)
    pool.set_running(parent, True)
    assert (pool.running_blocks, pool.held_blocks) == (2, 0)
    pool.set_running(child, False)
    assert (pool.running_blocks, pool.held_blocks) == (2, 0)
    pool.release(parent)
    assert (pool.running_blocks, pool.held_blocks) == (0, 2)
    pool.check_integrity([child])


def test_integrity_check_notices_a_block_in_two_classes_and_a_lost_one() -> None:
    pool = BlockPool(4, 4)
    table = pool.open()
    pool.grow(table, 4)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])
    pool._free.add(0, 1)
    with pytest.raises(AssertionError, match="exactly one class"):
        pool.check_integrity([table])


@pytest.mark.parametrize(("blocks", "block_size"), [(0, 4), (4, 0)])
def test_a_pool_of_nothing_is_refused(blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="needs blocks"):
        BlockPool(blocks, block_size)


def test_copying_a_block_copies_its_slots_in_every_layer() -> None:
    kv = KvTensors(2, 1, 3, 8, dtype=torch.float32, device=torch.device("cpu"))
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.randn(tensor.shape))
    kv.copy_block(BlockCopy(source=0, target=1), block_size=4)
    for tensor in (*kv.keys, *kv.values):
        assert torch.equal(tensor[:, 4:8], tensor[:, 0:4])
