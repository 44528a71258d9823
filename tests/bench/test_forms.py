"""A bench runs as `python -m bench.NAME` and by its path, from any folder."""

import os
import subprocess
import sys

import pytest

from tests.support.process import ROOT

BENCHES = sorted(path for path in (ROOT / "bench").glob("*.py") if path.name != "__init__.py")
BY_PATH = "if not __package__:  # started by its path\n    from lib.as_module import run\n\n    run()\n"


@pytest.mark.parametrize("name", ["gateway", "loadgen", "routing"])  # bench/gateway.py is not the gateway
def test_both_forms_are_one(name, tmp_path):
    as_module = [sys.executable, "-m", f"bench.{name}", "--help"]
    by_path = [sys.executable, str(ROOT / "bench" / f"{name}.py"), "--help"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    help_texts = {
        subprocess.run(argv, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
        for argv, folder in ((as_module, ROOT), (by_path, ROOT), (by_path, tmp_path))
    }
    (text,) = help_texts
    assert text.startswith("usage: ")


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_each_bench_has_both_forms(path):
    text = path.read_text()
    assert BY_PATH in text and 'if __name__ == "__main__":' in text
    assert "sys.path" not in text
