"""Every bench of a CPU runs through: what it measures changes under it, and a recording is a bad time to see that."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.pace import patience
from tests.support.process import ROOT

# Others have peers to build first, a GPU, or minutes of simulation even so.
BENCHES = (
    "adapters", "constraints", "gateway", "handoff", "http_api", "hybrid", "index", "ladder", "loadgen", "overload", "routing",
    "speculation", "stack", "starts", "telemetry",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("name", BENCHES)
def test_a_quick_run_measures_something_and_does_not_end_early(name, tmp_path):
    out = tmp_path / "out.json"
    argv = [sys.executable, f"bench/{name}.py", "--quick", "--json", str(out)]
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    ran = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patience(300))
    assert out.exists() and "ended early" not in ran.stdout, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert json.loads(out.read_text())["rows"]
