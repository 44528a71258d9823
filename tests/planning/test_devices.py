"""This machine's CPU as a plan knows it."""

import pytest
import torch

from baton.engine.core import cpu
from baton.planning.devices import measure_rates
from tests.training.products import Products


@pytest.mark.parametrize("has_bf16, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_products_are_measured_in_what_the_processor_multiplies(monkeypatch, has_bf16, dtype):
    """With AVX2 torch's emulated bf16 ran at 8 GFLOP/s where the engine's own kernel does 52."""
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: has_bf16)
    with Products() as products:
        rates = measure_rates(1)
    assert products.dtypes == {dtype} and min(rates) > 0
