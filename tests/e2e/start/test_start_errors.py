"""A start that cannot succeed ends with one clear line that names the thing, and with exit status 2 (1: an address that
is taken). tests/engine/models/test_loader_errors.py has the other faults of a model folder, without a process."""

import shutil
import socket
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROLES
from tests.support.process import ROOT, assert_one_line


@pytest.mark.parametrize("module", [*ROLES, "gateway"])
def test_a_missing_model_folder_is_named(start, module, tmp_path):
    options = ["--listen", "127.0.0.1:0"]
    if module == "gateway":
        options += ["--decode-workers", "127.0.0.1:1"]
    status, stderr = start(module, "--model", str(tmp_path / "nowhere"), *options)
    assert status == 2
    assert_one_line(stderr, "nowhere")


def test_a_worker_without_a_tokenizer_names_the_file(start, model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "tokenizer.json").unlink()
    status, stderr = start("decode_worker", "--model", str(broken), "--listen", "127.0.0.1:0")
    assert status == 2
    assert_one_line(stderr, "tokenizer.json")


@pytest.mark.parametrize("module", [*ROLES, "gateway"])
def test_a_taken_port_is_named(start, model, module):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--decode-workers", "127.0.0.1:1"] if module == "gateway" else []
        status, stderr = start(module, "--model", str(model), "--listen", listen, *options)
    assert status == 1
    assert_one_line(stderr, listen)


@pytest.mark.parametrize(
    "option, value",
    [("--block-size", "48"), ("--dtype", "fp7"), ("--num-blocks", "-3"), ("--attention", "magic"), ("--no-such", "1")],
)
def test_wrong_options_exit_2_and_are_named(start, model, option, value):
    status, stderr = start("decode_worker", "--model", str(model), "--listen", "127.0.0.1:0", option, value)
    assert status == 2
    assert_one_line(stderr, option.lstrip("-").split("-")[0])


@pytest.mark.parametrize("module", [*ROLES, "gateway", "baton.cli"])
def test_help_and_version_are_printed(module):
    for option in ("--help", "--version"):
        argv = [sys.executable, "-m", module, option]
        ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr
