"""The OpenAPI document, made from the table by which requests are read."""

from collections.abc import Mapping, Sequence
from typing import Any

from baton.protocol import MAX_INPUTS
from gateway.http.anthropic import COUNT_NEUTRAL, MESSAGES, MESSAGES_NEUTRAL, TOOL_CHOICES
from gateway.http.fields import (
    BOOLEAN,
    CHAT,
    CHAT_NEUTRAL,
    COMPLETION,
    COMPLETION_NEUTRAL,
    CONSTRAINTS,
    EMBEDDING,
    FORMAT_TYPES,
    JSON_SCHEMA,
    NOTES,
    RERANK,
    RESPONSE,
    RESPONSE_NEUTRAL,
    STRING,
    TEXTS,
    TOKEN_IDS,
    Field,
)
from gateway.http.requests import ENCODINGS, MAX_PROMPTS
from gateway.http.responses import CALL_FIELDS, ITEM_FIELDS, LOGPROBS, OUTPUT_FIELDS, PARTS, ROLES

Json = dict[str, Any]

_STATUSES = {
    400: "The request is not acceptable; `param` names the field.",
    401: "No valid key.",
    403: "The caller may not do this.",
    404: "There is no such model.",
    408: "The body came too slowly.",
    409: "The request_id is in use.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    422: "Workers have died of this prompt: it is not tried again.",
    429: "Not now: come back after Retry-After seconds.",
    503: "Nothing serves at the moment.",
    504: "The deadline passed.",
}
_ANSWER = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"type": "object", "required": ["index", "finish_reason"]}},
        "usage": {"type": "object"},
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["id", "type", "role", "model", "content", "stop_reason", "usage"],
    "properties": {"id": {"type": "string"}, "content": {"type": "array"}, "usage": {"type": "object"}},
}
_RESPONSE = {
    "type": "object",
    "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
    "properties": {"id": {"type": "string"}, "output": {"type": "array"}, "usage": {"type": "object"}},
}
_EMBEDDINGS = {
    "type": "object",
    "required": ["object", "data", "model", "usage"],
    "properties": {"data": {"type": "array", "items": {"type": "object", "required": ["index", "embedding"]}}},
}
_RANKED = {
    "type": "object",
    "required": ["id", "model", "results", "usage"],
    "properties": {"results": {"type": "array", "items": {"type": "object", "required": ["index", "relevance_score"]}}},
}
_OBJECT = {"type": "object"}
_NOTES = {name: kind.schema for name, kind in NOTES.items()}
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"}


def _closed(required: Sequence[str], **properties: Json) -> Json:
    """Return the schema of an object with these properties and no others."""
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _list_of(kind: Json, *others: Json, **bounds: int) -> Json:
    return {"type": "array", "items": {"anyOf": [kind, *others]} if others else kind, **bounds}


def _parts(*kinds: str, **others: Json) -> Json:
    return _closed(["type", "text"], type={"enum": kinds}, text=STRING.schema, cache_control=_OBJECT, **others)


def _content(*kinds: str) -> Json:
    notes: Json = {"annotations": {}, "logprobs": {}}  # on an earlier answer, of which any may come back
    return {"anyOf": [STRING.schema, _list_of(_parts(*kinds, **notes))]}


_CONTENT = _content("text")


def _conversation(message: Json, *others: Json) -> Json:
    return _list_of(message, *others, minItems=1)


def _message(*roles: str, content: Json, **others: Json) -> Json:
    return _closed(["role", "content"], role={"enum": roles}, content=content, **others)


_TOOL_RESULT = _closed(
    ["type", "tool_use_id"],
    type={"const": "tool_result"},
    tool_use_id=STRING.schema,
    content=_CONTENT,
    is_error=BOOLEAN.schema,
    cache_control=_OBJECT,
)
_TOOL_USE = _closed(
    ["type", "id", "name", "input"],
    type={"const": "tool_use"},
    id=STRING.schema,
    name=_NAME,
    input=_OBJECT,
    cache_control=_OBJECT,
)
_THINKING = _closed(["type", "thinking"], type={"const": "thinking"}, thinking=STRING.schema, signature=STRING.schema)
_ANTHROPIC = {
    "messages": _conversation(
        _message("system", content=_CONTENT),
        _message("user", content={"anyOf": [STRING.schema, _list_of(_parts("text"), _TOOL_RESULT)]}),
        _message("assistant", content={"anyOf": [STRING.schema, _list_of(_parts("text"), _THINKING, _TOOL_USE)]}),
    ),
    "system": _CONTENT,
    "cache_control": _OBJECT,
    "output_config": _closed(
        [], format=_closed(["type", "schema"], type={"const": "json_schema"}, schema=JSON_SCHEMA.schema)
    ),
    "tools": _list_of(
        _closed(
            ["name", "input_schema"],
            type={"const": "custom"},
            name=_NAME,
            description=STRING.schema,
            input_schema=_OBJECT,
            strict=BOOLEAN.schema,
            cache_control=_OBJECT,
            eager_input_streaming=BOOLEAN.schema,
        )
    ),
    "tool_choice": _closed(
        ["type"], type={"enum": [*TOOL_CHOICES]}, name=_NAME, disable_parallel_tool_use=BOOLEAN.schema
    ),
}
_FUNCTION = {"name": _NAME, "description": STRING.schema, "parameters": _OBJECT, "strict": BOOLEAN.schema}
_ITEMS = _conversation(
    _message(
        *ROLES,
        content=_content(*PARTS),
        type={"const": "message"},
        **{name: STRING.schema for name in ITEM_FIELDS if name not in ("type", "role", "content")},
    ),
    _closed(
        ["type", "call_id", "name", "arguments"],
        type={"const": "function_call"},
        **{name: STRING.schema for name in CALL_FIELDS if name != "type"},
    ),
    _closed(
        ["type", "call_id", "output"],
        **{
            **dict.fromkeys(OUTPUT_FIELDS, STRING.schema),
            "type": {"const": "function_call_output"},
            "output": _content(*PARTS),
        },
    ),
    {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"const": "reasoning"}, "content": _content("reasoning_text")},
    },
)
_OF_RESPONSES = {
    "input": {"anyOf": [STRING.schema, _ITEMS]},
    "instructions": STRING.schema,
    "include": _list_of({"const": LOGPROBS}),
    "chat_template_kwargs": _OBJECT,
    "tools": _list_of(_closed(["type", "name"], type={"const": "function"}, **_FUNCTION)),
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            _closed(["type", "name"], type={"const": "function"}, name=_NAME),
        ]
    },
    "parallel_tool_calls": BOOLEAN.schema,
    "text": _closed(
        [],
        format=_closed(
            ["type"],
            type={"enum": FORMAT_TYPES},
            name=STRING.schema,
            description=STRING.schema,
            schema=JSON_SCHEMA.schema,
            strict=BOOLEAN.schema,
        ),
    ),
    "stream": BOOLEAN.schema,
    "stream_options": _closed([], include_obfuscation=BOOLEAN.schema),
    **_NOTES,
}
_CALL = _closed(
    ["id", "function"],
    id=STRING.schema,
    index={"type": "integer"},
    type={"const": "function"},
    function=_closed(["name", "arguments"], name=_NAME, arguments=STRING.schema),
)
_TEXT_OR_NULL = {"type": ["string", "null"]}
_MESSAGES = _conversation(
    _closed(
        ["role"],
        role={"enum": ["system", "developer", "user", "assistant", "tool"]},
        name=_TEXT_OR_NULL,
        content={"anyOf": [_CONTENT, {"type": "null"}]},
        reasoning_content=_TEXT_OR_NULL,
        reasoning=_TEXT_OR_NULL,
        tool_calls={"anyOf": [_list_of(_CALL), {"type": "null"}]},
        tool_call_id=_TEXT_OR_NULL,
    ),
)
_TOOL = _closed(["type", "function"], type={"const": "function"}, function=_closed(["name"], **_FUNCTION))
_NAMED_CHOICE = _closed(["type", "function"], type={"const": "function"}, function=_closed(["name"], name=_NAME))
_CONVERSATION = {
    "messages": _MESSAGES,
    "tools": _list_of(_TOOL),
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_CHOICE]},
    "parallel_tool_calls": BOOLEAN.schema,
    "chat_template_kwargs": _OBJECT,
    "continue_final_message": BOOLEAN.schema,
    "add_generation_prompt": BOOLEAN.schema,
}
_TOKENS = {**TOKEN_IDS.schema, "minItems": 1}


def _prompts(most: int) -> Json:
    """Return the schema of one prompt, or of several."""
    text = {"type": "string", "minLength": 1}
    several = [{"type": "array", "items": each, "minItems": 1, "maxItems": most} for each in (text, _TOKENS)]
    return {"anyOf": [text, _TOKENS, *several]}


_NAMED_SCHEMA = _closed(
    ["schema"], name=STRING.schema, description=STRING.schema, schema=JSON_SCHEMA.schema, strict=BOOLEAN.schema
)
_FORMAT = _closed(["type"], type={"enum": FORMAT_TYPES}, json_schema=_NAMED_SCHEMA)
_STRUCTURED = {
    **_closed([], **{row.name.partition(".")[2]: row.kind.schema for row in CONSTRAINTS}),
    "minProperties": 1,
    "maxProperties": 1,
}
_STREAMED = {
    "response_format": _FORMAT,
    "structured_outputs": _STRUCTURED,
    "stream": BOOLEAN.schema,
    "stream_options": _closed(
        [], include_usage=BOOLEAN.schema, continuous_usage_stats=BOOLEAN.schema, include_obfuscation=BOOLEAN.schema
    ),
    **_NOTES,
    "return_token_ids": BOOLEAN.schema,
}
_OF_CHAT = {**_CONVERSATION, "logprobs": BOOLEAN.schema, "prediction": _OBJECT, **_STREAMED}
_OF_MESSAGES = {**_ANTHROPIC, "metadata": _OBJECT, "stream": BOOLEAN.schema}


def document() -> Json:
    """Return the document."""
    chat = _body(_OF_CHAT, ["messages"], CHAT, CHAT_NEUTRAL)
    completion = _body({"prompt": _prompts(MAX_PROMPTS), **_STREAMED}, ["prompt"], COMPLETION, COMPLETION_NEUTRAL)
    embeddings = _body(
        {"input": _prompts(MAX_INPUTS), "encoding_format": {"enum": ENCODINGS}, "user": STRING.schema},
        ["input"],
        EMBEDDING,
    )
    rerank = _body(
        {
            "documents": {**TEXTS.schema, "minItems": 1, "maxItems": MAX_INPUTS},
            "top_n": {"type": "integer", "minimum": 1},
            "return_documents": BOOLEAN.schema,
            "user": STRING.schema,
        },
        ["query", "documents"],
        RERANK,
    )
    tokenize = _body({"model": STRING.schema, "prompt": STRING.schema, **_CONVERSATION}, [])
    detokenize = _body({"model": STRING.schema, "tokens": TOKEN_IDS.schema}, ["tokens"])
    response = _body(_OF_RESPONSES, ["input"], RESPONSE, RESPONSE_NEUTRAL)
    message = _body(_OF_MESSAGES, ["messages", "max_tokens"], MESSAGES, MESSAGES_NEUTRAL)
    count = _body({**_ANTHROPIC, "model": STRING.schema}, ["messages"], neutral=COUNT_NEUTRAL)
    counted = {"type": "object", "required": ["input_tokens"], "properties": {"input_tokens": {"type": "integer"}}}
    statuses = {"200": {"description": "Requests are served."}, "503": {"description": "Not now."}}
    paths = {
        "/health": {
            "get": {"summary": "Whether requests are served; needs no key.", "security": [{}], "responses": statuses}
        },
        "/v1/models": {"get": _operation("The served model.", {"type": "object"})},
        "/v1/models/{model}": {
            "get": _operation("One model, if it is served.", {"type": "object"}),
            "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
        },
        "/v1/chat/completions": {"post": _operation("Answer a conversation.", _ANSWER, chat, streams=True)},
        "/v1/completions": {"post": _operation("Continue prompts.", _ANSWER, completion, streams=True)},
        "/v1/messages": {"post": _operation("Answer a conversation.", _MESSAGE, message, True, _ANTHROPIC_ERROR)},
        "/v1/messages/count_tokens": {
            "post": _operation("How many tokens a conversation has.", counted, count, error=_ANTHROPIC_ERROR)
        },
        "/v1/responses": {"post": _operation("Answer; nothing is stored.", _RESPONSE, response, streams=True)},
        "/v1/embeddings": {"post": _operation("Vectors of texts.", _EMBEDDINGS, embeddings)},
        "/v1/rerank": {"post": _operation("How well documents answer a query, best first.", _RANKED, rerank)},
        "/tokenize": {"post": _operation("Token ids of a text or a conversation.", {"type": "object"}, tokenize)},
        "/detokenize": {"post": _operation("Text of token ids.", {"type": "object"}, detokenize)},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": "OpenAI's and Anthropic's APIs, as far as this server has them.",
        },
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
        "paths": paths,
    }


def _body(
    others: Mapping[str, Json],
    required: list[str],
    table: Sequence[Field] = (),
    neutral: Mapping[str, tuple] = {},
) -> Json:
    """Return the schema of a body. `neutral`: fields of which only these values are accepted."""
    properties = {**others, **{row.name: row.kind.schema for row in table}}
    nullable = {name: schema if name in required else _or_null(schema) for name, schema in properties.items()}
    accepted = {name: {"enum": [*values, None]} for name, values in neutral.items()}
    return {
        "type": "object",
        "required": required,
        "properties": {**nullable, **accepted},
        "additionalProperties": False,
    }


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _operation(
    summary: str, answer: Json, body: Json | None = None, streams: bool = False, error: Json = _ERROR
) -> Json:
    content: Json = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    failures = {
        str(status): {"description": words, "content": {"application/json": {"schema": error}}}
        for status, words in _STATUSES.items()
    }
    operation: Json = {"summary": summary, "responses": {"200": {"description": "The answer.", "content": content}}}
    operation["responses"] |= failures
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
