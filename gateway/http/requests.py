"""Bodies of OpenAI's requests, read into messages of baton.v1. What is not known is refused by its name: a field that
is left out without a word would change the answer."""

import hashlib
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.protocol import MAX_INPUTS
from baton.service.errors import ContextLengthExceeded, InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.constraints import CONSTRAINED, read_constraint
from gateway.http.conversations import CONVERSATION, CONVERSATION_NAMES, read_conversation
from gateway.http.fields import (
    BOOLEAN,
    CHAT,
    CHAT_NEUTRAL,
    COHERE_RERANK,
    COMPLETION,
    COMPLETION_NEUTRAL,
    EMBEDDING,
    INTEGER,
    NOTES,
    OBJECT,
    RERANK,
    STRING,
    TEXTS,
    TOKEN_IDS,
    TOKENIZE_NEUTRAL,
    VERBOSITY,
    Field,
    ValueKind,
    check_length,
    put,
    read_as,
    without_nulls,
    write,
)
from gateway.http.wire.errors import rename
from gateway.request.validation import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_STOPS, REQUEST_ID

ENCODINGS = ("float", "base64")  # of embeddings
MAX_PROMPTS = 128  # of one completion: each is a request of its own, and all of them share one call's slot
MAX_TEXTS = 2048  # of one call for embeddings, as in OpenAI's API
DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
# Of what prompts of one call share: 128 of them with the longest constraint are half of it.
_MAX_COPIED_BYTES = 32 << 20
# Elements of a field, by its path; to read 90,000 biases took 60 ms.
_MOST = {
    "stopping.stop": MAX_STOPS,
    "stopping.stop_token_ids": MAX_STOP_TOKEN_IDS,
    "sampling.logit_bias": MAX_LOGIT_BIAS,
}
_LENGTHS = ("max_tokens", "max_completion_tokens")
_STREAMED = ("stream", "stream_options", *NOTES, "return_token_ids", *CONSTRAINED)
_OF_CHAT = ("logprobs", "prediction", "verbosity", "include_reasoning")

# Words for fields of baton.v1 that no row of the table has.
CHAT_NAMES = {**CONVERSATION_NAMES, "input": "messages"}
PROMPT_NAMES = {"text": "prompt", "token_ids.ids": "prompt", "token_ids": "prompt", "input": "prompt"}
TOKENIZE_NAMES = {**CONVERSATION_NAMES, "text": "prompt", "input": "prompt"}
DETOKENIZE_NAMES = {"token_ids": "tokens"}


@dataclass
class Asked:
    """What a body asks for. `names`: its words for fields of baton.v1, by path."""

    id: str
    requests: list[pb.GenerateRequest]
    names: dict[str, str]
    stream: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    return_token_ids: bool = False
    is_prompt_alone: bool = False  # what is answered is not told
    hides_reasoning: bool = False  # nor what was thought before it
    num_choices: int = field(init=False)  # of each request

    def __post_init__(self) -> None:
        self.num_choices = max(1, self.requests[0].sampling.n)


@dataclass
class AskedRerank:
    """What a body of /v1/rerank or /v2/rerank asks for."""

    request: pb.ScoreRequest
    names: dict[str, str]
    top_n: int  # documents that are told of, the best
    return_documents: bool = False


@dataclass
class AskedEmbeddings:
    """What a body of /v1/embeddings asks for. `names`: the body's words for fields of each request."""

    requests: list[pb.EmbedRequest]  # with as many texts each as one may have, the last one with what is left
    names: list[dict[str, str]]
    encoding: str  # one of ENCODINGS


def parse(body: bytes) -> dict[str, Any]:
    """Return the object that a body is. Raises InvalidRequest."""
    try:
        values = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", f"is not JSON: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise InvalidRequest("body", "must be a JSON object")
    return without_nulls(values)


def read_chat(values: Mapping[str, Any]) -> Asked:
    """Read the body of /v1/chat/completions. Raises InvalidRequest."""
    values = _without_endless(values)
    check_known(values, CHAT, CHAT_NEUTRAL, (*_STREAMED, *CONVERSATION, *_OF_CHAT))
    request, names = pb.GenerateRequest(), dict(CHAT_NAMES)
    request.messages.CopyFrom(read_conversation(values))
    fill(request, values, CHAT, names)
    read_value(values, "prediction", OBJECT, {})  # a hint for speculation, which needs none
    read_value(values, "verbosity", VERBOSITY, "medium")
    if {"max_tokens", "max_completion_tokens"} <= values.keys():
        raise InvalidRequest("max_tokens", "is the older name of max_completion_tokens: send one of them")
    if read_value(values, "logprobs", BOOLEAN, False):
        request.sampling.logprobs = request.sampling.logprobs  # present, also where it is 0
    elif values.get("top_logprobs"):
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    else:
        request.sampling.ClearField("logprobs")
    asked = _asked("chatcmpl", [request], values, names)
    is_told = read_value(values, "include_reasoning", BOOLEAN, True)
    asked.hides_reasoning = not is_told or bool(values.get("reasoning", {}).get("exclude"))
    return asked


def read_completion(values: Mapping[str, Any]) -> Asked:
    """Read the body of /v1/completions. Raises InvalidRequest."""
    names_length, values = "max_tokens" in values, _without_endless(values)
    check_known(values, COMPLETION, COMPLETION_NEUTRAL, (*_STREAMED, "prompt"))
    shared, names = pb.GenerateRequest(), dict(PROMPT_NAMES)
    fill(shared, values, COMPLETION, names)
    if not names_length:
        shared.stopping.max_tokens = DEFAULT_COMPLETION_TOKENS
    if is_prompt_alone := values.get("max_tokens") == 0:
        if shared.stopping.min_tokens:
            raise InvalidRequest("min_tokens", f"{shared.stopping.min_tokens} is over max_tokens, 0")
        shared.stopping.max_tokens = 1  # the least that is computed
    if shared.echo and shared.sampling.HasField("logprobs") and not shared.sampling.HasField("prompt_logprobs"):
        shared.sampling.prompt_logprobs = shared.sampling.logprobs  # of all that is in the text
        names["sampling.prompt_logprobs"] = "logprobs"
    prompts, requests = _prompts(values, "prompt", MAX_PROMPTS), list[pb.GenerateRequest]()
    _check_copies("prompt", shared, len(prompts))
    for prompt in prompts:
        request = pb.GenerateRequest()
        request.CopyFrom(shared)
        put(request, "text" if isinstance(prompt, str) else "token_ids.ids", prompt)
        requests.append(request)
    asked = _asked("cmpl", requests, values, names)
    asked.is_prompt_alone = is_prompt_alone
    return asked


def read_embeddings(values: Mapping[str, Any], most_inputs: int = MAX_INPUTS) -> AskedEmbeddings:
    """Read the body of /v1/embeddings. `most_inputs`: texts of one request. Raises InvalidRequest."""
    check_known(values, EMBEDDING, {}, ("input", "encoding_format", "user"))
    check_notes(values)
    shared, names = pb.EmbedRequest(), {"inputs": "input"}
    fill_rows(shared, values, EMBEDDING, names)
    encoding = read_value(values, "encoding_format", STRING, "float")
    if encoding not in ENCODINGS:
        raise InvalidRequest("encoding_format", f"must be one of {', '.join(ENCODINGS)}")
    texts, asked = _prompts(values, "input", MAX_TEXTS), AskedEmbeddings([], [], encoding)
    request_id = shared.request_id or new_id()
    _check_copies("input", shared, -(-len(texts) // most_inputs))
    for begin in range(0, len(texts), most_inputs):
        request, part = pb.EmbedRequest(), texts[begin : begin + most_inputs]
        request.CopyFrom(shared)
        if len(texts) > most_inputs:
            request.request_id = _id_of_prompt(request_id, begin // most_inputs)
        for text in part:
            put(request.inputs.add(), "text" if isinstance(text, str) else "token_ids.ids", text)
        asked.requests.append(request)
        asked.names.append(names | {f"inputs[{n}]": f"input[{begin + n}]" for n in range(len(part))})
    return asked


def read_rerank(values: Mapping[str, Any]) -> AskedRerank:
    """Read the body of /v1/rerank. Raises InvalidRequest."""
    asked = _rerank(values, RERANK, ("return_documents", "user"))
    asked.return_documents = read_value(values, "return_documents", BOOLEAN, True)
    return asked


def read_cohere_rerank(values: Mapping[str, Any]) -> AskedRerank:
    """Read the body of /v2/rerank. Raises InvalidRequest."""
    return _rerank(values, COHERE_RERANK, ())


def _rerank(values: Mapping[str, Any], table: Sequence[Field], others: Collection[str]) -> AskedRerank:
    check_known(values, table, {}, ("documents", "top_n", *others))
    check_notes(values)
    request, names = pb.ScoreRequest(), dict[str, str]()
    fill_rows(request, values, table, names)
    request.documents.extend(read_value(values, "documents", TEXTS))
    top_n = read_value(values, "top_n", INTEGER, len(request.documents))
    if top_n < 0 or ("top_n" in values and top_n == 0):
        raise InvalidRequest("top_n", "must be at least 1")
    return AskedRerank(request, names, top_n)


def read_tokenize(values: Mapping[str, Any]) -> pb.TokenizeRequest:
    """Read the body of /tokenize. Raises InvalidRequest."""
    check_known(values, (), TOKENIZE_NEUTRAL, ("model", "prompt", "add_special_tokens", *CONVERSATION))
    request = pb.TokenizeRequest(model=read_value(values, "model", STRING, ""))
    if "messages" in values and "prompt" in values:
        raise InvalidRequest("prompt", "is given beside messages: send one of them")
    if "messages" in values:
        request.messages.CopyFrom(read_conversation(values))
        if read_value(values, "add_special_tokens", BOOLEAN, False):
            raise InvalidRequest("add_special_tokens", "is for a prompt: beside messages the chat template has them")
    else:
        read_value(values, "add_special_tokens", BOOLEAN, True)
        request.text = read_value(values, "prompt", STRING)
    return request


def read_detokenize(values: Mapping[str, Any]) -> pb.DetokenizeRequest:
    """Read the body of /detokenize. Raises InvalidRequest."""
    check_known(values, (), {}, ("model", "tokens"))
    request = pb.DetokenizeRequest(model=read_value(values, "model", STRING, ""))
    write(request, Field("tokens", "token_ids", TOKEN_IDS), read_value(values, "tokens", TOKEN_IDS))
    return request


def _without_endless(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without a length of -1, as llama.cpp and LM Studio have it: the answer ends where the model ends it,
    as of a chat that names none."""
    return {name: value for name, value in values.items() if not (name in _LENGTHS and value == -1)}


def _prompts(values: Mapping[str, Any], name: str, most: int) -> Sequence[str | list[int]]:
    """Return the prompts in the field `name`: one as a string or a list of token ids, several as a list of these."""
    prompt = values.get(name)
    if prompt is None:
        raise InvalidRequest(name, "is missing")
    if isinstance(prompt, str) or not isinstance(prompt, list):
        return [read_as(name, ValueKind("a string, a list of token ids, or a list of these", {}, STRING.read), prompt)]
    if prompt and isinstance(prompt[0], int):
        return [_token_ids(name, prompt)]
    if not 1 <= len(prompt) <= most:
        raise InvalidRequest(name, f"has {len(prompt)} prompts, 1 to {most} are allowed")
    return [
        _token_ids(f"{name}[{index}]", each) if isinstance(each, list) else read_as(f"{name}[{index}]", STRING, each)
        for index, each in enumerate(prompt)
    ]


def _check_copies(where: str, shared: pb.GenerateRequest | pb.EmbedRequest, num_copies: int) -> None:
    """Raises InvalidRequest for more requests than what they share may be copied to."""
    if num_copies > 1 and num_copies * (num_bytes := shared.ByteSize()) > _MAX_COPIED_BYTES:
        told = f"is {num_copies} requests, each with {num_bytes} bytes that they share: send fewer at once"
        raise InvalidRequest(where, told)


def _token_ids(where: str, value: object) -> list[int]:
    token_ids = read_as(where, TOKEN_IDS, value)
    if not token_ids or min(token_ids) < 0 or max(token_ids) > 0xFFFF_FFFF:
        raise InvalidRequest(where, "is empty" if not token_ids else "holds what is no token id")
    return token_ids


def _asked(prefix: str, requests: list[pb.GenerateRequest], values: Mapping[str, Any], names: dict[str, str]) -> Asked:
    request_id = requests[0].request_id or new_id()
    for index, request in enumerate(requests):
        request.request_id = request_id if len(requests) == 1 else _id_of_prompt(request_id, index)
    options = read_part_of(values, "stream_options", ("include_usage", "continuous_usage_stats", "include_obfuscation"))
    stream = read_value(values, "stream", BOOLEAN, False)
    if options and not stream:
        raise InvalidRequest("stream_options", "needs stream: true")
    check_notes(values)
    usage, at_once = (read_value(options, name, BOOLEAN, False) for name in ("include_usage", "continuous_usage_stats"))
    return_token_ids = read_value(values, "return_token_ids", BOOLEAN, False)
    for request in requests:
        request.echo_token_ids = return_token_ids
    return Asked(f"{prefix}-{request_id}", requests, names, stream, usage, at_once, return_token_ids)


def _id_of_prompt(request_id: str, index: int) -> str:
    """Return the id of one of several prompts. One that leaves no room is cut, with what tells it from others in place."""
    if REQUEST_ID.fullmatch(request_id) and not REQUEST_ID.fullmatch(f"{request_id}-{MAX_PROMPTS - 1}"):
        request_id = f"{request_id[:39]}-{hashlib.sha256(request_id.encode()).hexdigest()[:20]}"
    return f"{request_id}-{index}"


def place_of_prompt(prompt: int, error: InvalidRequest) -> str:
    """Return the word for what is wrong with one of several prompts, as with max_tokens behind it; a field of all of them is as
    it was."""
    field = error.field or ""
    word = "prompt" if isinstance(error, ContextLengthExceeded) else rename(field, PROMPT_NAMES)
    return field if word == field else f"prompt[{prompt}]{word.removeprefix('prompt')}"


def check_notes(values: Mapping[str, Any]) -> None:
    """Check what is ignored: the tenant is the key's, and any prompt may be cached."""
    for name in values.keys() & NOTES.keys():
        read_as(name, NOTES[name], values[name])


def new_id() -> str:
    """Return an id for a request that has none."""
    return secrets.token_hex(12)


def read_part_of(values: Mapping[str, Any], name: str, known: Collection[str]) -> dict[str, Any]:
    """Return an object among the values, empty where it is not given. Raises InvalidRequest."""
    value = values.get(name, {})
    if not isinstance(value, dict):
        raise InvalidRequest(name, "must be an object")
    value = without_nulls(value)
    if unknown := value.keys() - set(known):
        raise InvalidRequest(f"{name}.{min(unknown)[:80]}", "is not known here")
    return value


def check_known(
    values: Mapping[str, Any], table: Sequence[Field], neutral: Mapping[str, tuple], others: Collection[str]
) -> None:
    """Raises InvalidRequest for a field that is in none of these, and for a `neutral` one with another value."""
    known = {row.name for row in table} | set(others)
    for name, value in values.items():
        if name in neutral:
            value = without_nulls(value) if isinstance(value, dict) else value
            if value not in neutral[name] or isinstance(value, bool) != isinstance(neutral[name][0], bool):
                raise InvalidRequest(name, "is not supported here")
        elif name not in known:
            raise InvalidRequest(name[:80], "is not known here")


def fill(request: pb.GenerateRequest, values: Mapping[str, Any], table: Sequence[Field], names: dict[str, str]) -> None:
    """Set the fields of `table` that are given, and the constraint; note their words in `names`. Raises
    InvalidRequest."""
    fill_rows(request, values, table, names)
    read_constraint(request, values, names)


def fill_rows(request: Any, values: Mapping[str, Any], table: Sequence[Field], names: dict[str, str]) -> None:
    """Set the fields of `table` that are given, and note their words in `names`. Raises InvalidRequest."""
    for row in table:
        if row.name in values:
            if row.path in _MOST:
                check_length(row.name, values[row.name], _MOST[row.path])
            write(request, row, values[row.name])
            names[row.path] = row.name


def read_value(values: Mapping[str, Any], name: str, kind: ValueKind, default: Any = None) -> Any:
    """Return the value of a field; without a default it must be given. Raises InvalidRequest."""
    if name not in values:
        if default is None:
            raise InvalidRequest(name, "is missing")
        return default
    return read_as(name, kind, values[name])


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
