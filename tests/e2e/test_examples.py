"""Every program in examples/ runs, and says what it should."""

import json
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.engine.execute import build
from examples.two_workers_in_process import PROMPT, load
from tests.support import bare_engine
from tests.support.models import make_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def gateway(stack) -> str:
    return stack.address["gateway0"]


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        *("stream.py", "chat.py", "many_at_once.py", "trace.py", "engine_alone.py", "two_workers_in_process.py"),
        *("many_models.py", "adapters.py"),
    }


@pytest.mark.parametrize(
    "name", ["stream.py", "chat.py", "many_at_once.py", "trace.py", "many_models.py", "adapters.py"]
)
def test_nobody_there_is_a_line(name):
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "127.0.0.1:9"], capture_output=True, text=True, timeout=90
    )
    assert (
        ended.returncode == 1 and ended.stderr.startswith("127.0.0.1:9: UNAVAILABLE") and ended.stderr.count("\n") == 1
    )


def test_the_stream_example_counts_its_tokens(gateway):
    assert "48 tokens, the first after" in run("stream.py", gateway)


def test_the_chat_example_answers(gateway):
    assert run("chat.py", gateway).strip()


def test_many_at_once(gateway):
    assert run("many_at_once.py", gateway).count("def function_") >= 16


def test_the_trace_example_sends_its_trace_id(gateway, receiver):
    trace_id = secrets.token_hex(16)
    out = run("trace.py", gateway, trace_id)
    assert trace_id in out and "ttft_s" in out
    receiver.wait_for(lambda spans: {"prefill", "decode"} <= {span.name for span in spans if span.trace_id == trace_id})


@pytest.fixture(scope="module")
def http_stack(run_stack):
    with run_stack("http", num_prefill=0, gateway_options=("--http", "127.0.0.1:0")) as stack:
        yield stack


@pytest.mark.parametrize("language, program", [("curl", ["bash", "-c"]), ("openai", [sys.executable, "-c"])])
def test_the_http_examples_of_the_docs(http_stack, language, program):
    page = (EXAMPLES.parent / "docs" / "user.md").read_text()
    (text,) = re.findall(f"<!-- {language} -->\n```\n(.*?)```\n<!-- end -->", page, re.DOTALL)
    assert text.count("127.0.0.1:8000") == 1
    text = text.replace("127.0.0.1:8000", http_stack.gateways[0].ready()["http"])
    ended = subprocess.run([*program, text], capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0 and ended.stdout.strip(), ended.stderr
    if language == "curl":
        assert json.loads(ended.stdout)["usage"]["completion_tokens"] == 16


def test_engine_alone(model):
    assert "def read_lines(path):" in run("engine_alone.py", str(model))


def test_two_workers_in_process(model):
    """The KV that moved feeds the answer of one engine, token for token."""
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(PROMPT, add_special_tokens=False).ids
    whole = bare_engine.serve_alone(
        bare_engine.load_engine(model), [bare_engine.bare_request("whole", ids, max_tokens=24)]
    )["whole"][0]
    out = run("two_workers_in_process.py", str(model))
    assert f"{len(ids)} tokens of KV" in out and "by inproc" in out
    assert out.rstrip("\n").endswith(f"{whole.token_ids}")


def test_many_models(run_stack):
    """The two that are shipped, the mixture of experts among them."""
    demo = EXAMPLES.parent / "demo"
    both = {"code": demo / "target", "experts": demo / "mixture"}
    of = {name: ("--model", str(path), "--served-model-name", name) for name, path in both.items()}
    gateway = ("--model", ",".join(f"{name}={path}" for name, path in both.items()))
    plain = ("--num-blocks", "160", "--threads", "1")
    with run_stack(
        "two", num_prefill=0, options=(*plain, *of["code"]), unlike_decode=[of["experts"]], gateway_options=gateway
    ) as stack:
        out = run("many_models.py", stack.address["gateway0"])
    assert "code (llama): def read_lines(path):" in out and "experts (qwen3_moe): def read_lines(path):" in out


def test_the_adapter_example_writes_tabs(run_stack):
    """The shipped one writes what the base does, by tabs."""
    demo = EXAMPLES.parent / "demo"
    assert sum(path.stat().st_size for name in ("mixture", "adapter") for path in (demo / name).iterdir()) < 5e6
    model = ("--model", str(demo / "target"))
    worker = (*model, "--adapter", f"tabs={demo / 'adapter'}", "--num-blocks", "160", "--threads", "1")
    with run_stack("adapters", num_prefill=0, options=worker, gateway_options=model) as stack:
        base, adapted = run("adapters.py", stack.address["gateway0"]).strip().split("\n\n")
    assert ":tabs: 'def read_lines(path):\\n\\t" in adapted and "\\n    " not in adapted
    assert "'def read_lines(path):\\n    " in base and "\\t" not in base


def test_two_workers_in_process_keep_kv_in_host_memory(tmp_path, monkeypatch):
    """On a GPU, which `auto` takes, a pool is in memory that nobody here gave."""
    asked, find_device = [], build.find_device
    monkeypatch.setattr(build, "find_device", lambda name: asked.append(name) or find_device("cpu"))
    engine, region = load(str(make_model(tmp_path)))
    assert asked == ["cpu"] and len(region.memory) >= engine.pool.whole.nbytes
