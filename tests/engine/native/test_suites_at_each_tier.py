"""Run the suites of native kernels, parity and an end-to-end file at every tier below the machine's best: at the lowest
one in twenty of their tests, in `make test-long` all at each."""

import os
import subprocess
import sys

import pytest

from baton.engine.native.tier import available
from tests.support.process import ROOT

SUITES = (
    "tests/engine/layers/test_linear_kernels.py",
    "tests/engine/layers/test_leaves.py",
    "tests/engine/layers/test_row_invariance.py",
    "tests/engine/attention/test_attention.py",
    "tests/engine/kv/test_stored_forms.py",
    "tests/engine/models/test_parity_models.py",
    "tests/engine/adapters/test_lora.py",
    "tests/engine/speculation/test_heads.py",
    "tests/e2e/requests/test_split_equals_whole.py",
)
OWN = available()


@pytest.mark.skipif(len(OWN) < 2, reason=f"this processor has {len(OWN)} of the tiers")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("tier", "every"),
    [(tier.name, 20) for tier in OWN[:-1][:1]]
    + [pytest.param(tier.name, 1, marks=pytest.mark.long) for tier in OWN[:-1]],
)
def test_suites_at_a_lower_tier(tier, every):
    """All in one process: most of a file's time at one test in a few was the imports."""
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--every", str(every), *SUITES]
    done = subprocess.run(argv, cwd=ROOT, env=os.environ | {"BATON_ISA": tier}, capture_output=True, text=True)
    assert not done.returncode, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout and "failed" not in done.stdout
