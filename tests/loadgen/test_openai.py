"""Load on a server of OpenAI's API: counts are the server's, ends are outcomes, the page is the same."""

import json

import pytest

from baton.cli.main import main
from baton.loadgen.openai import VOCAB_SIZE
from baton.loadgen.plan import OpenAIServer, RunPlan
from baton.loadgen.run import run_jobs
from baton.loadgen.workload import Job
from tests.support.gateway.fake_openai import FakeOpenAI, serving_openai


def send(stub: FakeOpenAI, num: int = 6, concurrency: int | None = 2, **plan):
    jobs = [Job(index, 0.0, 20, 4, (0,), 8) for index in range(num)]
    with serving_openai(stub) as url:
        server = OpenAIServer(url, "stub", True)
        return run_jobs(RunPlan("", VOCAB_SIZE, concurrency, openai=server, **plan), jobs).outcomes


def test_counts_are_those_that_the_server_tells():
    stub = FakeOpenAI(step_s=0.01)
    for outcome in send(stub):
        assert outcome.ok and (outcome.num_prompt, outcome.num_output, outcome.num_cached) == (21, 4, 3)
        assert outcome.num_messages == 3, "one event had no text"
        assert outcome.sent_s < outcome.first_s < outcome.last_s and outcome.tpot_s > 0
    assert stub.num_connections == 2, "a connection is used again"
    prompts = [request["prompt"].split() for request in stub.requests]
    assert len({tuple(prompt) for prompt in prompts}) == 6 and len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert all(request["ignore_eos"] and request["temperature"] == 0 for request in stub.requests)


def test_a_server_that_tells_no_usage():
    assert {outcome.num_output for outcome in send(FakeOpenAI(usage=False))} == {3}, "events with text"


def test_an_answer_without_text_takes_as_long_as_it_took():
    """Such as one of control tokens alone, which the server leaves out."""
    for outcome in send(FakeOpenAI(step_s=0.01, texts=False)):
        assert outcome.ok and not outcome.num_messages and outcome.tpot_s is None
        assert outcome.sent_s < outcome.first_s == outcome.last_s


def test_the_last_line_without_its_blank():
    assert all(outcome.ok for outcome in send(FakeOpenAI(done=b"data:[DONE]"), num=2))


def test_no_more_at_a_time_than_asked_for_whatever_the_processes():
    stub = FakeOpenAI(step_s=0.01)
    assert len(send(stub, num=4, concurrency=1, num_processes=2)) == 4 and stub.num_connections == 1


@pytest.mark.parametrize(
    "stub, status, reason",
    [
        (dict(refuses=("prompt",)), "HTTP 400", "unknown field prompt"),
        (dict(breaks="close"), "UNAVAILABLE", "closed the connection"),
        (dict(breaks="error"), "UNAVAILABLE", "out of memory"),
        (dict(breaks="garbage"), "UNAVAILABLE", "no event: <html>"),
        (dict(breaks="whole"), "UNAVAILABLE", 'no stream of events: {"choices": [{"text": "a"}]}'),
        (dict(done=b""), "UNAVAILABLE", "the stream ended before its [DONE]"),
        (dict(breaks="hang"), "DEADLINE_EXCEEDED", "no answer within 0.5 s"),
    ],
)
def test_ends_that_are_none(stub, status, reason):
    for outcome in send(FakeOpenAI(**stub), num=2, timeout_s=0.5):
        assert outcome.status == status and reason in outcome.reason


def bench(*arguments: str) -> int:
    return main(["bench", "--closed", "2", "--num-requests", "6", "--output-tokens", "5", *arguments])


@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_bench_measures_a_server_of_openais_api(tmp_path, capsys, num_processes):
    out, stub = tmp_path / "run", FakeOpenAI(step_s=0.002, refuses=("ignore_eos",))
    (tmp_path / "key").write_text("sk-1\n")
    with serving_openai(stub) as url:
        more = ("--api-key-file", str(tmp_path / "key"), "--processes", num_processes, "--out", str(out))
        assert bench("--openai", url, *more) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["num_answered"], summary["model"], summary["target"]) == (6, "stub", url)
    assert "was before the first token; the server tells no phases." in capsys.readouterr().out
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert "ignore_eos" in stub.requests[0] and not any("ignore_eos" in request for request in stub.requests[1:])
    assert stub.keys == {"bearer sk-1"}


def test_the_query_of_the_address_goes_with_every_call():
    stub = FakeOpenAI()
    with serving_openai(stub) as url:
        assert bench("--openai", f"{url}/?api-version=1&key=2#part") == 0
    assert stub.queries == {"api-version=1&key=2"}


def test_what_cannot_be_measured_is_one_line(capsys):
    with serving_openai(FakeOpenAI()) as url:
        wrong = {
            ("--openai", url, "--model", "gone"): "has no model 'gone': it has stub, other",
            ("--openai", url.replace("/v1", "/v2")): "HTTP 404",
            ("--openai", "127.0.0.1:8000"): "give the address of an API, such as http://127.0.0.1:8000/v1",
            ("--openai", "http://127.0.0.1:9/v1"): "UNAVAILABLE",
        }
        for arguments, told in wrong.items():
            assert bench(*arguments) == 1
            error = capsys.readouterr().err
            assert told in error and error.count("\n") == 1
