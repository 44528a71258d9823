"""A worker without native kernels: it serves, in the dtype that its processor computes fast, and says once what is lost."""

import sys

import pytest

from baton.engine.core import cpu
from tests.support.models import make_model
from tests.support.process import Process

FAST = "bf16" if cpu.multiplies_bf16() else "fp32"


@pytest.mark.parametrize("asked, computed", [("auto", FAST), ("bf16", "bf16")])
def test_one_warning(tmp_path, asked, computed):
    model = make_model(tmp_path / "model")
    argv = [sys.executable, "-m", "decode_worker", "--model", str(model), "--dtype", asked, "--threads", "1"]
    process = Process("worker", argv, tmp_path, {"BATON_NATIVE": "off"})
    try:
        process.ready()
        lines = process.log.read_text().splitlines()
    finally:
        process.popen.kill()
        process.popen.wait()
    (warning,) = (line for line in lines if "native kernels" in line)
    assert " WARNING " in warning and "BATON_NATIVE=off" in warning and f"computes, in {computed}" in warning
    assert any(f", {computed}, kv {computed}" in line for line in lines), "the start line says it too"
