"""Rows to draw tokens with: of every kind, and at random. What samplers are compared by."""

import torch
from hypothesis import strategies as st

from baton.engine.sampling.sampler import SampleRow
from baton.sampling_params import SamplingParams

MIXED = (
    dict(temperature=0.0), dict(temperature=1.0, seed=5), dict(temperature=0.3, seed=6), dict(temperature=3.0, seed=7),
)  # fmt: skip
FILTERS = (
    dict(top_k=1), dict(top_k=5), dict(top_k=100_000), dict(top_p=0.5), dict(top_p=0.999), dict(min_p=0.2),
    dict(top_k=40, top_p=0.9), dict(top_k=12, top_p=0.7, min_p=0.05), dict(top_p=1e-9), dict(min_p=1.0),
)  # fmt: skip
SHAPES = {
    "wide": lambda x: 3 * x,
    "ties": lambda x: x.round(),
    "nearly flat": lambda x: 0.01 * x,
    "flat": torch.zeros_like,
}


def make_rows(*params: dict) -> list[SampleRow]:
    return [SampleRow(SamplingParams(**each), index % 3, 10 + index) for index, each in enumerate(params)]


def every_row() -> list[SampleRow]:
    """Return a row of each kind of temperature and of filter."""
    return make_rows(*MIXED, *(dict(temperature=0.7, seed=seed, **each) for seed, each in enumerate(FILTERS)))


_numbers = st.floats(0.05, 1.0)
any_params = st.fixed_dictionaries(
    dict(temperature=st.sampled_from((0.0, 0.5, 1.0, 40.0)), seed=st.integers(0, 2**64 - 1)),
    optional=dict(
        top_k=st.integers(1, 60), top_p=_numbers, min_p=st.floats(0.0, 0.5), repetition_penalty=st.floats(0.5, 2.0),
        presence_penalty=st.floats(-2.0, 2.0), frequency_penalty=st.floats(-2.0, 2.0),
        logit_bias=st.dictionaries(st.integers(0, 40), st.floats(-8.0, 8.0), max_size=4).map(lambda d: tuple(d.items())),
    ),
)  # fmt: skip
_tokens = st.lists(st.integers(0, 40), max_size=12)


@st.composite
def any_row(draw) -> tuple[torch.Tensor, SampleRow]:
    """Logits [1, vocab_size] that are often equal, and a row with penalties, biases, bans and a mask."""
    vocab_size, coarse = draw(st.integers(41, 300)), draw(st.sampled_from((1, 4, 1000)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = (torch.randn(1, vocab_size, generator=generator) * 3 * coarse).round() / coarse
    mask = None
    if draw(st.booleans()):
        mask = torch.randint(-(2**31), 2**31, (-(-vocab_size // 32),), generator=generator).int()
        mask[0] |= 1 << 25
    banned = draw(st.frozensets(st.integers(0, 20), max_size=3))
    return logits, SampleRow(SamplingParams(**draw(any_params)), 1, 9, draw(_tokens), draw(_tokens), banned, mask)
