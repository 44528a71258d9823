"""What a process loads with baton.service."""

import subprocess
import sys


def test_service_loads_no_torch():
    names = ["errors", "net.server", "net.client", "codec", "observe.telemetry", "logs", "settings", "net.probe"]
    program = f"import sys; {'; '.join(f'import baton.service.{name}' for name in names)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "redis", "opentelemetry", "transformers", "numpy"} & set(loaded)
