"""The wheel away from its checkout: `baton up` finds the demo model, and clients the contract."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from baton.v1 import inference_pb2
from tests.support.client import Client
from tests.support.process import ROOT, Process


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The wheel's files in a folder of their own."""
    folder = tmp_path_factory.mktemp("wheel")
    argv = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        ROOT,
    ]
    subprocess.run(argv, check=True, timeout=170, env=os.environ | {"TMPDIR": str(folder)})
    (wheel,) = folder.glob("baton_llm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_a_wheel_has_what_a_client_and_a_lawyer_need(site):
    contract = site / "baton" / "shipped" / "protos" / "baton" / "v1" / "inference.proto"
    assert contract.read_bytes() == (ROOT / "protos" / "baton" / "v1" / "inference.proto").read_bytes()
    assert len(list(site.glob("*.dist-info/licenses/LICENSE"))) == 1


def test_the_demo_model_is_served_outside_a_checkout(site, tmp_path):
    argv = [sys.executable, "-m", "baton.cli", "up", "--listen", "127.0.0.1:0"]
    env = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    process = Process("up", argv, tmp_path, env)
    try:
        client = Client(process.ready()["grpc"])
        info = client.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=10)
        assert info.name == "baton-demo"
        running = [" ".join(child.cmdline()) for child in psutil.Process(process.pid).children()]
        assert len(running) == 3 and all(str(site) in line for line in running), "the model of the wheel"
        assert len(client.generate("def f(x):", max_tokens=8).token_ids) == 8
        client.close()
    finally:
        process.terminate()
