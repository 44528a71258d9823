"""`baton generate` against a stand-in for the gateway: what is asked, what is printed, how it fails."""

import json
import subprocess
import sys

import pytest

from tests.support.launch.commands import run_closed
from tests.support.process import ROOT


def run(*argv: str, stdin: str = "") -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "baton.cli", "generate", *argv]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, input=stdin)


def test_text_as_it_comes(gateway):
    done = run("a prompt", "--target", gateway.target)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Größe\n", "")
    request = gateway.requests[-1]
    assert request.text == "a prompt"
    assert not request.HasField("stopping"), "what is not given is not sent"
    assert [field.name for field, _ in request.sampling.ListFields()] == ["seed"]


def test_the_named_one_of_several_models_is_asked(gateway):
    run("a prompt", "--target", gateway.target, "--model", "code")
    assert gateway.requests[-1].model == "code"


def test_json_has_tokens_usage_and_timing_and_the_flags_reach_the_request(gateway):
    argv = ["a prompt", "--target", gateway.target, "--json"]
    done = run(*argv, "--max-tokens", "9", "--temperature", "0", "--seed", "18446744073709551615")
    answer = json.loads(done.stdout)
    assert answer["text"] == "Größe" and answer["token_ids"] == [1, 2, 3] and answer["finish_reason"] == "stop"
    assert answer["seed"] == 7 and answer["request_id"] == "r"
    assert answer["usage"]["prompt_tokens"] == 4 and answer["timing"]["ttft_s"] == 0.5
    request = gateway.requests[-1]
    assert request.stopping.max_tokens == 9 and request.sampling.seed == 2**64 - 1
    assert request.sampling.HasField("temperature") and request.sampling.temperature == 0


def test_several_answers_are_printed_whole(gateway):
    done = run("x", "--target", gateway.target, "-n", "2")
    assert done.stdout == "--- 1 of 2\nGröße\n--- 2 of 2\nGröße\n"
    done = run("x", "--target", gateway.target, "-n", "2", "--logprobs", "0", "--json")
    answer = json.loads(done.stdout)
    assert [choice["text"] for choice in answer["choices"]] == ["Größe"] * 2 and answer["usage"]["prompt_tokens"] == 4
    assert answer["choices"][1]["logprobs"] == [{"chosen": {"logprob": -0.5}}]
    assert gateway.requests[-1].sampling.HasField("logprobs")


def test_chat_template_and_stop_strings(gateway):
    run("x", "--target", gateway.target, "--chat", "--stop", "a", "--stop", "b")
    request = gateway.requests[-1]
    assert [(message.role, message.content) for message in request.messages.messages] == [("user", "x")]
    assert request.stopping.stop == ["a", "b"]
    run("x", "--target", gateway.target, "--system", "Be short.")
    roles = [message.role for message in gateway.requests[-1].messages.messages]
    assert roles == ["system", "user"]


@pytest.mark.parametrize("argv", [[], ["-"]])
def test_the_prompt_on_stdin(gateway, argv):
    done = run(*argv, "--target", gateway.target, stdin="two\nlines")
    assert done.stdout == "Größe\n" and gateway.requests[-1].text == "two\nlines"


def test_a_prompt_beyond_what_a_gateway_takes(gateway):
    done = run("--target", gateway.target, stdin="x" * 5_000_000)
    told = f"baton generate: {gateway.target}: the request is larger than the 1048576 bytes that a gateway takes\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_without_a_prompt_the_use_is_wrong(gateway):
    done = run("--target", gateway.target)
    assert done.returncode == 2 and "PROMPT" in done.stderr


def test_closed_streams_are_told_or_left(gateway):
    """Closed by who started it: nothing is read, nothing is shown."""
    status, told = run_closed("<&-", "generate", "--target", gateway.target)
    assert (status, told) == (2, "baton generate: no PROMPT: give it, or text on stdin\n")
    assert run_closed(">&-", "generate", "x", "--target", gateway.target) == (0, "")


def test_a_prompt_that_is_no_text(gateway):
    done = run("\udcff", "--target", gateway.target)  # the byte 0xff
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "UTF-8" in done.stderr


def test_the_second_address_answers(gateway):
    done = run("x", "--target", f"127.0.0.1:9,{gateway.target}")
    assert done.stdout == "Größe\n"


def test_a_refused_request_is_one_line_with_status_and_field(gateway):
    done = run("x", "--target", gateway.target, "--max-tokens", "0")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.count("\n") == 1 and "INVALID_ARGUMENT" in done.stderr and "stopping.max_tokens" in done.stderr


def test_a_terminal_that_is_not_utf_8(gateway, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run("x", "--target", gateway.target)
    assert done.returncode == 1 and done.stderr.startswith("baton generate: stdout is not UTF-8: 'ascii' codec")


def test_an_unreachable_gateway_is_one_line():
    done = run("x", "--target", "127.0.0.1:9")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "127.0.0.1:9" in done.stderr


@pytest.mark.parametrize(
    "options, word",
    [
        (["--max-tokens", "-1"], "--max-tokens"),
        (["--max-tokens", "many"], "--max-tokens"),
        (["--seed", str(2**64)], "--seed"),
        (["--temp", "1"], "--temp"),
        (["--logprobs", "2"], "--json"),
        (["-n", "0"], "-n"),
        (["--target", ","], "--target"),
    ],
)
def test_wrong_options_exit_2_and_are_named(options, word):
    done = run("x", *options)
    assert done.returncode == 2 and word in done.stderr
