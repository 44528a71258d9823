"""Make request messages from prompts and keyword options."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeGuard

from baton.v1 import inference_pb2 as pb

ChatMessages = pb.Messages | Sequence[pb.Message | Mapping[str, Any]]
Prompt = str | Sequence[int] | ChatMessages


class GenerateOptions(TypedDict, total=False):
    """The options of a request, which protos/baton/v1/inference.proto explains: fields of GenerateRequest, Sampling and
    Stopping. An option that is not given has the model's default."""

    request_id: str
    model: str
    priority: int
    speculation: pb.Speculation
    slo_class: str
    constraint: pb.Constraint
    echo: bool
    echo_token_ids: bool
    suffix: str
    stream_interval_ms: int

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    n: int
    logprobs: int
    prompt_logprobs: int

    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool


def make_request(prompt: Prompt, options: GenerateOptions | None = None) -> pb.GenerateRequest:
    """Return the request for a text, token ids or messages, each `{"role": ..., "content": ...}` or a pb.Message.
    Raises ValueError that names the invalid option."""
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        request.text = prompt
    elif is_chat(prompt):
        request.messages.CopyFrom(to_messages(prompt))
    else:
        request.token_ids.CopyFrom(_token_ids("token_ids", prompt))
    for name, value in (options or {}).items():
        _set(_owner(request, name), name, value)
    return request


class EmbedOptions(TypedDict, total=False):
    """The options of an EmbedRequest. An option that is not given has the contract's default."""

    request_id: str
    model: str
    pooling: pb.Pooling
    normalize: bool
    dimensions: int
    priority: int
    slo_class: str


def make_embed_request(inputs: Sequence[str | Sequence[int]], options: EmbedOptions) -> pb.EmbedRequest:
    """Return the request for the vectors of texts or lists of token ids. Raises ValueError that names the invalid
    option."""
    if isinstance(inputs, str):
        raise ValueError("inputs: give a list of texts, or of lists of token ids")
    request = pb.EmbedRequest()
    for index, given in enumerate(inputs):
        if isinstance(given, str):
            request.inputs.add(text=given)
        else:
            request.inputs.add(token_ids=_token_ids(f"inputs[{index}]", given))
    _set_all(request, options, EmbedOptions.__annotations__)
    return request


class ScoreOptions(TypedDict, total=False):
    """The options of a ScoreRequest. An option that is not given has the contract's default."""

    request_id: str
    model: str
    instruction: str
    priority: int
    slo_class: str


def make_score_request(query: str, documents: Sequence[str], options: ScoreOptions) -> pb.ScoreRequest:
    """Return the request for how well documents answer a query. Raises ValueError that names the invalid option."""
    request = pb.ScoreRequest()
    _set(request, "query", query)
    _set(request, "documents", documents)
    _set_all(request, options, ScoreOptions.__annotations__)
    return request


def make_tokenize_request(prompt: str | ChatMessages, model: str) -> pb.TokenizeRequest:
    """Return the request for the token ids of a text or of messages. Raises ValueError."""
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, text=prompt)
    return pb.TokenizeRequest(model=model, messages=to_messages(prompt))


def is_chat(prompt: Prompt) -> TypeGuard[ChatMessages]:
    """Return whether a prompt consists of messages."""
    # a single message is refused later, with a message that says so
    if isinstance(prompt, (pb.Messages, pb.Message, Mapping)):
        return True
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], (pb.Message, Mapping))


def to_messages(messages: ChatMessages) -> pb.Messages:
    """Return messages as a pb.Messages. Raises ValueError."""
    if isinstance(messages, pb.Messages):
        return messages
    if isinstance(messages, (str, bytes, pb.Message, Mapping)):
        raise ValueError("messages: give a list of them")
    whole = pb.Messages()
    for index, message in enumerate(messages):
        try:
            whole.messages.append(message if isinstance(message, pb.Message) else pb.Message(**message))
        except (TypeError, ValueError) as error:
            raise ValueError(f"messages[{index}]: {error}") from None
    return whole


def _token_ids(name: str, ids: Any) -> pb.TokenIds:
    if isinstance(ids, bytes):  # each byte would become a token id
        raise ValueError(f"{name}: give a text, not bytes")
    try:
        return pb.TokenIds(ids=ids)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _owner(request: pb.GenerateRequest, name: str) -> Any:
    """Return the message that has the field `name`. Raises ValueError."""
    if name in GenerateOptions.__annotations__:
        for message, field in ((request, None), (pb.Sampling, "sampling"), (pb.Stopping, "stopping")):
            if name in message.DESCRIPTOR.fields_by_name:
                return request if field is None else getattr(request, field)
    raise ValueError(f"{name}: there is no such option; known are {', '.join(GenerateOptions.__annotations__)}")


def _set_all(request: Any, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{name}: there is no such option; known are {', '.join(known)}")
        _set(request, name, value)


def _set(message: Any, name: str, value: Any) -> None:
    # extend() would take each character of a text
    if isinstance(value, (str, bytes)) and hasattr(getattr(message, name), "extend"):
        raise ValueError(f"{name}: give a list, not one text")
    try:
        message.MergeFrom(type(message)(**{name: value}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
