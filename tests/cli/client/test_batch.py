"""`baton batch` against a stand-in for the gateway: order, resuming, lines that fail, and the bound on what runs at
once."""

import json
import os
import resource
import threading
import time
from concurrent import futures

import grpc
import pytest

from baton.cli.client.batch_lines import LineRunner
from baton.cli.main import main
from baton.service.errors import (
    BatonError,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    to_status,
)
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from gateway.http.openai.answers import ChatWriter, CompletionWriter
from gateway.http.openai.requests import read_chat, read_completion
from gateway.http.wire.encoding import to_bytes_in_turns
from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import Tokenizer
from tests.support.gateway.small_tokenizers import byte_level, sentencepiece
from tests.support.launch.commands import run_unread


class Echo(inference_pb2_grpc.InferenceServicer):
    """Answers with the prompt; `failures` says how often which prompt is refused first, `on_request` sees each."""

    def __init__(self):
        self.requests, self.target, self.models, self.is_old = [], "", ["demo"], False
        self.keys, self.on_request = [], lambda said: None
        self.failures: dict[str, list[BatonError]] = {}
        self.most_at_once, self._at_once, self._lock = 0, 0, threading.Lock()

    def Complete(self, request, context):
        said = request.text or "".join(each.content for each in request.messages.messages[-1:])  # "" for tokens
        with self._lock:
            self.requests.append(request)
            self.keys.append(dict(context.invocation_metadata()).get("authorization"))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self.on_request(said)
            if errors := self.failures.get(said):
                status = to_status(error := errors.pop(0))
                context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
                context.abort(error.code, status.message)
            time.sleep(0.05 if said.endswith("0") else 0.001)  # what begins first does not end first
            reply = pb.CompleteResponse(usage=pb.Usage(prompt_tokens=2, output_tokens=1))
            choice = reply.choices.add(text=said.upper(), finish_reason=pb.FINISH_REASON_STOP, token_ids=[9])
            if request.sampling.HasField("logprobs"):
                choice.logprobs.add().chosen.token_id = 9
            if request.echo:
                reply.prompt.CopyFrom(pb.EchoedPrompt(text=said, token_ids=[7, 8]))
                reply.prompt_logprobs.add().chosen.token_id = 8
            return reply
        finally:
            with self._lock:
                self._at_once -= 1

    def Detokenize(self, request, context):
        name = self._named(request, context)
        if self.is_old:
            return pb.DetokenizeResponse(text="x")
        texts = (f"<{name} {token_id}>".encode() for token_id in request.token_ids)
        return pb.DetokenizeResponse(tokens=(pb.TokenText(text=text, first_text=text) for text in texts))

    def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(name=self._named(request, context))

    def ListModels(self, request, context):
        return pb.ListModelsResponse(models=[pb.GetModelInfoResponse(name=name) for name in self.models])

    def _named(self, request, context) -> str:
        if not request.model and len(self.models) > 1:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "model: is needed, one of: " + ", ".join(self.models))
        return request.model or self.models[0]


@pytest.fixture
def echo():
    server, servicer = grpc.server(futures.ThreadPoolExecutor(16)), Echo()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(0).wait()


def chat(custom_id: str, text: str = "", **body) -> dict:
    body = {"messages": [{"role": "user", "content": text or custom_id}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def _written(file, lines):
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def completion(custom_id: str, prompt, **body) -> dict:
    body = {"prompt": prompt, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def run(tmp_path, echo):
    """Write the lines, run the command, and return its status and the results."""

    def run_(lines, *argv: str):
        file, output = tmp_path / "in.jsonl", tmp_path / "in.results.jsonl"
        lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        file.write_bytes(b"\n".join(lines) + b"\n")
        status = main(["batch", str(file), "--target", echo.target, *argv])
        return status, [json.loads(line) for line in output.read_text().splitlines()] if status < 2 else []

    return run_


def text_of(result) -> str:
    return result["response"]["body"]["choices"][0]["message"]["content"]


def test_results_in_order(run, echo, capsys):
    status, results = run([chat(f"r{i}") for i in range(40)], "--concurrency", "4")
    assert status == 0 and [result["custom_id"] for result in results] == [f"r{i}" for i in range(40)]
    assert [text_of(result) for result in results] == [f"R{i}" for i in range(40)]
    assert 2 <= echo.most_at_once <= 4
    assert {request.slo_class for request in echo.requests} == {"batch"}
    first = results[0]
    assert first["error"] is None and first["response"]["status_code"] == 200
    assert first["response"]["body"]["object"] == "chat.completion" and first["response"]["body"]["model"] == "demo"
    assert "40 results, 0 of them failures" in capsys.readouterr().out


def test_each_form(run, echo):
    lines = [completion("a", "x"), completion("b", ["y", "z"]), chat("c", logprobs=True, slo_class="standard")]
    _, results = run(lines)
    texts = [[choice["text"] for choice in result["response"]["body"]["choices"]] for result in results[:2]]
    assert texts == [["X"], ["Y", "Z"]]
    (token,) = results[2]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert token["token"] == "<demo 9>" and token["bytes"] == list(b"<demo 9>")
    assert sorted(request.slo_class for request in echo.requests) == ["batch"] * 3 + ["standard"]


def test_an_echoed_prompt_has_its_tokens(run, echo):
    _, (result,) = run([completion("a", "x", echo=True, logprobs=0)])
    (choice,) = result["response"]["body"]["choices"]
    assert choice["text"] == "xX" and choice["logprobs"]["tokens"] == ["<demo 7>", "<demo 8>", "<demo 9>"]


def test_lines_of_several_models(run, echo):
    """Each result has the name and the tokens of the model that its line asked."""
    echo.models = ["chat", "code"]
    names = ("chat", "code", "chat")
    _, results = run([chat(f"r{i}", model=name, logprobs=True) for i, name in enumerate(names)])
    assert [request.model for request in echo.requests].count("code") == 1
    for name, result in zip(names, results, strict=True):
        body = result["response"]["body"]
        assert body["model"] == name
        assert body["choices"][0]["logprobs"]["content"][0]["token"] == f"<{body['model']} 9>"


def test_a_failing_line_ends_nothing(run, echo):
    echo.failures = {"wrong": [wrong := InvalidRequest("messages", "is wrong")], "full": [Overloaded("full", 0.01)] * 3}
    wrong.request_id = "r7"
    bad = [
        b"{no JSON", b"[]", b"\xff", b'{"custom_id": 1}', b'{"custom_id": "\\ud800"}',
        {**chat("m"), "method": "GET"}, {**chat("u"), "url": "/v1/nowhere"}, {**chat("l"), "url": []},
        {**chat("b"), "body": 1},
        chat("s", stream=True), chat("k", no_such=1), chat("w", "wrong"),
    ]  # fmt: skip
    status, results = run([chat("first"), *bad, chat("f", "full"), chat("last")])
    assert status == 0 and len(results) == len(bad) + 3
    assert text_of(results[0]) == "FIRST" and text_of(results[-1]) == "LAST"
    assert text_of(results[-2]) == "FULL", "what is refused for now is sent again"
    assert [result["custom_id"] for result in results[1:6]] == [None] * 5
    assert all(result["error"]["code"] == "invalid_line" for result in results[1:10])
    for result, param in zip(results[10:13], ("stream", "no_such", "messages"), strict=True):
        assert result["response"]["status_code"] == 400 and result["error"] is None
        assert result["response"]["body"]["error"]["param"] == param
    assert results[12]["response"]["request_id"] == "r7"  # by which the gateway's log has it


def test_a_line_that_is_refused_again_and_again_waits(run, echo):
    """A refusal is an answer: there may be more of them than attempts that nobody answers."""
    full, gone = [Overloaded("full", 0.001)] * 30, [Unavailable("gone", 0.001)]
    echo.failures = {"full": full + gone + full}
    status, (result,) = run([chat("a", "full")])
    assert status == 0 and text_of(result) == "FULL" and len(echo.requests) == 62


def test_half_a_surrogate_pair_in_the_name_of_a_field_fails_its_line_alone(run, tmp_path):
    """The result names the field."""
    lines = [chat("first"), chat("half", **{"\ud800": 1}), chat("last")]
    for _ in range(2):
        status, results = run(lines)
        assert status == 0 and [result["custom_id"] for result in results] == ["first", "half", "last"]
        assert results[1]["response"]["status_code"] == 400
        assert "\ud800" in results[1]["response"]["body"]["error"]["message"]
        assert b"\\ud800" in (tmp_path / "in.results.jsonl").read_bytes()


def test_a_prompt_of_tokens(run):
    _, (result,) = run([completion("a", [7, 8], logprobs=0)])
    (choice,) = result["response"]["body"]["choices"]
    assert choice["logprobs"]["tokens"] == ["<demo 9>"] and choice["logprobs"]["text_offset"] == [0]


class OneAnswer:
    """A client whose gateway has one answer, and this tokenizer."""

    def __init__(self, tokenizer_json: bytes, answer: pb.CompleteResponse):
        self.detokenizer, self.num_calls = Detokenizer(Tokenizer(tokenizer_json)), 0
        self._answer = answer

    async def complete(self, request):
        answer = pb.CompleteResponse()
        answer.CopyFrom(self._answer)
        return answer

    async def model_info(self, model):
        return pb.GetModelInfoResponse(name="m")

    async def token_texts(self, token_ids, *, model):
        self.num_calls += 1
        return list(map(self.detokenizer.token_text, token_ids))


@pytest.mark.parametrize("prompt", ["the fox", [5, 6], [1]])
@pytest.mark.parametrize("tokenizer_json", [byte_level(), sentencepiece("normalizer")], ids=["bytes", "sentencepiece"])
async def test_tokens_are_as_over_http(tokenizer_json, prompt):
    """Also parts of a character, spaces at the beginning and within a text, and special tokens, which have none."""
    tokens = Tokenizer(tokenizer_json).decoder
    ids = [*tokens.encode(" the fox 🙂 the", add_special_tokens=False).ids, tokens.token_to_id("</s>")]
    best = [pb.TokenLogprob(token_id=each, logprob=-2) for each in (*ids[:3], ids[-1], tokens.token_to_id("<|end|>"))]
    logprobs = [pb.Logprobs(chosen=pb.TokenLogprob(token_id=each, logprob=-1), top=best) for each in ids]
    answer = pb.CompleteResponse(choices=[pb.Choice(text="x", token_ids=ids, logprobs=logprobs)])
    client = OneAnswer(tokenizer_json, answer)
    for line, read, writer in (
        (completion("a", prompt, logprobs=5), read_completion, CompletionWriter),
        (chat("a", logprobs=True, top_logprobs=5), read_chat, ChatWriter),
    ):
        result = await LineRunner(client).result(1, json.dumps(line))
        over_http = writer(read(line["body"]), "m", client.detokenizer).whole([await client.complete(None)])
        expected = json.loads(await to_bytes_in_turns(over_http))["choices"][0]["logprobs"]
        assert result["response"]["body"]["choices"][0]["logprobs"] == expected
    assert client.num_calls == 2


def test_what_has_a_result_is_not_sent_again(run, echo, tmp_path, capsys):
    lines = [b"{no JSON", *[chat(f"r{i}") for i in range(6)]]
    run(lines)
    output = tmp_path / "in.results.jsonl"
    whole = output.read_bytes()
    kept = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(kept[:4]) + kept[4][:20])  # killed while it wrote
    echo.requests.clear()
    status, results = run(lines)
    assert status == 0 and len(echo.requests) == 3
    assert [result["custom_id"] for result in results] == [None, *[f"r{i}" for i in range(6)]]
    assert "3 results" in (said := capsys.readouterr().out) and "4 were there already" in said
    echo.requests.clear()
    assert run(lines)[0] == 0 and not echo.requests
    assert capsys.readouterr().out.endswith(": nothing to do, all 7 results were there already\n")


@pytest.mark.parametrize("results", [
    b'{"custom_id": "other"}\n', b"text\n", b'{"custom_id": "a"}\n{"custom_id": "b"}\n',
    b'[{"precious": 1}]', b'{"custom_id": "a"}\nnotes', b'{"id":"batch_rex',
])  # fmt: skip
def test_results_of_something_else_are_not_touched(run, echo, tmp_path, capsys, results):
    output = tmp_path / "in.results.jsonl"
    output.write_bytes(results)
    assert run([chat("a")])[0] == 2
    assert output.read_bytes() == results and not echo.requests
    assert "--output" in capsys.readouterr().err


def test_half_a_result_stays_until_a_gateway_is_there(run, echo, tmp_path):
    output, half = tmp_path / "in.results.jsonl", b'{"id":"batch_req_1","cus'
    output.write_bytes(half)
    assert main(["batch", "--target", "127.0.0.1:9", str(_written(tmp_path / "in.jsonl", [chat("a")]))]) == 1
    assert output.read_bytes() == half
    status, (result,) = run([chat("a")])
    assert status == 0 and text_of(result) == "A"


def test_a_disk_that_is_full_is_said_once(run, echo, tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = [chat("a"), chat("b")]
    run(lines[:1])
    size = (tmp_path / "in.results.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
    try:
        assert main(["batch", "--target", echo.target, str(_written(tmp_path / "in.jsonl", lines))]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = capsys.readouterr().err
    assert "in.results.jsonl: File too large" in told and told.count("\n") == 1
    status, results = run(lines)
    assert status == 0 and [text_of(result) for result in results] == ["A", "B"]


def test_two_at_a_time_do_not_write_one_file(run, echo, tmp_path, capsys):
    second = []
    echo.on_request = lambda said: second.append(main(["batch", str(tmp_path / "in.jsonl"), "--target", echo.target]))
    status, (result,) = run([chat("a")])
    assert status == 0 and text_of(result) == "A" and second == [2] and len(echo.requests) == 1
    assert "in.results.jsonl: another `baton batch` writes it" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["/dev/zero", "/dev/full", "/dev/null", "fifo", "."])
def test_an_output_that_cannot_be_read_again_is_refused(output, echo, tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    file = _written(tmp_path / "in.jsonl", [chat("a")])
    assert main(["batch", str(file), "--target", echo.target, "--output", str(tmp_path / output)]) == 2
    told = capsys.readouterr().err
    assert "is no regular file" in told and told.count("\n") == 1 and not echo.requests


@pytest.mark.parametrize("error", [Unauthenticated("the key has ended"), PermissionDenied("not this caller")])
def test_a_key_that_ends_is_no_result(run, echo, capsys, error):
    """It says nothing of the line; those behind it would all have it too."""
    echo.failures = {"r2": [error]}
    lines = [chat(f"r{i}") for i in range(4)]
    status, results = run(lines)
    assert status == 1 and [result["custom_id"] for result in results] == ["r0", "r1"]
    told = capsys.readouterr().err
    assert error.message in told and "2 lines are left" in told and told.count("\n") == 1
    status, results = run(lines)
    assert status == 0 and [text_of(result) for result in results] == ["R0", "R1", "R2", "R3"]


def test_a_key_that_is_replaced_in_mid_run(run, echo, tmp_path):
    """As security.md has it: the file is read again for each attempt."""
    key = tmp_path / "key"
    key.write_text("first\n")
    echo.on_request = lambda said: key.write_text("second\n")
    run([chat(f"r{i}") for i in range(3)], "--api-key-file", str(key), "--concurrency", "1")
    assert echo.keys == ["Bearer first", "Bearer second", "Bearer second"]


def test_a_file_that_begins_with_a_byte_order_mark(run):
    _, results = run([b"\xef\xbb\xbf" + json.dumps(chat("a")).encode() + b"\r", chat("b")])
    assert [text_of(result) for result in results] == ["A", "B"]


def test_a_lone_carriage_return_ends_no_line(run):
    """It is blank space of JSON."""
    line = json.dumps(chat("a")).encode()
    _, results = run([line.replace(b", ", b",\r"), chat("b")])
    assert [text_of(result) for result in results] == ["A", "B"]


def test_requests_of_one_name_are_refused(run, echo, tmp_path, capsys):
    """As OpenAI's batches are: nothing would say which result is whose. Lines without a name fail alone."""
    lines = [b"{}", chat("a"), chat("b"), b"{}", chat("a", "again")]
    assert run(lines)[0] == 2 and not echo.requests and not (tmp_path / "in.results.jsonl").read_bytes()
    told = capsys.readouterr().err
    assert "in.jsonl: requests 2 and 5 have the custom_id 'a'" in told and told.count("\n") == 1


@pytest.mark.parametrize("name, results", [("req.v1", "req.v1"), ("data.json", "data.json"), ("a.jsonl", "a")])
def test_each_file_has_results_of_its_own(name, results, echo, tmp_path):
    file = _written(tmp_path / name, [chat("a")])
    assert main(["batch", str(file), "--target", echo.target]) == 0
    assert (tmp_path / f"{results}.results.jsonl").read_bytes()


def test_results_are_written_though_nobody_reads_what_is_said(echo, tmp_path):
    """`PYTHONUNBUFFERED=1 baton batch | true`, as in a container."""
    file = _written(tmp_path / "in.jsonl", [chat("a")])
    assert run_unread("batch", str(file), "--target", echo.target) == (0, "")
    assert (tmp_path / "in.results.jsonl").read_bytes()


def test_a_line_beyond_what_a_gateway_takes_is_not_one_to_send_again(run):
    """As over HTTP; gRPC says RESOURCE_EXHAUSTED, as of a refusal for now."""
    _, (result,) = run([chat("a", "x" * 5_000_000)])
    error = result["response"]["body"]["error"]
    assert result["response"]["status_code"] == 413
    assert error["code"] == "body_too_large" and error["type"] == "invalid_request_error"


def test_a_gateway_that_goes(run, echo, monkeypatch, capsys):
    from baton.cli.client import batch
    from baton.client import RetryPolicy

    monkeypatch.setattr(batch, "_RETRY", RetryPolicy(max_attempts=2, first_pause_s=0.001))
    echo.failures = {"r2": [Unavailable("gone")] * 2}
    lines = [chat(f"r{i}") for i in range(4)]
    status, results = run(lines)
    assert status == 1 and [result["custom_id"] for result in results] == ["r0", "r1"]
    assert "2 lines are left" in capsys.readouterr().err
    status, results = run(lines)
    assert status == 0 and [text_of(result) for result in results] == ["R0", "R1", "R2", "R3"]


def test_a_gateway_that_does_not_tell_what_tokens_say(run, echo, capsys):
    """One of the version before, which knows no such field of the request."""
    echo.is_old = True
    status, results = run([chat("r0"), chat("r1", logprobs=True)])
    assert status == 1 and [result["custom_id"] for result in results] == ["r0"]
    assert "older than this program" in capsys.readouterr().err


def test_of_several_addresses_one_that_serves_is_enough(run, echo):
    status, (result,) = run([chat("a")], "--target", f"127.0.0.1:9,127.0.0.1:9,{echo.target}")
    assert status == 0 and text_of(result) == "A"


@pytest.fixture
def once(tmp_path):
    """Paths of what has its lines once, or none."""
    reader, writer = os.pipe()
    os.write(writer, json.dumps(chat("a")).encode())
    os.close(writer)
    os.mkfifo(tmp_path / "fifo")
    yield {"pipe": f"/dev/fd/{reader}", "fifo": str(tmp_path / "fifo"), "folder": str(tmp_path)}
    os.close(reader)


@pytest.mark.parametrize("name", ["pipe", "fifo", "folder", "", ".", "/"])
def test_what_cannot_be_read_twice_is_refused(name, once, echo, tmp_path, capsys):
    file, output = once.get(name, name), tmp_path / "results.jsonl"
    for more in ([], ["--output", str(output)]):
        assert main(["batch", file, "--target", echo.target, *more]) == 2
        told = capsys.readouterr().err
        assert "is no regular file" in told and told.count("\n") == 1
    assert not echo.requests and not output.exists()


def test_wrong_files_and_an_unreachable_gateway_end_with_a_status(tmp_path, capsys):
    assert main(["batch", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    (tmp_path / "in.jsonl").write_text("{}\n")
    assert main(["batch", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "in.jsonl")]) == 2
    assert main(["batch", str(tmp_path / "in.jsonl"), "--target", "127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
