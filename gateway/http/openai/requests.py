"""Read bodies of OpenAI's chat and completions APIs into messages of baton.v1."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from baton.service.errors import ContextLengthExceeded, InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.fields.body import ParsedBody, fill, new_id
from gateway.http.fields.constraints import CONSTRAINED
from gateway.http.fields.conversation import CHAT_NAMES
from gateway.http.fields.kinds import BOOLEAN, OBJECT, STRING, TOKEN_IDS, VERBOSITY, ValueKind
from gateway.http.fields.reading import check_known, check_notes, put, read_as, read_object, read_value, write
from gateway.http.fields.tables import (
    CHAT,
    CHAT_NEUTRAL,
    COMPLETION,
    COMPLETION_NEUTRAL,
    NOTES,
    TOKENIZE_NEUTRAL,
    Field,
)
from gateway.http.openai.conversations import CONVERSATION, read_conversation
from gateway.http.wire.errors import rename
from gateway.request.validation import REQUEST_ID

MAX_PROMPTS = 128  # of one completion: each is a request of its own in the slot of one call
DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
# Of the copies of what prompts of a call share; 128 copies of the longest constraint take half of it.
_MAX_COPIED_BYTES = 32 << 20
_LENGTHS = ("max_tokens", "max_completion_tokens")
_STREAMED = ("stream", "stream_options", *NOTES, "return_token_ids", *CONSTRAINED)
_OF_CHAT = ("logprobs", "prediction", "verbosity", "include_reasoning")
# The client's names for fields of baton.v1 that are in no table.
PROMPT_NAMES = {"text": "prompt", "token_ids.ids": "prompt", "token_ids": "prompt", "input": "prompt"}
DETOKENIZE_NAMES = {"token_ids": "tokens"}


def read_chat(values: Mapping[str, Any]) -> ParsedBody:
    """Read the body of /v1/chat/completions. Raises InvalidRequest."""
    values = _without_endless(values)
    check_known(values, CHAT, CHAT_NEUTRAL, (*_STREAMED, *CONVERSATION, *_OF_CHAT))
    request, names = pb.GenerateRequest(), dict(CHAT_NAMES)
    request.messages.CopyFrom(read_conversation(values))
    fill(request, values, CHAT, names)
    read_value(values, "prediction", OBJECT, {})  # ignored: a hint for speculation, which needs none
    read_value(values, "verbosity", VERBOSITY, "medium")
    if {"max_tokens", "max_completion_tokens"} <= values.keys():
        raise InvalidRequest("max_tokens", "is the older name of max_completion_tokens: send one of them")
    if read_value(values, "logprobs", BOOLEAN, False):
        request.sampling.logprobs = request.sampling.logprobs  # sets the field even if it is 0
    elif values.get("top_logprobs"):
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    else:
        request.sampling.ClearField("logprobs")
    body = _parsed("chatcmpl", [request], values, names)
    is_told = read_value(values, "include_reasoning", BOOLEAN, True)
    body.hides_reasoning = not is_told or bool(values.get("reasoning", {}).get("exclude"))
    return body


def read_completion(values: Mapping[str, Any]) -> ParsedBody:
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
        shared.sampling.prompt_logprobs = shared.sampling.logprobs  # so that all of the text has logprobs
        names["sampling.prompt_logprobs"] = "logprobs"
    prompts, requests = read_prompts(values, "prompt", MAX_PROMPTS), list[pb.GenerateRequest]()
    check_copies("prompt", shared, len(prompts))
    for prompt in prompts:
        request = pb.GenerateRequest()
        request.CopyFrom(shared)
        put(request, "text" if isinstance(prompt, str) else "token_ids.ids", prompt)
        requests.append(request)
    body = _parsed("cmpl", requests, values, names)
    body.is_prompt_alone = is_prompt_alone
    return body


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
    """Return the values without a max_tokens of -1, which means no limit in llama.cpp and LM Studio, as if none were
    given."""
    return {name: value for name, value in values.items() if not (name in _LENGTHS and value == -1)}


def read_prompts(values: Mapping[str, Any], name: str, most: int) -> Sequence[str | list[int]]:
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


def check_copies(where: str, shared: pb.GenerateRequest | pb.EmbedRequest, num_copies: int) -> None:
    """Raise InvalidRequest if the copies of what the requests share would be too large."""
    if num_copies > 1 and num_copies * (num_bytes := shared.ByteSize()) > _MAX_COPIED_BYTES:
        message = f"is {num_copies} requests, each with {num_bytes} bytes that they share: send fewer at once"
        raise InvalidRequest(where, message)


def _token_ids(where: str, value: object) -> list[int]:
    token_ids = read_as(where, TOKEN_IDS, value)
    if not token_ids or min(token_ids) < 0 or max(token_ids) > 0xFFFF_FFFF:
        raise InvalidRequest(where, "is empty" if not token_ids else "holds what is no token id")
    return token_ids


def _parsed(
    prefix: str, requests: list[pb.GenerateRequest], values: Mapping[str, Any], names: dict[str, str]
) -> ParsedBody:
    request_id = requests[0].request_id or new_id()
    for index, request in enumerate(requests):
        request.request_id = request_id if len(requests) == 1 else id_of_prompt(request_id, index)
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    options = read_object("stream_options", values.get("stream_options", {}), known, keeps_empty_lists=True)
    stream = read_value(values, "stream", BOOLEAN, False)
    if options and not stream:
        raise InvalidRequest("stream_options", "needs stream: true")
    check_notes(values)
    usage, at_once = (read_value(options, name, BOOLEAN, False) for name in ("include_usage", "continuous_usage_stats"))
    return_token_ids = read_value(values, "return_token_ids", BOOLEAN, False)
    for request in requests:
        request.echo_token_ids = return_token_ids
    return ParsedBody(f"{prefix}-{request_id}", requests, names, stream, usage, at_once, return_token_ids)


def id_of_prompt(request_id: str, index: int) -> str:
    """Return the id of one of several prompts. If the request's id is too long to append a number, its end is replaced
    by a hash."""
    if REQUEST_ID.fullmatch(request_id) and not REQUEST_ID.fullmatch(f"{request_id}-{MAX_PROMPTS - 1}"):
        request_id = f"{request_id[:39]}-{hashlib.sha256(request_id.encode()).hexdigest()[:20]}"
    return f"{request_id}-{index}"


def field_of_prompt(prompt: int, error: InvalidRequest) -> str:
    """Return the field of an error with one of several prompts: "prompt[N]" for the prompt itself or its length; a
    field that all prompts share keeps its name."""
    field = error.field or ""
    word = "prompt" if isinstance(error, ContextLengthExceeded) else rename(field, PROMPT_NAMES)
    return field if word == field else f"prompt[{prompt}]{word.removeprefix('prompt')}"
