"""The generated code in baton/v1 is what the generator makes of protos/ today, byte by byte."""

import subprocess
from pathlib import Path

import pytest

from tests.support.process import ROOT

GENERATOR = ROOT / ".venv-protoc" / "bin" / "python"  # made by `make test`: it needs an older protobuf than we do
OPTIONS = ("--python_out", "--pyi_out", "--grpc_python_out")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Path:
    assert GENERATOR.exists(), "no code generator: run `make .stamps/protoc`"
    out = tmp_path_factory.mktemp("generated")
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    argv = [GENERATOR, "-m", "grpc_tools.protoc", "-I", "protos", *(f"{option}={out}" for option in OPTIONS), *protos]
    subprocess.run(argv, cwd=ROOT, check=True)
    return out / "baton" / "v1"


def test_same_files(fresh):
    ours = {path.name for path in (ROOT / "baton" / "v1").glob("*_pb2*")}
    assert ours == {path.name for path in fresh.iterdir()}


def test_same_bytes(fresh):
    ours = ROOT / "baton" / "v1"
    stale = [path.name for path in fresh.iterdir() if path.read_bytes() != (ours / path.name).read_bytes()]
    assert not stale, "run `make protos`"
