"""A client for tests and benches: requests from keywords, streams gathered and checked, errors read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton import client
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.pace import patience

Prompt = str | Sequence[int] | Sequence[tuple[str, str]]


def make_request(
    prompt: Prompt | None, *, request_id: str = "", model: str = "", resume_from: Sequence[int] = (),
    constraint: pb.Constraint | None = None, echo: bool = False, stream_interval_ms: int = 0,
    **fields,
) -> pb.GenerateRequest:  # fmt: skip
    """Return a GenerateRequest. `prompt`: text, token ids, or (role, content) pairs; other keywords are fields of
    Sampling and Stopping."""
    request = pb.GenerateRequest(request_id=request_id, model=model, resume_from=resume_from, constraint=constraint)
    request.echo, request.stream_interval_ms = echo, stream_interval_ms
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], tuple):
        request.messages.messages.extend(pb.Message(role=role, content=content) for role, content in prompt)
    elif prompt is not None:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt)
    sampling = {name: value for name, value in fields.items() if name in pb.Sampling.DESCRIPTOR.fields_by_name}
    stopping = {name: value for name, value in fields.items() if name not in sampling}
    request.sampling.MergeFrom(pb.Sampling(**sampling))
    request.stopping.MergeFrom(pb.Stopping(**stopping))
    return request


@dataclass
class Choice:
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple] = field(default_factory=list)  # (chosen id, logprob, ((id, logprob), ...)) a token
    finish_reason: str = ""
    matched_stop: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class Reply:
    """A whole stream, gathered."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: pb.Usage | None = None
    timing: pb.Timing | None = None
    seed: int | None = None
    request_id: str = ""
    num_messages: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text

    def outcome(self) -> dict[int, tuple]:
        """Return what must not depend on the worker that ran a request: tokens, text, logprobs, endings."""
        return {
            index: (choice.token_ids, choice.text, choice.logprobs, choice.finish_reason, choice.matched_stop)
            for index, choice in sorted(self.choices.items())
        }


def gather(stream: Iterable[pb.GenerateResponse]) -> Reply:
    """Read a stream to its end and check its shape: one finish a choice, nothing after it, usage and timing last."""
    reply = Reply()
    for message in stream:
        assert reply.usage is None, "a message after usage"
        choice = reply.choices.setdefault(message.index, Choice())
        assert not choice.finish_reason or message.HasField("usage"), "a message after the choice's end"
        choice.pieces.append(message.text)
        choice.token_ids.extend(message.token_ids)
        choice.logprobs.extend(map(_logprobs, message.logprobs))
        if message.finish_reason:
            assert not choice.finish_reason, "a choice ended twice"
            choice.finish_reason = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_")
            choice.matched_stop = message.matched_stop
        if not reply.num_messages:
            assert message.HasField("seed") and message.request_id, "the first message has no seed or no request_id"
            reply.seed, reply.request_id = message.seed, message.request_id
        if message.HasField("usage"):
            assert message.HasField("timing"), "usage without timing"
            reply.usage, reply.timing = message.usage, message.timing
        reply.num_messages += 1
    assert reply.usage is not None, "the stream ended without usage"
    assert all(choice.finish_reason for choice in reply.choices.values()), "a choice without an end"
    return reply


def _logprobs(entry: pb.Logprobs) -> tuple:
    top = tuple((best.token_id, best.logprob) for best in entry.top)
    return entry.chosen.token_id, entry.chosen.logprob, top


class Client:
    """The blocking client, which sends once so that a failure is seen, and gathers. `stub` and `channel`: calls as gRPC
    has them. Close with `close()`."""

    def __init__(self, target: str):
        self._client = client.Client(target, retry=client.NO_RETRIES)
        self.channel = grpc.insecure_channel(target)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    def close(self) -> None:
        self._client.close()
        self.channel.close()

    def stream(
        self, prompt: Prompt | None, *, timeout: float | None = patience(60), metadata=(), **fields
    ) -> client.Stream:
        """Return an iterator of GenerateResponse that can be cancelled."""
        return self._client.send(make_request(prompt, **fields), timeout_s=timeout, metadata=tuple(metadata))

    def generate(self, prompt: Prompt | None, **fields) -> Reply:
        return gather(self.stream(prompt, **fields))

    def generate_many(self, requests: Iterable[pb.GenerateRequest], timeout: float = patience(60)) -> list[Reply]:
        """Send all at once; returns replies in the order of the requests."""
        calls = [self._client.send(request, timeout_s=timeout) for request in requests]
        return [gather(call) for call in calls]

    def tokenize(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            prompt = [pb.Message(role=role, content=content) for role, content in prompt]
        return self._client.tokenize(prompt, timeout_s=patience(30))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._client.detokenize(token_ids, timeout_s=patience(30))


@dataclass(frozen=True)
class Refused:
    """An RPC error, read: its code, message, and google.rpc details."""

    code: grpc.StatusCode
    message: str
    fields: tuple[str, ...]  # BadRequest
    reason: str  # ErrorInfo
    retry_after_s: float | None  # RetryInfo


def read_error(error: grpc.RpcError) -> Refused:
    fields, reason, retry_after_s = [], "", None
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest.FromString(detail.value)
            fields += [violation.field for violation in bad_request.field_violations]
        elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            reason = error_details_pb2.ErrorInfo.FromString(detail.value).reason
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
            retry_after_s = delay.seconds + delay.nanos / 1e9
    return Refused(error.code(), error.details(), tuple(fields), reason, retry_after_s)


def add_messages(reply: Reply, messages) -> Reply:
    """Add messages to what a client has received."""
    for message in messages:
        choice = reply.choices.setdefault(message.index, Choice())
        choice.pieces.append(message.text)
        choice.token_ids.extend(message.token_ids)
        choice.logprobs += [(each.chosen.token_id, each.chosen.logprob) for each in message.logprobs]
        if message.finish_reason:
            choice.finish_reason = message.finish_reason
        if message.HasField("usage"):
            reply.usage = message.usage
        reply.seed = message.seed if message.HasField("seed") else reply.seed
    return reply


def read_some(call, num_messages: int) -> Reply:
    """Gather the first messages of a stream, which goes on."""
    reply = Reply()
    for _ in range(num_messages):
        add_messages(reply, [next(call)])
    return reply
