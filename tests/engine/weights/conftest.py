"""Compare the values of a folder's weights, without the rounding of kernels."""

import pytest


@pytest.fixture(autouse=True)
def activations_as_they_come(monkeypatch):
    """Turn off torch's rounding of activations for fp8 weights (tests/quantization/test_folders.py)."""
    monkeypatch.setattr("baton.engine.layers.linear.dense.rounded_to_e4m3", lambda x, *_: x)
