"""The memory of steps is measured: nothing before the first, it grows with the largest, and stays."""

import pytest
import torch

from baton import system
from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.execute import activation_memory
from baton.engine.execute.activation_memory import HeapActivations
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.weights.forms import DenseWeight
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import engine_request
from tests.support.models import make_model


def test_the_books_of_malloc_see_a_tensor():
    seen = HeapActivations()
    seen.begin(1, 1)
    held = torch.ones(3 << 20)
    seen.look()
    del held
    seen.look()
    found = seen.num_bytes - activation_memory._scratch_bytes()
    assert abs(found - (12 << 20)) < 1 << 20, "other threads allocate and free as well"


def test_without_books_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(system, "heap_bytes", dict)
    seen = HeapActivations()
    seen.begin(1, 1)
    held = torch.ones(1 << 20)
    seen.look()
    assert seen.num_bytes == activation_memory._scratch_bytes() and held is not None


def test_only_steps_larger_than_before_are_looked_at(monkeypatch):
    looks = []
    monkeypatch.setattr(activation_memory, "_heap_bytes", lambda: looks.append(1) or 0)
    seen = HeapActivations()
    for num_rows, num_logits, is_new in (
        (8, 1, True),
        (8, 1, False),
        (9, 1, False),
        (12, 1, True),
        (4, 4, True),
        (4, 4, False),
    ):
        looks.clear()
        seen.begin(num_rows, num_logits)
        seen.look()
        assert len(looks) == (2 if is_new else 0), (num_rows, num_logits)


@pytest.fixture
def threads_come_back():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
@pytest.mark.usefixtures("threads_come_back")
def test_scratch_of_threads_that_have_ended_is_not_counted():
    """OpenMP ends a thread at each smaller number, soon, and makes another one at each larger. Three threads stay,
    whose scratch grows to the most that they need."""
    kernel, x = PackedLinear(DenseWeight(torch.randn(512, 512)), None, torch.float32), torch.randn(64, 512)
    seen = []
    for _ in range(50):
        for num_threads in (4, 3):
            torch.set_num_threads(num_threads)
            kernel(x)
        seen.append(activation_memory._scratch_bytes())
    assert len(set(seen)) < len(seen), "larger each time"


@pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
def test_scratch_that_grows_takes_what_is_needed():
    """One row more took twice the memory."""
    kernel = PackedLinear(DenseWeight(torch.randn(64, 4096)), None, torch.float32)
    before = activation_memory._scratch_bytes()
    held = []
    for num_rows in (1000, 1001):
        kernel(torch.zeros(num_rows, 4096))
        held.append(activation_memory._scratch_bytes() - before)
    assert held[1] - held[0] < held[0] / 100


@pytest.mark.parametrize("linear", ["auto", "dense"])
def test_an_engine_takes_more_for_more_tokens(linear, tmp_path):
    model = make_model(tmp_path / "model")
    engine = Engine.load(
        EngineConfig(model=model, num_blocks=64, linear=linear, max_num_batched_tokens=512, max_model_len=512)
    )
    seen = engine.runner.launcher.activations
    found = []
    for num_tokens in (16, 400, 16):
        run_to_end(engine, [engine_request(str(len(found)), list(range(5, 5 + num_tokens)), max_tokens=2)])
        found.append(seen.num_bytes)
    hidden = 400 * engine.spec.hidden_size * 2
    assert found[1] >= hidden and found[1] >= found[0]
    # The first step in torch makes what oneDNN keeps, which is more than these few tokens take.
    assert found[1] > found[0] or linear == "dense"
    assert found[2] == found[1], "the most of any step so far"
