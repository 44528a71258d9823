"""A start that cannot succeed ends with one clear line that names the thing, and with exit status 2 (1: an address that
is taken)."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROLES
from tests.support.process import ROOT, assert_one_line


@pytest.fixture
def broken(model, tmp_path) -> Path:
    return shutil.copytree(model, tmp_path / "broken")


@pytest.mark.parametrize("module", [*ROLES, "gateway"])
def test_missing_folder(start, module, tmp_path):
    options = ["--listen", "127.0.0.1:0"]
    if module == "gateway":
        options += ["--decode-workers", "127.0.0.1:1"]
    status, stderr = start(module, "--model", str(tmp_path / "nowhere"), *options)
    assert status == 2
    assert_one_line(stderr, "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file(start, broken, name):
    (broken / name).unlink()
    status, stderr = start("decode_worker", "--model", str(broken), "--listen", "127.0.0.1:0")
    assert status == 2
    assert_one_line(stderr, "safetensors" if name == "model.safetensors" else name)


def test_truncated_weights(start, broken):
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    status, stderr = start("decode_worker", "--model", str(broken), "--listen", "127.0.0.1:0")
    assert status == 2
    assert_one_line(stderr, "model.safetensors")


def test_weights_that_are_no_safetensors(start, broken):
    (broken / "model.safetensors").write_bytes(b"\x80\x04 this is no safetensors file at all" * 20)
    status, stderr = start("prefill_worker", "--model", str(broken), "--listen", "127.0.0.1:0")
    assert status == 2
    assert_one_line(stderr, "model.safetensors")


def test_weights_in_another_format(start, broken):
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    status, stderr = start("prefill_worker", "--model", str(broken), "--listen", "127.0.0.1:0")
    assert status == 2
    assert_one_line(stderr, "safetensors")


def test_config_that_is_no_json(start, broken):
    (broken / "config.json").write_text("{ not json")
    status, stderr = start("decode_worker", "--model", str(broken), "--listen", "127.0.0.1:0")
    assert status == 2
    assert_one_line(stderr, "config.json")


def test_unknown_architecture(start, broken):
    path = broken / "config.json"
    config = {**json.loads(path.read_text()), "model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    path.write_text(json.dumps(config))
    status, stderr = start("decode_worker", "--model", str(broken), "--listen", "127.0.0.1:0")
    assert status == 2
    assert_one_line(stderr, "config.json", "amba")


@pytest.mark.parametrize("module", [*ROLES, "gateway"])
def test_port_taken(start, model, module):
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
def test_wrong_use(start, model, option, value):
    status, stderr = start("decode_worker", "--model", str(model), "--listen", "127.0.0.1:0", option, value)
    assert status == 2
    assert_one_line(stderr, option.lstrip("-").split("-")[0])


@pytest.mark.parametrize("module", [*ROLES, "gateway", "baton.cli"])
def test_help_and_version(module):
    for option in ("--help", "--version"):
        argv = [sys.executable, "-m", module, option]
        ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr
