"""`canitoolcall probe`, which asks a server of OpenAI's API for calls in nine ways, whole and streamed. The model's
answers are written here, in the manner of Hermes: the rest is what is served."""

import asyncio
import json
import shutil
import sys

import pytest
from canitoolcall.probe import BUILTIN_SCENARIOS
from tokenizers import Tokenizer

from tests.support.pace import patience

EVENT = {
    "title": "Design review", "start": "2026-10-01T15:00:00Z", "location": {"city": "Berlin", "room": "4.12"},
    "attendees": [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}],
}  # fmt: skip
NOTE = {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}


def call(name: str, **arguments) -> str:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


ANSWERS = {
    "single-call": call("get_weather", city="Paris"),
    "parallel-calls": f"{call('get_weather', city='Paris')}\n{call('get_weather', city='Tokyo', unit='c')}",
    "no-call": "42",
    "nested-args": call("create_event", **EVENT),
    "unicode-args": f"One moment.\n{call('save_note', **NOTE)}",
    "empty-args": call("get_server_time"),
    "forced-tool-choice": call("get_weather", city="Lisbon"),
    "tool-result-followup": "18 degrees, and the sky is clear.",
    "reasoning-then-call": f"<think>\n9.90 is more.\n</think>\n\n{call('record_answer', answer='9.9')}",
}


@pytest.fixture(scope="session")
def folder(folder, tmp_path_factory):
    """With room for more tokens: schemas and calls are long in a vocabulary of 400."""
    path = tmp_path_factory.mktemp("probed") / "fake"
    shutil.copytree(folder, path)
    for name, more in (
        ("config.json", {"max_position_embeddings": 4096}),
        ("generation_config.json", {"max_new_tokens": 1024}),
    ):
        config = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**config, **more}))
    return path


@pytest.fixture
def answers(folder):
    """What a worker's answer to each prompt is."""
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    scripts = {
        scenario.messages[0]["content"]: tokens.encode(ANSWERS[scenario.id], add_special_tokens=False).ids
        for scenario in BUILTIN_SCENARIOS
    }

    def script(prompt):
        text = tokens.decode(prompt)
        return next(ids for question, ids in scripts.items() if question in text)

    return script


@pytest.mark.long
async def test_canitoolcall_probes_a_gateway(cluster, capable, answers, tmp_path):
    report = tmp_path / "report.json"
    async with cluster([4096], [4096], http="127.0.0.1:0", tool_call_parser="hermes") as c:
        for worker in c.workers:
            worker.script = answers
        url = f"http://127.0.0.1:{c.gateway.http.port}/v1"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "canitoolcall", "probe", "--base-url", url, "--model", "fake", "--json", str(report),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with asyncio.timeout(patience(120)):
            out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    outcomes = json.loads(report.read_text())["outcomes"]
    assert len(outcomes) == 3 * len(ANSWERS)
    assert [each for each in outcomes if each["status"] != "pass" or each["warnings"]] == []
