"""Choose a device, a pool's part of a GPU, and the error where neither can be."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from baton import system
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import (
    GIB,
    Memory,
    check_host_pool,
    check_weights,
    find_device,
    pool_blocks,
    sent,
    set_threads,
    wait_for_memory,
)
from baton.engine.engine import Engine
from baton.engine.execute import build
from baton.engine.weights.formats.placed import placed
from tests.support.model_folders.families import make_folder
from tests.support.model_folders.weight_forms import FORMS

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
H200 = Memory(total=140 * GIB, free=138 * GIB, ours=2 * GIB)


def says(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@without_gpu
def test_no_gpu_here(tmp_path):
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device cuda: torch .* sees no CUDA device; leave it at auto") as error:
        find_device("cuda")
    says(error)
    make_folder(tmp_path, "llama2")
    with pytest.raises(ValueError, match="device cuda"):
        Engine.load(EngineConfig(tmp_path, device="cuda"))
    with pytest.raises(ValueError, match="no effect on a CPU"):
        Engine.load(EngineConfig(tmp_path, gpu_memory_utilization=0.5))


def test_options_that_the_device_cannot_have_are_refused():
    for options, words in (
        (dict(device="tpu"), "device 'tpu': one of auto, cpu, cuda"),
        (dict(gpu_memory_utilization=1.5), "at most 1"),
        (dict(gpu_memory_utilization=0.5, device="cpu"), "no effect on a CPU"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            EngineConfig("m", **options)
        says(error)


def test_a_gpu_that_is_too_old(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Old One")
    assert find_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="Old One has compute capability 7.5, at least 8.0 is needed"):
        find_device("cuda")


def test_threads_are_those_that_can_run_at_once(monkeypatch):
    """torch has one for each core of the machine, whatever its container may use of them."""
    monkeypatch.setattr(system, "num_cores", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()

    def after(has: int, asked: int | None) -> int:
        torch.set_num_threads(has)
        set_threads(asked)
        return torch.get_num_threads()

    try:
        assert (after(8, None), after(2, None), after(8, 5)) == (3, 2, 5)
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
        assert after(8, None) == 8, "somebody said so"
    finally:
        torch.set_num_threads(before)


def test_the_pool_gets_what_is_left():
    num_blocks = pool_blocks(H200, 0.9, 3 * GIB, GIB // 128, 100)
    assert num_blocks == int((140 * 0.9 - 2 - 3) * 128)
    full = replace(H200, free=20 * GIB)  # another process has the rest
    assert pool_blocks(full, 0.9, GIB, GIB // 128, 100) == 19 * 128
    with pytest.raises(
        ValueError, match=r"140.0 GiB, 20.0 of them free, 0.02 may be used, this process has 2.0"
    ) as error:
        pool_blocks(full, 0.02, GIB, GIB // 128, 100)
    assert "at least 0.78 are needed" in says(error)


def test_two_workers_share_a_gpu():
    """With 0.45 each: what the first took of the memory is not taken off the share of the second."""
    weights, step = 16 * GIB, 3 * GIB
    first = Memory(total=80 * GIB, free=62 * GIB, ours=weights + GIB)
    blocks = pool_blocks(first, 0.45, step, GIB // 128, 100)
    second = replace(first, free=first.free - weights - blocks * GIB // 128 - GIB)
    assert pool_blocks(second, 0.45, step, GIB // 128, 100) == blocks == 16 * 128


@pytest.mark.parametrize(
    "frees, num_pauses",
    [
        ([130], 0),  # there is room at once
        ([20, 40, 90, 127], 3),  # the driver takes a while
        ([60], 8),  # another process has the rest: 2 s, and the start says what there is
    ],
)
def test_memory_of_a_process_that_just_ended_is_waited_for(frees, num_pauses):
    left, pauses = [GIB * free for free in frees], []

    def read() -> Memory:
        return replace(H200, free=left.pop(0) if len(left) > 1 else left[0])

    wait_for_memory(read, 0.9, pauses.append)
    assert len(pauses) == num_pauses


def test_a_model_that_does_not_fit():
    check_weights(100 * GIB, H200, 0.9, "none")
    with pytest.raises(ValueError, match="200.0 GiB, the GPU has 138.0 GiB free of 140.0") as error:
        check_weights(200 * GIB, H200, 0.9, "none")
    assert "quantization fp8 or int8 or int4-g128 would fit" in says(error)
    with pytest.raises(ValueError, match="quantization int4-g128 would fit"):
        check_weights(280 * GIB, H200, 0.9, "none")
    with pytest.raises(ValueError, match="a smaller model is needed"):
        check_weights(200 * GIB, H200, 0.9, "auto")  # quantized already


def test_what_was_advised_fits():
    """A folder that is rounded when it is read takes what is left of it, not what its files have."""
    for advised in ("fp8", "int8", "int4-g128"):
        check_weights(200 * GIB, H200, 0.9, advised)
    with pytest.raises(ValueError, match=r"weights take 132.5 GiB.*a smaller model"):
        check_weights(250 * GIB, H200, 0.9, "int8")


@pytest.mark.parametrize("name", FORMS)
def test_every_form_can_be_placed(name):
    weight = FORMS[name]((32, 64))
    moved = placed(weight, torch.device("meta"))
    assert moved.values.is_meta and moved.scales.is_meta and moved.shape == weight.shape
    assert getattr(moved, "outliers", None) is None or moved.outliers.values.is_meta


def test_what_is_sent_to_a_gpu_is_pinned_first():
    """From pageable memory a copy waits for all that was launched before."""
    copies = []
    pinned = SimpleNamespace(to=lambda device, non_blocking: copies.append((device.type, non_blocking)))
    sent(SimpleNamespace(pin_memory=lambda: pinned), torch.device("cuda"))
    assert copies == [("cuda", True)]
    values = torch.arange(3)
    assert torch.equal(sent(values, torch.device("cpu")), values)


def test_a_pool_of_the_host_that_cannot_fit_is_refused_in_one_line(monkeypatch, caplog):
    monkeypatch.setattr(system, "memory_limit", lambda: 4 * GIB)
    check_host_pool(3 * GIB, GIB // 2, 1)
    assert not caplog.text
    with pytest.raises(ValueError, match=re.escape("num_blocks: 4.0 GiB of KV and 0.5 GiB of weights")) as error:
        check_host_pool(4 * GIB, GIB // 2, 1)
    assert "in the 4.0 GiB of this host or container" in says(error)
    check_host_pool(GIB, 4 * GIB, 1)  # weights are mapped, and defaults are not to be refused
    assert (
        "memory may run out: this worker may take 5.2 GiB" in caplog.text and "give fewer --num-blocks" in caplog.text
    )


def test_workers_that_may_take_more_together_than_the_host_has_are_told(monkeypatch, caplog):
    monkeypatch.setattr(system, "memory_limit", lambda: 4 * GIB)
    check_host_pool(GIB, GIB // 2, 2)
    assert not caplog.text
    check_host_pool(GIB, GIB // 2, 3)
    assert "memory may run out: 3 workers may take 5.1 GiB" in caplog.text, caplog.text
    assert "give fewer workers or --num-blocks" in caplog.text


@without_gpu
@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_the_memory_of_all_ranks_is_counted(tmp_path, monkeypatch, options):
    make_folder(tmp_path, "llama3", hidden_size=256, head_dim=64, intermediate_size=512)
    checked, check = [], build.check_host_pool
    monkeypatch.setattr(build, "check_host_pool", lambda *given: (checked.append(given), check(*given)))
    engine = Engine.load(EngineConfig(tmp_path, num_blocks=16, **options))
    weights = sum(report.num_bytes for report in engine.ranks.reports)
    engine.ranks.close()
    assert [(given[1], *given[3:]) for given in checked] == [(weights, 2)] and weights > engine.ranks.reports[
        0
    ].num_bytes


@without_gpu
@pytest.mark.parametrize("options", [{}, {"pipeline_parallel": 2}])
def test_an_engine_whose_pool_is_larger_than_the_host_does_not_start(tmp_path, monkeypatch, options):
    make_folder(tmp_path, "llama2")
    monkeypatch.setattr(system, "memory_limit", lambda: GIB // 2)
    with pytest.raises(ValueError, match="num_blocks: .* GiB of KV"):
        Engine.load(EngineConfig(tmp_path, num_blocks=1 << 20, **options))
