"""A pytest of its own, under the rules of tests/conftest.py, over files that a test writes."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support import pace
from tests.support.process import ROOT


def run_pytest(folder: Path, files: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / name).write_text(text)
    argv = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", os.devnull, *options, str(folder)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=pace.patience(60))
