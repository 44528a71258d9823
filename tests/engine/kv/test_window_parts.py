"""Parts of blocks that layers with a window have: counted by who sees them, and their pages given back to the
system."""

import os
import random
from pathlib import Path

import pytest
import torch

from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.kv.block_pages import BlockPages, num_block_ids, part_bytes, window_runs
from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.kv.pool import KVPool
from baton.engine.kv.window import Window
from baton.engine.kv.window_parts import WindowParts
from baton.engine.models.registry import read_spec
from baton.engine.start_line import start_line
from baton.system import PAGE
from kvtransfer.layout import KVGroup, KVLayout
from kvtransfer.memory.region import Region
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import make_folder

DOC = Path(__file__).parents[3] / "docs" / "models.md"
WHOLE, PART = 32, 24  # of a block, as if in bytes
WINDOW = Window(40, 16, 64, WHOLE, PART)


class Memory:
    """What is there of each block, as the ledger says."""

    def __init__(self, num_ids: int):
        self.sizes = [0] * num_ids

    def give_back(self, block_id: int) -> None:
        self.sizes[block_id] = 0

    def give_back_part(self, block_id: int) -> None:
        assert self.sizes[block_id] == WHOLE
        self.sizes[block_id] = WHOLE - PART


class Lives:
    """Sequences as a ledger knows them: blocks, and how many of the first are outside the window."""

    def __init__(self, num_blocks: int, chance: random.Random):
        self.memory = Memory(num_blocks * WHOLE // (WHOLE - PART))
        parts = WindowParts(num_blocks, len(self.memory.sizes), WINDOW, self.memory)
        self.ledger = Ledger(num_blocks, 16, window=WINDOW, parts=parts)
        self.num_blocks, self.chance = num_blocks, chance
        self.held: list[tuple[list[int], int, list[bytes]]] = []

    def take(self) -> None:
        names = [self.chance.randbytes(32) for _ in range(self.chance.randint(1, 3))]
        if self.chance.random() < 0.5 and self.held:
            names = self.chance.choice(self.held)[2]
        found = self.ledger.find(names, len(names) * 64 + 1)
        num_skipped = WINDOW.num_skipped_blocks(16 * len(found))
        if not self.ledger.share(found, Holder.RUNNING, num_skipped):
            return
        own = self.ledger.allocate(4 * len(names) - len(found), Holder.RUNNING)
        if own is None:
            self.ledger.release(found, Holder.RUNNING, num_skipped)
            return
        for block_id in own:
            self.memory.sizes[block_id] = WHOLE
        block_ids = found + own
        for unit in range(len(found) // 4, len(names)):
            self.ledger.seal((names[unit],), tuple(block_ids[4 * unit : 4 * unit + 4]))
        self.held.append((block_ids, num_skipped, names))

    def leave(self) -> None:
        if self.held:
            block_ids, num_skipped, names = self.held.pop(self.chance.randrange(len(self.held)))
            to = self.chance.randint(num_skipped, len(block_ids))
            self.ledger.release_skipped(block_ids[num_skipped:to], Holder.RUNNING)
            self.held.append((block_ids, to, names))

    def end(self) -> None:
        if self.held:
            block_ids, num_skipped, _ = self.held.pop(self.chance.randrange(len(self.held)))
            self.ledger.release(block_ids, Holder.RUNNING, num_skipped)

    def offer(self) -> None:
        if self.held:
            names = self.chance.choice(self.held)[2]
            found = self.ledger.find(names, len(names) * 64 + 1, whole=True)
            assert all(self.memory.sizes[block_id] == WHOLE for block_id in found)
            assert self.ledger.find(names, len(names) * 64 + 1)[: len(found)] == found

    def check(self) -> None:
        self.ledger.check_integrity()
        held = [(Holder.RUNNING, block_ids) for block_ids, _, _ in self.held]
        self.ledger.check_holders(held, [block_ids[outside:] for block_ids, outside, _ in self.held])
        sizes = self.memory.sizes
        assert sum(sizes) <= self.num_blocks * WHOLE
        for block_ids, num_skipped, _ in self.held:
            assert all(sizes[block_id] == WHOLE for block_id in block_ids[num_skipped:])
            assert all(sizes[block_id] for block_id in block_ids)
        assert 0 <= self.ledger.num_available <= self.num_blocks
        usage = self.ledger.usage()
        assert sum(usage.values()) == self.num_blocks and min(usage.values()) >= 0
        assert usage["free"] + usage["cached"] == self.ledger.num_left


@pytest.mark.parametrize("num_blocks", [12, 17, 24])
@pytest.mark.parametrize("seed", range(4))
def test_random_lives_keep_what_is_seen_within_the_memory(seed, num_blocks):
    """What is seen is there, and all that is there fits the memory of whole blocks."""
    lives, most = Lives(num_blocks, random.Random(seed)), 0
    for _ in range(400):
        getattr(lives, lives.chance.choice(("take", "take", "leave", "leave", "end", "offer")))()
        lives.check()
        most = max(most, len({block_id for block_ids, _, _ in lives.held for block_id in block_ids}))
    assert most > num_blocks, "more are held than there is memory for whole ones"
    while lives.held:
        lives.end()
    lives.check()
    assert lives.ledger.num_available == num_blocks


def test_an_allocation_takes_what_was_left_longest_ago():
    """Parts that were left before a unit go before it, and after it behind it; its block keeps its pages for who takes
    it next."""
    memory = Memory(16)
    ledger = Ledger(4, 64, window=WINDOW, parts=WindowParts(4, 16, WINDOW, memory))
    first, unit, last = (ledger.allocate(1, Holder.RUNNING) for _ in range(3))
    for block_id in range(16):
        memory.sizes[block_id] = WHOLE
    ledger.seal((b"unit",), tuple(unit))
    for block_ids in (first, unit, last):
        ledger.release_skipped(block_ids, Holder.RUNNING)
        if block_ids is unit:
            ledger.release(unit, Holder.RUNNING, 1)
    ledger.allocate(1, Holder.RUNNING)
    assert [memory.sizes[block_ids[0]] for block_ids in (first, unit, last)] == [WHOLE] * 3
    ledger.allocate(1, Holder.RUNNING)
    assert [memory.sizes[block_ids[0]] for block_ids in (first, unit, last)] == [8, WHOLE, WHOLE]
    assert not ledger.find([b"unit"], 65) and ledger.counts()["running"] == 4
    (taken,) = ledger.allocate(1, Holder.RUNNING)
    assert [memory.sizes[block_ids[0]] for block_ids in (first, last)] == [8, 8]
    ledger.check_integrity()
    ledger.release([taken], Holder.RUNNING)
    ledger.release(first, Holder.RUNNING, 1)
    assert memory.sizes[taken] == WHOLE and memory.sizes[first[0]] == 8 and ledger.parts.num_warm == 2
    ledger.check_integrity()
    assert ledger.allocate(1, Holder.RUNNING) == first and memory.sizes[taken] == 0, (
        "for whose part there is no room beside"
    )
    ledger.check_integrity()


def test_pages_of_runs():
    """Whole pages within what neighbouring layers with a window have, wherever a block begins."""
    group = KVGroup("paged", 6, 1, 64, "fp32", 16)  # two pages each
    assert window_runs(group, (9, 9, None, 9, None, None)) == [range(4 * PAGE), range(6 * PAGE, 8 * PAGE)]
    assert part_bytes(KVLayout((group,)), (9, 9, None, 9, None, None)) == 6 * PAGE
    odd = KVGroup("paged", 6, 1, 64, "int8", 16)  # half a page each, and scales: blocks begin anywhere in a page
    assert part_bytes(KVLayout((odd,)), (9, 9, 9, 9, None, None)) == PAGE
    small = KVGroup("paged", 2, 1, 8, "fp32", 16)
    assert part_bytes(KVLayout((small,)), (9, None)) == 0, "no page is theirs alone"


@pytest.mark.parametrize(
    ("pattern", "num_layers", "window", "num_heads", "head_dim", "whole", "held"),
    [
        ("wwwwwf", 62, 1024, 16, 128, 15872, 3002),  # Gemma 3 27B
        ("wwwwwf", 34, 1024, 4, 256, 4352, 763),  # Gemma 3 4B
        ("wf", 24, 128, 8, 64, 1536, 772),  # gpt-oss-20b
        ("wwwf", 32, 4096, 8, 128, 4096, 1414),  # Command R7B
        ("wwwf", 32, 4096, 32, 128, 16384, 5656),  # OLMo 3 7B
        ("wwwf", 64, 4096, 8, 128, 8192, 2828),  # EXAONE 4 32B
        ("wwwf", 48, 8192, 8, 128, 6144, 2697),  # Llama 4 Scout
    ],
)
def test_what_a_long_sequence_holds(pattern, num_layers, window, num_heads, head_dim, whole, held):
    """The table of docs/models.md, MiB of 32,768 tokens."""
    windows = [window if each == "w" else None for each in (pattern * num_layers)[:num_layers]]
    layout = KVLayout((KVGroup("paged", num_layers, num_heads, head_dim, "bf16", 32),))
    sizes = layout.block_bytes, part_bytes(layout, windows)
    seen = Window(window, 32, 512, *sizes)
    num_inside = 1024 - seen.num_skipped_blocks(32768 - 63)  # just before a span is named and left
    num_bytes = 1024 * (sizes[0] - sizes[1]) + num_inside * sizes[1]
    assert (1024 * sizes[0] >> 20, round(num_bytes / (1 << 20))) == (whole, held)
    row = f"| {window:d} " if pattern != "wwwf" or window != 8192 else "| 8192 (chunk) "
    assert f"{row}| {whole} | {held} |" in DOC.read_text()


@pytest.mark.parametrize("shared", [True, False])
def test_pages_go_back_and_come_again(shared):
    group, windows = KVGroup("paged", 4, 1, 64, "fp32", 16), (9, None, 9, None)
    layout = KVLayout((group,))
    region = Region.create(layout.pool_bytes(3)) if shared else None
    pool = KVPool(layout, 3, region and region.memory)
    assert pool.bytes.data_ptr() % PAGE == 0
    pool.bytes.fill_(7)
    pages = BlockPages(pool, windows)
    pages.give_back_part(1)
    if shared:  # before anybody looks: pages that are read come again
        assert os.stat(region.fd).st_blocks * 512 == pool.bytes.nbytes - 4 * PAGE
    assert not pool.blocks[1, [0, 2]].any() and pool.bytes[[0, 2]].eq(7).all()
    assert pool.bytes[1].view(4, -1)[[1, 3]].eq(7).all()
    pages.give_back(0)
    assert not pool.bytes[0].any() and pool.bytes[2].eq(7).all()
    pool.bytes[0] = 5
    assert pool.bytes[0].eq(5).all()


@pytest.mark.parametrize(("kv_dtype", "num_blocks"), [("fp32", 26), ("int8", 30)])
def test_a_model_holds_no_more_memory_than_its_blocks(tmp_path, kv_dtype, num_blocks):
    """Two sequences of 16 blocks each, which do not fit whole beside each other, run beside each other, with the tokens
    of a larger pool."""
    make_folder(tmp_path, "gemma3", num_key_value_heads=4, head_dim=64, max_position_embeddings=1024)
    spec, regions = read_spec(tmp_path), []

    def memory_for(num_bytes: int) -> Region:
        regions.append(Region.create(num_bytes))
        return regions[-1]

    options = dict(model=tmp_path, dtype="fp32", kv_dtype=kv_dtype, block_size=32, max_model_len=512, max_num_seqs=2)
    requests = [engine_request(f"r{i}", [(7 * i + at * 5) % 190 + 3 for at in range(100)], 400) for i in range(2)]
    small = Engine.load(EngineConfig(num_blocks=num_blocks, max_num_batched_tokens=66, **options), memory_for)
    if not small.runner.model.attention.skips_outside:
        pytest.skip("native attention is not built")
    assert small.pool.num_blocks == num_block_ids(num_blocks, small.layout, spec.windows) > 40 and small.num_blocks < 32
    assert f"{small.ledger.window.part_bytes * 100 // small.layout.block_bytes} % of each" in start_line(small)
    records, most = run_to_end(small, requests), os.stat(regions[0].fd).st_blocks * 512
    whole = Engine.load(EngineConfig(num_blocks=64, max_num_batched_tokens=66, **options))
    expected = run_to_end(whole, requests)
    for request in requests:
        assert records[request.key].answer() == expected[request.key].answer()
        assert records[request.key].ended.report.num_preemptions == 0
    assert most <= num_blocks * small.layout.block_bytes
    assert torch.isfinite(small.pool.blocks.float()).all()
