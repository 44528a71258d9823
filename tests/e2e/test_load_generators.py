"""AIPerf and guidellm, as they are installed from PyPI, drive the HTTP API."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.process import ROOT
from tests.support.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
TOOLS = ROOT / ".venv-load" / "bin"
MODEL = ROOT / "demo" / "target"
NUM_REQUESTS, PROMPT, OUTPUT = 8, 64, 16


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with Stack(MODEL, tmp_path_factory.mktemp("load"), gateway_options=("--http", "127.0.0.1:0")) as stack:
        yield f"http://{stack.gateways[0].ready()['http']}"


def call(folder: Path, *argv: object) -> None:
    assert TOOLS.is_dir(), "run `make .stamps/load`"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP", "BATON"))}
    done = subprocess.run([str(word) for word in argv], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_aiperf_measures_a_stack(url, tmp_path, endpoint):
    call(
        tmp_path, TOOLS / "aiperf", "profile", "--model", MODEL.name, "--url", url, "--endpoint-type", endpoint, "--streaming",
        "--tokenizer", MODEL, "--request-count", NUM_REQUESTS, "--concurrency", 2, "--ui", "none", "--artifact-dir", tmp_path,
        "--synthetic-input-tokens-mean", PROMPT, "--output-tokens-mean", OUTPUT,
    )  # fmt: skip
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS and not found.get("error_request_count", {}).get("avg")
    assert found["output_sequence_length"]["avg"] > 1 and found["time_to_first_token"]["avg"] > 0


def test_guidellm_measures_a_stack(url, tmp_path):
    call(
        tmp_path, TOOLS / "guidellm", "run", "--backend", f"kind=openai_http,target={url},model={MODEL.name}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={MODEL}", "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "--output", f"kind=json,path={tmp_path}/found.json", "--disable-progress",
    )  # fmt: skip
    (found,) = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    requests = found["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS and not requests["errored"]
    assert all(each["output_tokens"] == OUTPUT for each in requests["successful"])
