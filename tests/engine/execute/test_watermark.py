"""A step reports its layers while it computes: a prompt of one chunk can leave layer by layer."""

import pytest

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Progress
from baton.engine.engine import Engine
from baton.engine.execute import watermark
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import make_folder, random_ids


@pytest.fixture
def engine(tmp_path):
    make_folder(tmp_path, "qwen3", num_hidden_layers=4)
    return Engine.load(
        EngineConfig(model=tmp_path, num_blocks=64, block_size=32, max_num_seqs=4, max_num_batched_tokens=128)
    )


def reports(engine, request, interval_s, monkeypatch, min_bytes=0) -> tuple[list[Progress], list[Progress]]:
    """In mid-step, and after the steps."""
    monkeypatch.setattr(watermark, "MIN_INTERVAL_S", interval_s)
    monkeypatch.setattr(watermark, "MIN_BYTES", min_bytes)
    within: list[Progress] = []
    engine.on_progress = within.extend
    engine.admission.accept(request)
    after = []
    while engine.has_work():
        after += [output for output in engine.step() if isinstance(output, Progress)]
    return within, after


def test_a_prompt_of_one_chunk_is_told_layer_by_layer(engine, monkeypatch):
    request = engine_request("one", random_ids(100, 0), max_tokens=1)
    within, after = reports(engine, request, 0.0, monkeypatch)
    assert within == [Progress(request.key, 100, layer + 1) for layer in range(4)]
    assert after == [Progress(request.key, 100, 4)]


def test_only_the_last_chunk_is_told_by_layers(engine, monkeypatch):
    request = engine_request("three", random_ids(300, 1), max_tokens=1)
    within, after = reports(engine, request, 0.0, monkeypatch)
    assert {progress.upto_token for progress in within} == {300}
    assert [progress.upto_token for progress in after] == [128, 256, 300]


def test_layers_that_pass_quickly_are_told_together(engine, monkeypatch):
    within, after = reports(engine, engine_request("quick", random_ids(100, 2), max_tokens=1), 60.0, monkeypatch)
    assert not within and len(after) == 1


def test_layers_with_few_bytes_are_told_together(engine, monkeypatch):
    layer_bytes = 96 * engine.layout.block_bytes // (engine.layout.block_size * 4)
    told = []
    for num_layers in (2, 3, 5):
        request = engine_request(f"of {num_layers}", random_ids(96, num_layers), max_tokens=1)
        within, after = reports(engine, request, 0.0, monkeypatch, num_layers * layer_bytes)
        told.append([progress.upto_layer for progress in within])
        assert len(after) == 1
    assert told == [[2, 4], [3], []]


def test_what_is_decoded_here_is_not_told(engine, monkeypatch):
    monkeypatch.setattr(watermark, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(watermark, "MIN_BYTES", 0)
    within = []
    engine.on_progress = within.extend
    engine.submit(engine_request("local", random_ids(100, 3), max_tokens=3))
    while engine.has_work():
        engine.step()
    assert not within
