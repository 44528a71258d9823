"""The sampler of GPUs draws what the other draws."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine import kernels
from baton.engine.kernels import sampling
from baton.engine.sampling.noise import gumbel, noise_key, uniform
from baton.engine.sampling.on_device import DeviceSampler, plain_row, sampler_on
from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.sampling_params import SamplingParams
from tests.engine.sampling.sample_rows import FILTERS, MIXED, SHAPES, any_row, every_row, make_rows
from tests.support.engine.toy_engine import engine_request

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(bool(kernels.unavailable(DEVICE.type)), reason=kernels.unavailable(DEVICE.type))


def drawn(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return DeviceSampler().draw(logits.to(DEVICE), rows).tolist()


def wanted(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [each.token_id for each in Sampler().sample(logits, rows)]


@pytest.mark.parametrize(
    "vocab_size, shape", [*((size, shape) for size in (7, 500) for shape in SHAPES), (5000, "ties")]
)
def test_the_sampler_on_the_device_draws_what_the_other_draws(vocab_size, shape):
    """In one part of a program and in several; equal scores at a cut too: of those the higher ids stay."""
    rows = every_row()
    logits = SHAPES[shape](torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(vocab_size)))
    assert drawn(logits, rows) == wanted(logits, rows)


@settings(max_examples=40)
@given(any_row())
def test_the_sampler_on_the_device_draws_what_the_other_draws_of_any_row(drawn_from):
    """Penalties, biases, bans and masks before temperature and filters, among scores that are often equal."""
    logits, row = drawn_from
    kept = logits.clone()
    assert drawn(logits, [row]) == wanted(logits, [row]) and torch.equal(logits, kept)


def test_a_cut_beyond_the_range_of_the_histogram():
    """Every token may be left, and so may all of a flat row whose best token is far away."""
    logits = torch.randn(3, 300) * 200
    logits[1], logits[1, 7] = 0.0, 90.0
    rows = make_rows(
        *(dict(temperature=1.0, seed=2, **each) for each in (dict(top_k=299), dict(top_k=200), dict(top_p=0.9999)))
    )
    assert drawn(logits, rows) == wanted(logits, rows)


def test_a_row_is_drawn_alike_beside_others():
    rows = make_rows(*MIXED, *(dict(temperature=0.8, seed=3, **each) for each in FILTERS[5:8]))
    logits = torch.randn(len(rows), 300)
    together = drawn(logits, rows)
    assert together == [drawn(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]


def test_rows_that_all_tokens_are_taken_from_draw_one_that_there_is():
    rows = [
        SampleRow(each.params, 0, 9, mask=torch.zeros(2, dtype=torch.int32)) for each in make_rows(*MIXED, *FILTERS)
    ]
    assert all(0 <= token_id < 40 for token_id in drawn(torch.randn(len(rows), 40), rows))


@triton.jit
def make_noise(given, exact, rough, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = sampling._key(given)
    tl.store(exact + ids, sampling._noise(key, ids))
    tl.store(rough + ids, sampling._rough_noise(key, ids))


def test_noise_is_that_of_the_host():
    """In fp64 to the last places; in fp32 within what `_best` allows for."""
    size, key = 1 << 17, noise_key(3, 1, 77)
    given = torch.zeros(16, dtype=torch.int32)
    given.view(torch.int64)[4] = key
    exact, rough = torch.empty(size, dtype=torch.float64, device=DEVICE), torch.empty(size, device=DEVICE)
    make_noise[(size // 8192,)](given.to(DEVICE), exact, rough, BLOCK=8192)
    expected = gumbel(uniform(key, torch.arange(size)))
    torch.testing.assert_close(exact.cpu(), expected, rtol=1e-14, atol=1e-14)
    assert (rough.cpu().double() - expected).abs().max() < 5e-5


def test_a_draw_is_two_launches_and_asks_the_device_for_nothing(monkeypatch):
    """Whatever its rows want: 63 to 87 operators before. Memory is taken, and one copy is sent."""
    launches, operators = [], set()

    class Launches:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid: tuple):
            return lambda *given, **named: launches.append(self.name)

    for name in ("score", "choose"):
        monkeypatch.setattr(sampling, name, Launches(name))

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operators.add(function.overloadpacket)
            return function(*args, **(kwargs or {}))

    every = dict(
        temperature=0.8, top_k=9, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5,
        logit_bias=((3, 1.0),),
    )  # fmt: skip
    mask = torch.full((2,), -1, dtype=torch.int32)
    rows = [*make_rows(*MIXED, *FILTERS), SampleRow(SamplingParams(**every), 0, 9, (1, 2), (3,), frozenset((4,)), mask)]
    sampler, logits = DeviceSampler(), torch.randn(15, 60, device=DEVICE)
    with Asked():
        sampler.draw(logits, rows)
    assert launches == ["score", "choose"]
    assert {str(each) for each in operators} <= {
        "aten.empty",
        "aten._to_copy",
        "aten._pin_memory",
        "aten.detach",
        "aten.lift_fresh",
    }


def test_what_hangs_on_the_tokens_before_is_not_drawn_ahead():
    def row(**options):
        return plain_row(engine_request("a", range(10), **options), 0, 12)

    assert row().position == 12 and row(temperature=1.0, top_p=0.5, logit_bias=((1, 1.0),)) is not None
    for options in (
        dict(logprobs=0),
        dict(presence_penalty=0.1),
        dict(frequency_penalty=1),
        dict(repetition_penalty=2),
    ):
        assert row(**options) is None
    stops = frozenset((4, 5))
    assert row(stop_token_ids=stops, min_tokens=3).min_tokens_left_bans == stops
    assert not row(stop_token_ids=stops, min_tokens=2).min_tokens_left_bans


def test_rows_that_ask_for_more_take_the_other_path():
    rows = make_rows(dict(temperature=1.0, top_p=0.9, seed=1), dict(temperature=0.0, logprobs=2), dict(temperature=0.0))
    logits = torch.randn(3, 60)
    found = DeviceSampler().sample(logits.to(DEVICE), rows)
    expected = Sampler().sample(logits, rows)
    assert [each.token_id for each in found] == [each.token_id for each in expected] and found[1].logprobs is not None


def test_without_triton_a_gpu_draws_as_a_host_does(monkeypatch):
    monkeypatch.setattr(kernels, "unavailable", lambda device: "triton is not installed")
    sampler, logits = sampler_on(torch.device("cuda")), torch.randn(2, 60)
    rows = make_rows(dict(temperature=1.0, top_p=0.9, seed=1), dict(temperature=0.0))
    assert type(sampler) is Sampler and sampler.draw(logits, rows).tolist() == wanted(logits, rows)
