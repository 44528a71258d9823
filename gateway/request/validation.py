"""Turn a client's message into a ValidatedRequest, or raise InvalidRequest that names the field. Nothing is allocated
before."""

import hashlib
import re
import secrets
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.constraints.constraint import BadConstraint, Constraint, constraint_of
from baton.protocol import DEFAULT_TENANT, MAX_DRAFT_TOKENS
from baton.sampling_params import SAMPLING_PARAMS, SHIFT, settle_temperature
from baton.service.errors import ContextLengthExceeded, InvalidRequest, NotFound, NoWorker
from baton.v1 import inference_pb2 as pb
from baton.v1 import worker_pb2
from gateway.config.served_model import PRESETS, RequestLimits, ServedModel
from gateway.config.slo_classes import DEFAULT_CLASS
from gateway.request.messages import check_conversation
from gateway.text.prompt_input import PromptInput

MAX_REQUEST_BYTES = 1 << 20
MAX_STREAM_INTERVAL_MS = 60_000
MAX_TOKEN_TEXTS = 1024  # in one call: the event loop makes them
MAX_STOPS, MAX_STOP_TOKEN_IDS, MAX_LOGIT_BIAS = (
    max(getattr(limits, name) for limits in PRESETS.values()) for name in ("stops", "stop_token_ids", "logit_bias")
)
_NO_IDS: frozenset[int] = frozenset()
_NO_SPECULATION = pb.Speculation()  # never changed: each message is 0.5 KB of an open stream
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request whose every field is in range."""

    request_id: str  # as the client knows it
    key_id: str  # unique among tenants, which may choose the same request_id; all workers and gateways use it
    prompt: PromptInput = field(repr=False)
    sampling_bytes: bytes  # a serialized WorkerSampling: a seventh of the message's memory
    num_choices: int
    seed: int
    max_tokens: int | None  # None: not asked for
    min_tokens: int
    stops: tuple[str, ...] = field(repr=False)
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    priority: int
    speculation: pb.Speculation  # as asked for
    slo_class: str
    resume_from: tuple[int, ...] = ()  # tokens of each choice that the client already has; empty: a new answer
    has_slo_class: bool = False  # the client named the class
    constraint: Constraint | None = field(default=None, repr=False)  # its kind is known, its text not checked yet
    echo: bool = False
    echo_token_ids: bool = False
    suffix: str = field(default="", repr=False)  # the text behind the answer, for infilling
    num_logprobs: int = 0  # for each token of the answer, its own included; 0: none are asked for
    num_prompt_logprobs: int = 0  # beside the token's own, if they are asked for
    # False also if the client resumes an answer: it has them already.
    asks_for_prompt_logprobs: bool = False
    stream_interval_s: float = 0.0  # between two messages of a choice
    adapter: bytes = b""  # identity of the adapter to answer with; empty: none

    @property
    def sampling(self) -> worker_pb2.WorkerSampling:
        """The sampling parameters, with every field set, as a new message each time."""
        return worker_pb2.WorkerSampling.FromString(self.sampling_bytes)

    def without_content(self) -> "ValidatedRequest":
        """Return the request without its content and without all that may be large, to be kept after it has ended."""
        sampling = self.sampling
        sampling.ClearField("logit_bias")
        return replace(
            self,
            prompt=PromptInput(),
            suffix="",
            sampling_bytes=sampling.SerializeToString(),
            stops=(),
            stop_token_ids=_NO_IDS,
            constraint=None,
        )


def check_model(asked: str, served: ServedModel) -> bytes:
    """Return the identity of the adapter that a request names, or b"" if it names the model itself or nothing. Raises
    NotFound for a name that is not served, NoWorker if that is not known yet."""
    if (adapter := served.find(asked)) is None:
        raise unknown_model_error(asked, [served])
    return adapter


def unknown_model_error(asked: str, models: Sequence[ServedModel]) -> NotFound | NoWorker:
    """Return the error of a request whose model is none of these, nor an adapter that their workers have named so
    far."""
    if all(model.is_whole for model in models):
        return model_not_served_error(asked, models)
    message = f"model {asked[:80]!r} is not known here before all workers have said which adapters they hold"
    return NoWorker(message)


def model_not_served_error(asked: str, models: Sequence[ServedModel]) -> NotFound:
    """Return the error that lists what is served instead of `asked`."""
    named = []
    for model in models:
        beside = f" and its adapters {', '.join(sorted(model.adapters))}" if model.adapters else ""
        named.append(f"{model.name}{beside[:400]}")
    message = f"model {asked[:80]!r} is not served here, only {'; '.join(named)}"
    return NotFound(message, reason="MODEL_NOT_FOUND")


def check_size(request, where: str = "token_ids") -> None:
    """Raise InvalidRequest for a message that is too large. It names the message's input, which makes it so; `where` is
    the field if the message does not say which input it has."""
    if (num_bytes := request.ByteSize()) > MAX_REQUEST_BYTES:
        if "input" in request.DESCRIPTOR.oneofs_by_name:
            where = request.WhichOneof("input")
        raise InvalidRequest(
            where or "request", f"the request has {num_bytes} bytes, at most {MAX_REQUEST_BYTES} are allowed"
        )


def validate(
    request: pb.GenerateRequest,
    served: ServedModel,
    tenant: str = DEFAULT_TENANT,
    max_priority: int = 0,
    request_id: str = "",
) -> ValidatedRequest:
    """Return the request after every check that is possible before tokenizing. A priority above `max_priority` is
    lowered to that; `request_id` is the one drawn by `resolve_request_id`, if the caller has it. Raises InvalidRequest,
    NotFound or NoWorker."""
    check_size(request)
    adapter = check_model(request.model, served)
    prompt = check_input(request, served, may_be_empty=bool(request.suffix))
    stopping = request.stopping
    _check_request_id(request.request_id)
    request_id, sampling = request_id or resolve_request_id(request.request_id), _sampling(request.sampling, served)
    resume_from = _resume_from(request, sampling)
    return ValidatedRequest(
        request_id=request_id,
        key_id=_key_id(request_id, tenant),
        prompt=prompt,
        sampling_bytes=sampling.SerializeToString(),
        num_choices=sampling.n,
        seed=sampling.seed,
        max_tokens=_max_tokens(stopping, served),
        min_tokens=stopping.min_tokens,
        stops=_stops(stopping.stop, served.limits),
        stop_token_ids=_stop_token_ids(stopping, served),
        ignore_eos=stopping.ignore_eos,
        priority=min(request.priority, max_priority),
        speculation=_speculation(request.speculation, served),
        slo_class=_slo_class(request.slo_class, served),
        has_slo_class=bool(request.slo_class),
        resume_from=resume_from,
        constraint=_constraint(request),
        echo=_echo(request),
        echo_token_ids=request.echo_token_ids,
        suffix=_suffix(request),
        num_logprobs=sampling.logprobs + sampling.HasField("logprobs"),
        num_prompt_logprobs=sampling.prompt_logprobs,
        asks_for_prompt_logprobs=sampling.HasField("prompt_logprobs") and not any(resume_from),
        stream_interval_s=_stream_interval_s(request.stream_interval_ms),
        adapter=adapter,
    )


def check_input(
    request: pb.GenerateRequest | pb.TokenizeRequest, served: ServedModel, may_be_empty: bool = False
) -> PromptInput:
    """Return the prompt. `may_be_empty`: a text may be empty. Raises InvalidRequest."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input", "one of text, token_ids and messages is needed")
    if kind == "text":
        if not request.text and not may_be_empty:
            raise InvalidRequest("text", "is empty")
        return PromptInput(text=request.text)
    if kind == "token_ids":
        check_num_tokens(len(request.token_ids.ids), served, "token_ids.ids")
        return PromptInput(token_ids=check_token_ids(request.token_ids.ids, served.vocab_size, "token_ids.ids"))
    return PromptInput(messages=check_conversation(request.messages, served.limits))


def check_detokenize(request: pb.DetokenizeRequest) -> None:
    """Raise InvalidRequest for a message that is too large."""
    check_size(request)
    if request.return_tokens and (num_ids := len(request.token_ids)) > MAX_TOKEN_TEXTS:
        raise InvalidRequest(
            "token_ids", f"has {num_ids} ids, at most {MAX_TOKEN_TEXTS} are allowed with return_tokens"
        )


def check_num_tokens(num_tokens: int, served: ServedModel, where: str) -> None:
    """Raise InvalidRequest for more tokens than the context, before each of them is checked."""
    if num_tokens > served.context:
        raise prompt_too_long_error(where, num_tokens, served.context, served)


def check_token_ids(ids, vocab_size: int, where: str) -> array:
    """Return the ids as a compact array. Raises InvalidRequest if there are none, or one is outside the vocabulary."""
    if not ids:
        raise InvalidRequest(where, "is empty")
    ids = ids[:]  # a list: iterating over the message's own field takes three times as long
    if max(ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
        raise InvalidRequest(f"{where}[{index}]", f"is out of range: the vocabulary has {vocab_size} ids")
    return array("I", ids)  # a tuple takes nine times as much


def prompt_too_long_error(field: str, num_tokens: int, most: int, served: ServedModel) -> ContextLengthExceeded:
    """Return the error for a prompt of more than `most` tokens."""
    message = f"prompt is too long: {num_tokens} tokens > {most}: {served.context_label} is {served.context}"
    return ContextLengthExceeded(field, message)


def resolve_request_id(given: str) -> str:
    """Return the id of a request: the one that it gives, or a drawn one if it gives none or an invalid one, for which
    it will be refused."""
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def _check_request_id(given: str) -> None:
    if given and not REQUEST_ID.fullmatch(given):
        raise InvalidRequest("request_id", f"must match {REQUEST_ID.pattern}")


def _key_id(request_id: str, tenant: str) -> str:
    """Return an id that differs between tenants: a request_id has no dot."""
    if tenant == DEFAULT_TENANT:
        return request_id
    return f"{hashlib.sha256(tenant.encode()).hexdigest()[:16]}.{request_id}"


def _resume_from(request: pb.GenerateRequest, sampling: worker_pb2.WorkerSampling) -> tuple[int, ...]:
    """Return how many tokens of each choice the client has. Raises InvalidRequest if the answer might come out
    differently."""
    if not request.resume_from:
        return ()
    if len(request.resume_from) != sampling.n:
        raise InvalidRequest(
            "resume_from", f"has {len(request.resume_from)} entries for {sampling.n} choices: one each is needed"
        )
    if not request.request_id:
        raise InvalidRequest("resume_from", "needs the request_id of the request that it continues")
    if sampling.temperature and not request.sampling.HasField("seed"):
        raise InvalidRequest(
            "resume_from", "needs sampling.seed as the first message gave it: with another seed the answer would differ"
        )
    return tuple(request.resume_from)


def _sampling(asked: pb.Sampling, served: ServedModel) -> worker_pb2.WorkerSampling:
    """Return the sampling parameters asked for, and defaults for the rest. Both messages have fields of the same
    names."""
    resolved = worker_pb2.WorkerSampling(**served.defaults.sampling, n=1)
    if not asked.HasField("seed"):
        resolved.seed = secrets.randbits(53)  # exact in every client's numbers
    for descriptor, value in asked.ListFields():
        name = descriptor.name
        if name == "logit_bias":
            _check_logit_bias(value, served)
            resolved.logit_bias.update(value)
            continue
        if name == "temperature":
            value = settle_temperature(value)
        if name in SAMPLING_PARAMS and (problem := SAMPLING_PARAMS[name].range.problem(value)):
            raise InvalidRequest(f"sampling.{name}", problem)
        setattr(resolved, name, value)
    if not 1 <= resolved.n <= served.limits.choices:
        raise InvalidRequest("sampling.n", f"must be 1 to {served.limits.choices}")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(resolved, name) > served.limits.logprobs:
            raise InvalidRequest(f"sampling.{name}", f"must be at most {served.limits.logprobs}")
    return resolved


def _stream_interval_s(given_ms: int) -> float:
    if given_ms > MAX_STREAM_INTERVAL_MS:
        raise InvalidRequest("stream_interval_ms", f"{given_ms} is over {MAX_STREAM_INTERVAL_MS}, a minute")
    return given_ms / 1e3


def _slo_class(name: str, served: ServedModel) -> str:
    if name and name not in served.slo_classes:
        raise InvalidRequest("slo_class", f"{name[:40]!r} is not one of: {', '.join(sorted(served.slo_classes))}")
    return name or DEFAULT_CLASS


def _echo(request: pb.GenerateRequest) -> bool:
    if request.echo and request.HasField("messages"):
        raise InvalidRequest("echo", "is for text and token_ids, not for messages")
    return request.echo


def _suffix(request: pb.GenerateRequest) -> str:
    if request.suffix and not request.HasField("text"):
        raise InvalidRequest("suffix", "is for text, not for token_ids and messages")
    if request.suffix and request.echo:
        raise InvalidRequest("suffix", "is not for a prompt that is echoed, which is another one then")
    return request.suffix


def _constraint(request: pb.GenerateRequest) -> Constraint | None:
    if not request.HasField("constraint"):
        return None
    try:
        return constraint_of(request.constraint)
    except BadConstraint as error:
        raise InvalidRequest(f"constraint.{error.path}" if error.path else "constraint", error.reason) from None


def _speculation(speculation: pb.Speculation, served: ServedModel) -> pb.Speculation:
    known = served.proposers
    if known is not None and speculation.proposer not in ("", "off", *known):
        run = ", ".join(sorted(known)) or "none"
        raise InvalidRequest(
            "speculation.proposer", f"{speculation.proposer[:40]!r} is not available here: use off, or one of: {run}"
        )
    if speculation.num_tokens > MAX_DRAFT_TOKENS:
        raise InvalidRequest("speculation.num_tokens", f"must be at most {MAX_DRAFT_TOKENS}")
    if not speculation.ByteSize():
        return _NO_SPECULATION
    copy = pb.Speculation()  # a part of a message would keep the whole message in memory
    copy.CopyFrom(speculation)
    return copy


def _check_logit_bias(logit_bias: Mapping[int, float], served: ServedModel) -> None:
    if len(logit_bias) > served.limits.logit_bias:
        limit = served.limits.logit_bias
        raise InvalidRequest("sampling.logit_bias", f"has {len(logit_bias)} entries, at most {limit} are allowed")
    for token_id, bias in logit_bias.items():
        if token_id >= served.vocab_size:
            raise InvalidRequest(
                "sampling.logit_bias", f"{token_id} is out of range: the vocabulary has {served.vocab_size} ids"
            )
        if SHIFT.problem(bias):
            raise InvalidRequest("sampling.logit_bias", f"the bias of {token_id} {SHIFT.rule}")


def _max_tokens(stopping: pb.Stopping, served: ServedModel) -> int | None:
    if not stopping.HasField("max_tokens"):
        return None
    longest = min(served.context - 1, served.limits.max_tokens)
    if not 1 <= stopping.max_tokens <= longest:
        is_the_context = longest == served.context - 1
        why = f"{served.context_label}, less a prompt" if is_the_context else "the limit of one request"
        kind = ContextLengthExceeded if is_the_context and stopping.max_tokens else InvalidRequest
        raise kind("stopping.max_tokens", f"must be 1 to {longest}: {why}")
    return stopping.max_tokens


def _stops(stops, limits: RequestLimits) -> tuple[str, ...]:
    if len(stops) > limits.stops:
        raise InvalidRequest("stopping.stop", f"has {len(stops)} strings, at most {limits.stops} are allowed")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop.encode()) <= limits.stop_bytes:
            raise InvalidRequest(f"stopping.stop[{index}]", f"must have 1 to {limits.stop_bytes} bytes")
    return tuple(stops)


def _stop_token_ids(stopping: pb.Stopping, served: ServedModel) -> frozenset[int]:
    """Return the ids that end a choice, the model's end-of-sequence ids among them unless these are to be ignored."""
    ends = _NO_IDS if stopping.ignore_eos else served.eos_ids
    if not (num_ids := len(stopping.stop_token_ids)):
        return ends  # one set for all requests
    if num_ids > (most := served.limits.stop_token_ids):
        raise InvalidRequest("stopping.stop_token_ids", f"has {num_ids} ids, at most {most} are allowed")
    check_token_ids(stopping.stop_token_ids, served.vocab_size, "stopping.stop_token_ids")
    return ends.union(stopping.stop_token_ids)
