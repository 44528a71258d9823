"""Bodies of OpenAI's requests, read into messages of baton.v1. What is not known is refused by its name: a field that
is left out without a word would change the answer."""

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.constraints import CONSTRAINED, read_constraint
from gateway.http.conversations import CONVERSATION, CONVERSATION_NAMES, read_conversation
from gateway.http.fields import (
    BOOLEAN,
    CHAT,
    CHAT_NEUTRAL,
    COMPLETION,
    COMPLETION_NEUTRAL,
    STRING,
    TOKEN_IDS,
    Field,
    ValueKind,
    put,
    read_as,
    write,
)

MAX_PROMPTS = 32  # of one completion: each is a request of its own, and all of them share one call's slot
DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
_STREAMED = ("stream", "stream_options", "user", "return_token_ids", *CONSTRAINED)

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
    return_token_ids: bool = False
    num_choices: int = field(init=False)  # of each request

    def __post_init__(self) -> None:
        self.num_choices = max(1, self.requests[0].sampling.n)


def parse(body: bytes) -> dict[str, Any]:
    """Return the object that a body is. Raises InvalidRequest."""
    try:
        values = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", f"is not JSON: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise InvalidRequest("body", "must be a JSON object")
    return {name: value for name, value in values.items() if value is not None}  # null: as if it were left out


def read_chat(values: Mapping[str, Any]) -> Asked:
    """Read the body of /v1/chat/completions. Raises InvalidRequest."""
    check_known(values, CHAT, CHAT_NEUTRAL, (*_STREAMED, *CONVERSATION, "logprobs"))
    request, names = pb.GenerateRequest(), dict(CHAT_NAMES)
    request.messages.CopyFrom(read_conversation(values))
    fill(request, values, CHAT, names)
    if {"max_tokens", "max_completion_tokens"} <= values.keys():
        raise InvalidRequest("max_tokens", "is the older name of max_completion_tokens: send one of them")
    if read_value(values, "logprobs", BOOLEAN, False):
        request.sampling.logprobs = request.sampling.logprobs  # present, also where it is 0
    elif "top_logprobs" in values:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    return _asked("chatcmpl", [request], values, names)


def read_completion(values: Mapping[str, Any]) -> Asked:
    """Read the body of /v1/completions. Raises InvalidRequest."""
    check_known(values, COMPLETION, COMPLETION_NEUTRAL, (*_STREAMED, "prompt"))
    shared, names = pb.GenerateRequest(), dict(PROMPT_NAMES)
    fill(shared, values, COMPLETION, names)
    if not shared.stopping.HasField("max_tokens"):
        shared.stopping.max_tokens = DEFAULT_COMPLETION_TOKENS
    if shared.echo and shared.sampling.HasField("logprobs") and not shared.sampling.HasField("prompt_logprobs"):
        shared.sampling.prompt_logprobs = shared.sampling.logprobs  # of all that is in the text
        names["sampling.prompt_logprobs"] = "logprobs"
    requests = []
    for prompt in _prompts(values):
        request = pb.GenerateRequest()
        request.CopyFrom(shared)
        put(request, "text" if isinstance(prompt, str) else "token_ids.ids", prompt)
        requests.append(request)
    return _asked("cmpl", requests, values, names)


def read_tokenize(values: Mapping[str, Any]) -> pb.TokenizeRequest:
    """Read the body of /tokenize. Raises InvalidRequest."""
    check_known(values, (), {}, ("model", "prompt", *CONVERSATION))
    request = pb.TokenizeRequest(model=read_value(values, "model", STRING, ""))
    if "messages" in values and "prompt" in values:
        raise InvalidRequest("prompt", "is given beside messages: send one of them")
    if "messages" in values:
        request.messages.CopyFrom(read_conversation(values))
    else:
        request.text = read_value(values, "prompt", STRING)
    return request


def read_detokenize(values: Mapping[str, Any]) -> pb.DetokenizeRequest:
    """Read the body of /detokenize. Raises InvalidRequest."""
    check_known(values, (), {}, ("model", "tokens"))
    request = pb.DetokenizeRequest(model=read_value(values, "model", STRING, ""))
    write(request, Field("tokens", "token_ids", TOKEN_IDS), read_value(values, "tokens", TOKEN_IDS))
    return request


def _prompts(values: Mapping[str, Any]) -> Sequence[str | list[int]]:
    """Return the prompts: one as a string or a list of token ids, several as a list of these."""
    prompt = values.get("prompt")
    if prompt is None:
        raise InvalidRequest("prompt", "is missing")
    if isinstance(prompt, str) or not isinstance(prompt, list):
        return [
            read_as("prompt", ValueKind("a string, a list of token ids, or a list of these", {}, STRING.read), prompt)
        ]
    if prompt and isinstance(prompt[0], int):
        return [_token_ids("prompt", prompt)]
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise InvalidRequest("prompt", f"has {len(prompt)} prompts, 1 to {MAX_PROMPTS} are allowed")
    return [
        _token_ids(f"prompt[{index}]", each) if isinstance(each, list) else read_as(f"prompt[{index}]", STRING, each)
        for index, each in enumerate(prompt)
    ]


def _token_ids(where: str, value: object) -> list[int]:
    token_ids = read_as(where, TOKEN_IDS, value)
    if not token_ids or min(token_ids) < 0 or max(token_ids) > 0xFFFF_FFFF:
        raise InvalidRequest(where, "is empty" if not token_ids else "holds what is no token id")
    return token_ids


def _asked(prefix: str, requests: list[pb.GenerateRequest], values: Mapping[str, Any], names: dict[str, str]) -> Asked:
    request_id = requests[0].request_id or new_id()
    for index, request in enumerate(requests):
        request.request_id = f"{request_id}-{index}" if len(requests) > 1 else request_id
    options = read_part_of(values, "stream_options", ("include_usage", "include_obfuscation"))
    stream = read_value(values, "stream", BOOLEAN, False)
    if options and not stream:
        raise InvalidRequest("stream_options", "needs stream: true")
    read_value(values, "user", STRING, "")  # ignored: the tenant is the key's
    include_usage = read_value({**options, "stream": True}, "include_usage", BOOLEAN, False)
    return_token_ids = read_value(values, "return_token_ids", BOOLEAN, False)
    return Asked(f"{prefix}-{request_id}", requests, names, stream, include_usage, return_token_ids)


def new_id() -> str:
    """Return an id for a request that has none."""
    return secrets.token_hex(12)


def read_part_of(values: Mapping[str, Any], name: str, known: Collection[str]) -> dict[str, Any]:
    """Return an object among the values, empty where it is not given. Raises InvalidRequest."""
    value = values.get(name, {})
    if not isinstance(value, dict):
        raise InvalidRequest(name, "must be an object")
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
            if value not in neutral[name] or isinstance(value, bool) != isinstance(neutral[name][0], bool):
                raise InvalidRequest(name, "is not supported here")
        elif name not in known:
            raise InvalidRequest(name[:80], "is not known here")


def fill(request: pb.GenerateRequest, values: Mapping[str, Any], table: Sequence[Field], names: dict[str, str]) -> None:
    """Set the fields of `table` that are given, and note their words in `names`. Raises InvalidRequest."""
    for row in table:
        if row.name in values:
            write(request, row, values[row.name])
            names[row.path] = row.name
    read_constraint(request, values, names)


def read_value(values: Mapping[str, Any], name: str, kind: ValueKind, default: Any = None) -> Any:
    """Return the value of a field; without a default it must be given. Raises InvalidRequest."""
    if name not in values:
        if default is None:
            raise InvalidRequest(name, "is missing")
        return default
    return read_as(name, kind, values[name])


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
