"""`make check` holds protos/ against the contract as it was released: what breaks a client of that version is named."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.process import ROOT

BUF = ROOT / ".ci" / "node" / "node_modules" / ".bin" / "buf"
RELEASED = ROOT / "protos" / "contract.binpb"


def buf(*argv: str | Path) -> subprocess.CompletedProcess:
    assert BUF.exists(), "no buf: run `make .stamps/buf`"
    return subprocess.run([BUF, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60)


def breaking(protos: Path) -> subprocess.CompletedProcess:
    return buf("breaking", protos, "--against", RELEASED)


def test_the_contract_only_grows():
    for done in (buf("lint", "protos"), breaking(ROOT / "protos")):
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("before, after, says", [
    ("  string request_id = 1;", "", "request_id"),
    ("  string request_id = 1;", "  string request_id = 99;", "request_id"),
    ("  string request_id = 1;", "  bytes request_id = 1;", "request_id"),
    ("  rpc Detokenize(", "  rpc Untokenize(", "Detokenize"),
    ("  FINISH_REASON_LENGTH = 2;", "", "FinishReason"),
])  # fmt: skip
def test_what_breaks_clients_is_named(tmp_path, before, after, says):
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    file = tmp_path / "protos" / "baton" / "v1" / "inference.proto"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    done = breaking(tmp_path / "protos")
    assert done.returncode == 100 and says in done.stdout
