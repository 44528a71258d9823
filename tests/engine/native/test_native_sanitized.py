"""The suites of the native kernels, run once more with sanitizers: no byte out of bounds, nothing undefined."""

import json
import os
import subprocess
import sys

import pytest

from baton.engine.native import compiler
from tests.support.process import ROOT

BUILD = """
import json
from tests.support.native import sanitized
sanitized.compiled()
print(json.dumps(sanitized.OPTIONS | {"LD_PRELOAD": sanitized.preloaded()}))
"""
OVERRUN = """
from tests.support.native import sanitized
import ctypes, numpy as np
from baton.engine.native import build
a, b = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
ids, strides, counts = np.zeros(1, np.int64), np.zeros(3, np.int64), np.ones(3, np.int64)
copy = build.library().function("kv_copy_runs", *[np.ctypeslib.ndpointer()] * 7, ctypes.c_int64)
copy(a, ids, strides, b, ids, strides, counts, 80)
"""
SUITES = (
    "tests/engine/layers/test_linear_kernels.py",
    "tests/engine/attention/test_attention.py",
    "tests/engine/kv/test_stored_forms.py",
    "tests/engine/sampling/test_native_sampler.py",
    "tests/engine/execute/test_multi_step.py",
    "tests/engine/recurrent/test_mixers.py",
    "tests/engine/parallel/test_families.py",
    "tests/engine/speculation/test_heads.py",
    "tests/worker/kv/test_native_digests.py",
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(2700)]


@pytest.fixture(scope="module")
def env():
    """Return the environment of a process that loads kernels with sanitizers, of which this one must know nothing."""
    found = subprocess.run([sys.executable, "-c", BUILD], cwd=ROOT, capture_output=True, text=True, check=True)
    options = json.loads(found.stdout)
    assert options["LD_PRELOAD"], "the compiler has no sanitizers"
    assert not any("sanitize" in flag for flag in compiler.FLAGS)
    return os.environ | options | {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize("suite", SUITES)
def test_nothing_out_of_bounds_and_nothing_undefined(env, suite):
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "tests.support.native.sanitized",
        "-p",
        "no:cacheprovider",
        suite,
    ]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    assert not done.returncode, (done.stdout + done.stderr)[-6000:]


def test_a_fault_would_be_seen(env):
    """More bytes are copied than the arrays have."""
    done = subprocess.run([sys.executable, "-c", OVERRUN], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode and "heap-buffer-overflow" in done.stderr, done.stderr[-2000:]
