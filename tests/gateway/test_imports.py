"""What a gateway's process loads."""

import subprocess
import sys

from tests.support.process import ROOT


def test_a_gateway_loads_no_torch():
    code = "import sys, gateway.__main__, gateway.app, gateway.prefix.redis_index; print(sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    for module in ("torch", "transformers", "numpy", "baton.engine"):
        assert f"'{module}'" not in ran.stdout, module
