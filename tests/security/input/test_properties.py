"""With any number in a field the request is refused by that field's name, or every number of it is in range (H1, H2);
and a worker's session with any content ends that session at most. The other inputs are fed by
tests/faults/damaged_inputs.py."""

import asyncio
import math
import struct

import pytest
from google.protobuf.descriptor import FieldDescriptor as Kind
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.service.errors import BatonError, InvalidRequest
from baton.v1 import inference_pb2 as pb
from baton.v1 import worker_pb2
from gateway.config.served_model import PRESETS, ServedModel
from gateway.link.mailbox import Mailbox
from gateway.link.worker_link import WorkerLink
from gateway.model.model_folder import Defaults
from gateway.request.answer_length import resolve_max_tokens
from gateway.request.validation import validate

EDGES = (
    -1,
    0,
    1,
    2,
    4,
    5,
    8,
    9,
    16,
    17,
    20,
    21,
    256,
    1023,
    1024,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**63 - 1,
    2**64 - 1,
)
FLOATS = (
    math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.17e-38, 1e-3, 0.5, 2.0, 100.0, 100.001,
    1000.0, -1000.0, 1000.1, 3.4e38, -3.4e38,
)  # fmt: skip
NUMBERS = (Kind.TYPE_UINT32, Kind.TYPE_UINT64, Kind.TYPE_INT32, Kind.TYPE_FLOAT)
LIMITS = tuple(PRESETS.values())


def numeric_fields() -> list[tuple[str, str]]:
    """(message, field) of every number that a request may carry, repeated ones and maps too."""
    found = []
    for name in ("sampling", "stopping", "speculation"):
        message = getattr(pb.GenerateRequest(), name)
        found += [(name, field.name) for field in message.DESCRIPTOR.fields if field.type in NUMBERS]
    return [*found, ("", "priority"), ("sampling", "logit_bias"), ("stopping", "stop_token_ids"), ("token_ids", "ids")]


FIELDS = sorted(set(numeric_fields()))


def served(limits) -> ServedModel:
    return ServedModel("fake", 1024, 400, frozenset([0]), Defaults(), proposers=frozenset(["ngram"]), limits=limits)


def put(request: pb.GenerateRequest, message: str, name: str, value) -> bool:
    """False where protobuf cannot even carry it."""
    where = getattr(request, message) if message else request
    try:
        if name == "logit_bias":
            where.logit_bias[5 if isinstance(value, float) else value] = value if isinstance(value, float) else 1.0
        elif name in ("stop_token_ids", "ids"):
            getattr(where, name).append(value)
        else:
            setattr(where, name, value)
    except (ValueError, TypeError):
        return False
    return True


def in_range(validated, limits) -> None:
    s = validated.sampling
    numbers = (s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    assert all(map(math.isfinite, (*numbers, *s.logit_bias.values())))
    assert s.temperature == 0 or 1e-3 <= struct.unpack("f", struct.pack("f", s.temperature))[0] <= 100
    assert 0 < s.top_p <= 1 and 0 <= s.min_p <= 1 and 1e-3 <= s.repetition_penalty <= 100
    assert max(map(abs, (s.presence_penalty, s.frequency_penalty, *s.logit_bias.values()))) <= 1000
    assert 1 <= s.n <= limits.choices and (s.logprobs or 0) <= limits.logprobs
    assert 0 <= s.seed < 2**64 and 0 <= s.top_k < 2**32
    assert all(token_id < 400 for token_id in (*s.logit_bias, *validated.stop_token_ids))


@pytest.mark.parametrize("limits", LIMITS, ids=list(PRESETS))
@pytest.mark.parametrize("message, name", FIELDS, ids=[f"{message}.{name}" for message, name in FIELDS])
def test_every_number_at_its_edges(message, name, limits):
    """Refused by its own name, or in range."""
    num_refused = 0
    for value in (*EDGES, *FLOATS):
        request = pb.GenerateRequest(text="hello")
        if not put(request, message, name, value):
            continue
        try:
            validated = validate(request, served(limits))
            max_tokens = resolve_max_tokens(validated, 5, served(limits))
        except InvalidRequest as error:
            num_refused += 1
            assert name in error.field or (name == "min_tokens" and "tokens" in error.field), (value, error.field)
        else:
            in_range(validated, limits)
            assert 1 <= max_tokens <= 1019 and validated.sampling.n * max_tokens <= limits.output_tokens
    assert num_refused or name in ("priority", "top_k", "seed")


def sampling() -> st.SearchStrategy:
    floats = st.one_of(st.none(), st.sampled_from(FLOATS), st.floats(width=32))
    whole = st.one_of(st.none(), st.sampled_from([edge for edge in EDGES if 0 <= edge < 2**32]))
    names = {field.name: floats if field.type == Kind.TYPE_FLOAT else whole for field in pb.Sampling.DESCRIPTOR.fields
             if field.type in NUMBERS}  # fmt: skip
    names["logit_bias"] = st.dictionaries(st.sampled_from((0, 5, 399, 400, 2**32 - 1)), st.floats(width=32), max_size=3)
    return st.fixed_dictionaries(names).map(lambda d: {name: value for name, value in d.items() if value is not None})


@settings(max_examples=300)
@given(
    sampling=sampling(),
    max_tokens=st.one_of(st.none(), st.sampled_from([edge for edge in EDGES if 0 <= edge < 2**32])),
    stop=st.lists(st.text(max_size=300), max_size=18),
    limits=st.sampled_from(LIMITS),
    num_prompt=st.integers(0, 1100),
)
def test_all_of_them_together(sampling, max_tokens, stop, limits, num_prompt):
    try:
        request = pb.GenerateRequest(text="hello", sampling=pb.Sampling(**sampling))
        request.stopping.stop.extend(stop)
    except ValueError:  # a lone surrogate is no text
        return
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    try:
        validated = validate(request, served(limits))
        resolved = resolve_max_tokens(validated, num_prompt, served(limits))
    except InvalidRequest as error:
        assert error.field and error.message.startswith(error.field) and len(error.message) < 300
    else:
        in_range(validated, limits)
        assert 1 <= resolved <= 1024 - num_prompt and len(validated.stops) <= limits.stops


@settings(max_examples=200)
@given(st.text(max_size=70))
def test_ids_are_words_or_refused(request_id):
    try:
        validated = validate(pb.GenerateRequest(text="x", request_id=request_id), served(LIMITS[0]), "acme")
    except (BatonError, ValueError):
        return
    assert not request_id or validated.request_id == request_id
    assert validated.key_id.endswith(f".{validated.request_id}") and set(validated.request_id) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
    )


@settings(max_examples=300)
@given(st.binary(max_size=200), st.sampled_from(("ended", "granted", "done", "step_output", "load", "block_events")))
def test_a_worker_that_lies_ends_its_session_at_most(body, kind):
    """Nothing but IndexError and ValueError is raised of invalid input. A leg that it does not name hears nothing of
    it, and goes on where the session does."""
    event = worker_pb2.Event()
    try:
        getattr(event, kind).MergeFromString(body)
    except DecodeError:  # gRPC ends the session
        return
    getattr(event, kind).SetInParent()

    async def main() -> None:
        link = WorkerLink(
            "127.0.0.1:1", b"i" * 16, on_hello=lambda link, hello: None, on_change=lambda link: None,
            on_block_events=lambda link, events: None, max_unread_tokens=100,
        )  # fmt: skip
        mailbox, key = Mailbox(), worker_pb2.Key(request_id="of another", attempt=7)
        leg = link.open(("of another", 7), mailbox)
        try:
            link.on_event(event)
        except (IndexError, ValueError):
            pass
        assert mailbox.pop() is None
        granted = worker_pb2.Granted(key=key, num_cached_tokens=64)
        link.on_event(worker_pb2.Event(granted=granted))
        assert mailbox.pop() == (leg, granted)

    asyncio.run(main())
