"""A worker without native kernels: it serves, in the dtype that its processor computes fast, and says once what is
lost; so does one in fp16."""

import json
import sys
from pathlib import Path

import pytest

from baton.engine.core import cpu
from tests.support.models import make_model
from tests.support.process import Process

FAST = "bf16" if cpu.multiplies_bf16() else "fp32"


def start_lines(model: Path, *options: str, **environment: str) -> list[str]:
    """Start a worker, and return what it has logged until it is ready."""
    argv = [sys.executable, "-m", "decode_worker", "--model", str(model), "--threads", "1", *options]
    process = Process("worker", argv, model.parent, environment)
    try:
        process.ready()
        return process.log.read_text().splitlines()
    finally:
        process.popen.kill()
        process.popen.wait()


@pytest.mark.parametrize("asked, computed", [("auto", FAST), ("bf16", "bf16")])
def test_one_warning_tells_that_kernels_are_missing(tmp_path, asked, computed):
    lines = start_lines(make_model(tmp_path / "model"), "--dtype", asked, BATON_NATIVE="off")
    (warning,) = (line for line in lines if "native kernels" in line)
    assert " WARNING " in warning and "BATON_NATIVE=off" in warning and f"computes, in {computed}" in warning
    assert any(f", {computed}, kv {computed}" in line for line in lines), "the start line says it too"


def test_fp16_is_computed_without_them(tmp_path):
    model = make_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    (warning,) = (line for line in start_lines(model) if "native kernels" in line)
    assert " WARNING " in warning and "give --dtype bf16" in warning
