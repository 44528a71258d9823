"""What is compared here is what a folder's weights mean."""

import pytest


@pytest.fixture(autouse=True)
def activations_as_they_come(monkeypatch):
    """Of torch's kernels, where the form of an fp8 weight has them rounded (tests/quantization/test_folders.py)."""
    monkeypatch.setattr("baton.engine.layers.linear.dense.rounded_to_e4m3", lambda x, *_: x)
