"""What `baton` does around its commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli import main as command
from baton.cli.cluster import drain
from baton.cli.main import main


def test_ctrl_c_is_a_line(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(drain, "run", interrupt)
    assert main(["drain", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "baton drain: interrupted\n"


def test_ctrl_c_while_commands_are_imported_is_a_line(monkeypatch, capsys):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "import_module", interrupt)
    assert main(["drain", "127.0.0.1:1"]) == 1
    assert main([]) == 1
    assert capsys.readouterr().err == "baton drain: interrupted\nbaton: interrupted\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_line(tmp_path):
    argv = [sys.executable, "-m", "baton.cli", "config", "--model", str(tmp_path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=os.environ)
    assert (done.returncode, done.stderr) == (1, "baton config: No space left on device\n")


def test_without_stdout(monkeypatch):
    """`baton up >&-`"""
    monkeypatch.setattr(command, "_run", lambda argv: 0)
    monkeypatch.setattr(sys, "stdout", None)
    assert main([]) == 0
