"""Adapters of engines that are several processes: the bits of one process, whatever shares the batch."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from baton.engine import native
from baton.engine.core.batch import AdapterRows, ForwardBatch
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.parallel.adapters import HeldAdapters, SentAdapters
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.adapters import ATTENTION, TARGETS
from tests.support.model_folders.families import make_adapter, make_folder, random_ids

pytestmark = pytest.mark.usefixtures("forked_ranks")
needs_native = pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
RANKS, STAGES = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
SAMPLED = {"temperature": 0.9, "top_k": 50, "logprobs": 2}


def load(folder, names=("a", "b"), **options) -> Engine:
    given = tuple(f"{name}={folder / name}" for name in names)
    sizes = dict(block_size=16, num_blocks=96, max_num_seqs=6, max_num_batched_tokens=150, threads=1)
    return Engine.load(EngineConfig(folder / "base", adapter=given, **(sizes | options)))


def answers(engine: Engine) -> dict:
    """Of prompts with one adapter, with the other and without, in one batch."""
    listed = engine.adapters.listed()
    requests = [
        engine_request(f"{name or 'base'}{seed}", random_ids(40 + 60 * seed, seed), 12, adapter=listed.get(name, b""), seed=seed, **SAMPLED)
        for seed in range(2)
        for name in ("a", "", "b")
    ]  # fmt: skip
    return {key: (record.answer(), record.logprobs) for key, record in run_to_end(engine, requests).items()}


def make(folder, name: str):
    model = make_folder(folder / "base", name, hidden_size=64)
    make_adapter(folder / "a", model, TARGETS[name], seed=1)
    make_adapter(folder / "b", model, [each for each in TARGETS[name] if each in ATTENTION], rank=4, seed=2)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("adapted"), "llama3")


@needs_native
@pytest.mark.parametrize(
    "options",
    [RANKS, STAGES, RANKS | STAGES, pytest.param(RANKS | {"linear": "dense"}, marks=pytest.mark.long)],
    ids=str,
)
def test_the_bits_of_one_process(folder, options):
    alone = load(folder, **{key: value for key, value in options.items() if key == "linear"})
    engine = load(folder, **options)
    try:
        expected = answers(alone)
        assert answers(engine) == expected
        assert torch.equal(engine.pool.bytes, alone.pool.bytes)
    finally:
        engine.ranks.close()


@needs_native
@pytest.mark.long
@pytest.mark.parametrize("name", ["phi3", "command-r", "starcoder2", "qwen3-moe"])
@pytest.mark.parametrize("options", [RANKS, STAGES], ids=str)
def test_each_family_with_adapters_answers_alike_on_ranks(tmp_path, name, options):
    alone, engine = load(make(tmp_path, name)), load(tmp_path, **options)
    try:
        assert answers(engine) == answers(alone)
    finally:
        engine.ranks.close()


@needs_native
@pytest.mark.parametrize("options", [RANKS, STAGES], ids=str)
def test_one_slot_for_two(folder, options):
    """Ranks let go what has no slot here, and are told it again."""
    alone, engine = (load(folder, adapter_slots=1, **each) for each in ({}, options))
    try:
        for turn, name in enumerate("abab"):
            identity = engine.adapters.listed()[name]
            request = engine_request(f"turn{turn}", random_ids(50, turn), 6, adapter=identity, logprobs=1)
            ours, theirs = (run_to_end(each, [request])[request.key] for each in (engine, alone))
            assert ours.answer() == theirs.answer() and ours.logprobs == theirs.logprobs
    finally:
        engine.ranks.close()


class Made:
    """An adapter as far as it is told."""

    def __init__(self, config: bytes, weights: bytes):
        self.source = SimpleNamespace(files=(config, weights))


def test_each_is_told_once_and_when_it_has_gone():
    sent, held = SentAdapters(), HeldAdapters(lambda files: Made(*files))
    nothing = torch.empty(0, dtype=torch.int64)

    def step(*adapters: Made) -> tuple[int, ForwardBatch]:
        rows = tuple(AdapterRows(row, row + 1, adapter) for row, adapter in enumerate(adapters))
        batch = ForwardBatch(nothing, nothing, nothing, [], nothing, adapters=rows)
        news = list(sent.news(batch))
        for key, data in news:
            held.apply(key, data)
        return len(news), held.named(sent.numbered(batch))

    one, other = Made(b"{}", b"one"), Made(b"{1}", b"other")
    assert step()[0] == 0
    count, heard = step(one, other, one)
    assert count == 2
    assert [rows.adapter.source.files for rows in heard.adapters] == [each.source.files for each in (one, other, one)]
    theirs = weakref.ref(heard.adapters[0].adapter)
    assert step(other, one)[0] == 0
    del one, heard
    assert step(other)[0] == 1 and theirs() is None
    assert step(other)[0] == 0
