"""`baton up --model OWNER/NAME`: downloaded from a hub on loopback, verified, found again without it, refused in one
line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.v1 import inference_pb2
from tests.support.client import Client
from tests.support.gateway.hub import COMMIT, Hub, serving_hub
from tests.support.process import ROOT, Process

DEMO = ROOT / "demo" / "target"


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    for path in DEMO.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04 a pickle")
    with serving_hub(Hub("acme/tiny", folder)) as hub:
        yield hub


def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}


def find(hub: Hub, tmp_path: Path, name: str, **env: str) -> subprocess.CompletedProcess:
    code = "import sys; from pathlib import Path; from baton.cli.launch.hub import *\n"
    code += "try: print(find_model(Path(sys.argv[1])))\nexcept StartError as error: sys.exit(f'LINE {error}')"
    argv = [sys.executable, "-c", code, name]
    full = os.environ | environment(hub, tmp_path) | env
    return subprocess.run(argv, cwd=ROOT, env=full, capture_output=True, text=True, timeout=120)


def refused(done: subprocess.CompletedProcess) -> str:
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("LINE ")]
    assert done.returncode == 1
    return line.removeprefix("LINE ")


def test_a_name_is_served(hub, tmp_path):
    argv = [
        sys.executable,
        "-m",
        "baton.cli",
        "up",
        "--model",
        "acme/tiny",
        "--listen",
        "127.0.0.1:0",
        "--prefill",
        "0",
    ]
    process = Process("up", argv, tmp_path, environment(hub, tmp_path))
    try:
        client = Client(process.ready()["grpc"])
        assert client.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=10).name == "acme/tiny"
        assert len(client.generate("def f(x):", max_tokens=4).token_ids) == 4
        client.close()
    finally:
        process.terminate()
        process.wait()
    assert "looking it up at" in process.text() and "verifying model.safetensors" in process.text()
    assert not any("pytorch_model.bin" in path for path in hub.asked), "nothing pickled is fetched"


def test_the_second_time_nothing_is_fetched_or_verified(hub, tmp_path):
    first = find(hub, tmp_path, f"acme/tiny@{COMMIT}")
    num_asked = len(hub.asked)
    second = find(hub, tmp_path, f"acme/tiny@{COMMIT}")
    assert first.stdout == second.stdout and first.stdout.strip().endswith(COMMIT), first.stderr
    assert "verifying" in first.stderr and "verifying" not in second.stderr
    assert not any("/resolve/" in path for path in hub.asked[num_asked:])


def test_of_folders_below_chat_templates_are_fetched(hub, tmp_path):
    """The gateway reads conversations with tools by `additional_chat_templates/tool_use.jinja`."""
    for name in ("additional_chat_templates/tool_use.jinja", "onnx/config.json", "fp32/model.safetensors"):
        (hub.folder / name).parent.mkdir()
        (hub.folder / name).write_text(name)
    done = find(hub, tmp_path, "acme/tiny")
    folder = Path(done.stdout.strip())
    below = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*/*") if path.is_file()}
    assert below == {"additional_chat_templates/tool_use.jinja": "additional_chat_templates/tool_use.jinja"}, (
        done.stderr
    )


def test_what_is_not_what_the_hub_names_is_removed(hub, tmp_path):
    hub.spoiled.add("model.safetensors")
    assert "what was downloaded is not what the hub names" in refused(find(hub, tmp_path, "acme/tiny"))
    hub.spoiled.clear()
    assert find(hub, tmp_path, "acme/tiny").returncode == 0


@pytest.mark.parametrize(
    "name, words",
    [
        ("acme/other", "has no such model"),
        ("acme/tiny@nope", "has no such revision"),
        ("acme/tiny:Q8.gguf", "has no Q8.gguf"),
    ],
)
def test_what_is_not_there(hub, tmp_path, name, words):
    told = refused(find(hub, tmp_path, name))
    assert told.startswith(f"{name}: ") and words in told


def test_offline_names_the_folder_it_looked_in(hub, tmp_path):
    told = refused(find(hub, tmp_path, "acme/tiny", HF_HUB_OFFLINE="1"))
    assert "cannot be reached" in told and str(tmp_path / "hf" / "hub" / "models--acme--tiny") in told
    assert find(hub, tmp_path, "acme/tiny").returncode == 0
    assert find(hub, tmp_path, "acme/tiny", HF_HUB_OFFLINE="1").returncode == 0


def test_a_path_is_a_path(hub, tmp_path):
    assert find(hub, tmp_path, "demo/draft").stdout == "demo/draft\n" and not hub.asked
    assert find(hub, tmp_path, "/no/such/folder").stdout == "/no/such/folder\n"
