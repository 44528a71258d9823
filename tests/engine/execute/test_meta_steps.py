"""Whole steps of 8B, 70B and Qwen shapes on meta tensors, in all forms of weights and KV (meta_steps.py)."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def found() -> dict:
    command = [sys.executable, "-m", "tests.engine.execute.meta_steps"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_model_and_form_was_stepped(found):
    assert len(found) == 24 and all(each["launches"] > 100 for each in found.values())


def test_the_warm_up_covers_what_a_serving_trace_asks_for(found):
    """Whatever its lengths, alignments and numbers of sequences: else a kernel is compiled while requests wait."""
    cold = {name: each["cold"] for name, each in found.items() if each["cold"]}
    assert not cold, f"{sum(map(len, cold.values()))} variants: {next(iter(cold.items()))}"
