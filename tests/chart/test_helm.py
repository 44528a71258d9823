"""`.ci/helm`: the package has helm for one architecture."""

import os
import platform
import runpy
import sys
from pathlib import Path

import pytest

from tests.chart.rendering import ROOT


def run(monkeypatch, folder: Path, path: Path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "argv", ["helm", str(folder)])
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    runpy.run_path(str(ROOT / ".ci" / "helm"))


def test_another_architecture_takes_its_own(monkeypatch, tmp_path):
    (tmp_path / "its").mkdir()
    program = tmp_path / "its" / "helm"
    program.touch(0o755)
    for path in (program.parent, tmp_path):
        with pytest.raises(SystemExit, match="^$"):
            run(monkeypatch, tmp_path, path)
        assert os.readlink(tmp_path / "helm") == str(program)


def test_where_there_is_none_it_is_asked_for(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=r"install helm .* aarch64"):
        run(monkeypatch, tmp_path, tmp_path)
