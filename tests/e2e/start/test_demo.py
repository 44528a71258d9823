"""`make demo` without its set-up: the shipped model, three processes, one completion, the table of its phases."""

import re
import subprocess
import sys

from tokenizers import Tokenizer

from baton.cli.cluster import demo
from baton.client import make_request
from tests.support import bare_engine
from tests.support.process import ROOT

MODEL = ROOT / "demo" / "target"
PROMPT = 'def parse_version(text):\n    """Split a version like 1.2.3 into a tuple of numbers."""\n' * 3
MAX_TOKENS = 24


def test_the_demo_streams_the_engines_answer_and_its_phases_add_up():
    argv = [sys.executable, "-m", "baton.cli.cluster.demo", "--prompt", PROMPT, "--max-tokens", str(MAX_TOKENS)]
    ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr

    assert PROMPT + _whole() in ran.stdout, "the answer is not the bare engine's"
    phases = dict(re.findall(r"^(?:= )?(\w+_s) +([\d.]+)", ran.stdout, re.MULTILINE))
    ttft_ms = float(phases.pop("ttft_s"))
    assert len(phases) == 6 and abs(sum(map(float, phases.values())) - ttft_ms) < 0.05
    assert float(re.search(r"KV moved in ([\d.]+) ms", ran.stdout)[1]) > 0, "nothing was handed over"


def _whole() -> str:
    """The text that one engine without a stack writes to the same sampling."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompt_ids = tokenizer.encode(PROMPT).ids
    engine = bare_engine.load_engine(MODEL, num_blocks=64)
    eos_ids = engine.spec.eos_token_ids
    sampling = {field.name: value for field, value in make_request(PROMPT, demo.SAMPLING).sampling.ListFields()}
    request = bare_engine.bare_request("whole", prompt_ids, max_tokens=MAX_TOKENS, eos_ids=eos_ids, **sampling)
    answer = bare_engine.serve_alone(engine, [request])["whole"][0]
    token_ids = [token_id for token_id in answer.token_ids if token_id not in eos_ids]
    return tokenizer.decode(token_ids)
