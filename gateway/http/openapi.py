"""The OpenAPI document, made from the table by which requests are read."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.http.anthropic import COUNT_NEUTRAL, MESSAGES, MESSAGES_NEUTRAL
from gateway.http.fields import (
    BOOLEAN,
    CHAT,
    CHAT_NEUTRAL,
    COMPLETION,
    COMPLETION_NEUTRAL,
    CONSTRAINTS,
    JSON_SCHEMA,
    RESPONSE,
    RESPONSE_NEUTRAL,
    STRING,
    TOKEN_IDS,
    Field,
)
from gateway.http.requests import MAX_PROMPTS
from gateway.http.responses import ITEM_FIELDS, LOGPROBS, NOTES, PARTS, ROLES

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
_OBJECT = {"type": "object"}


def _content(*kinds: str) -> Json:
    part = {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"enum": kinds}, "text": STRING.schema, "cache_control": _OBJECT},
        "additionalProperties": False,
    }
    return {"anyOf": [STRING.schema, {"type": "array", "items": part}]}


_CONTENT = _content("text")


def _conversation(*roles: str, content: Json = _CONTENT, **others: Json) -> Json:
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": roles}, "content": content, **others},
        "additionalProperties": False,
    }
    return {"type": "array", "minItems": 1, "items": message}


_ANTHROPIC = {"messages": _conversation("user", "assistant"), "system": _CONTENT, "cache_control": _OBJECT}
_ITEMS = _conversation(
    *ROLES,
    content=_content(*PARTS),
    type={"const": "message"},
    **{name: STRING.schema for name in ITEM_FIELDS if name not in ("type", "role", "content")},
)
_OF_RESPONSES = {
    "input": {"anyOf": [STRING.schema, _ITEMS]},
    "instructions": STRING.schema,
    "include": {"type": "array", "items": {"const": LOGPROBS}},
    "stream": BOOLEAN.schema,
    "stream_options": {
        "type": "object",
        "properties": {"include_obfuscation": BOOLEAN.schema},
        "additionalProperties": False,
    },
    **dict.fromkeys(NOTES, STRING.schema),
}
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_CALL = {
    "type": "object",
    "required": ["id", "function"],
    "properties": {
        "id": {"type": "string"},
        "index": {"type": "integer"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": _NAME, "arguments": {"type": "string"}},
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [_CONTENT, {"type": "null"}]},
            "reasoning_content": {"type": ["string", "null"]},
            "reasoning": {"type": ["string", "null"]},
            "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
            "tool_call_id": {"type": ["string", "null"]},
        },
        "additionalProperties": False,
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _NAME,
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"enum": [False, None]},
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
_NAMED_CHOICE = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": _NAME}},
    },
    "additionalProperties": False,
}
_CONVERSATION = {
    "messages": _MESSAGES,
    "tools": {"type": "array", "items": _TOOL},
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_CHOICE]},
    "parallel_tool_calls": BOOLEAN.schema,
    "chat_template_kwargs": {"type": "object"},
    "continue_final_message": BOOLEAN.schema,
    "add_generation_prompt": BOOLEAN.schema,
}
_TOKENS = {**TOKEN_IDS.schema, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _TOKENS,
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
_NAMED_SCHEMA = {
    "type": "object",
    "required": ["schema"],
    "properties": {
        "name": STRING.schema, "description": STRING.schema, "schema": JSON_SCHEMA.schema, "strict": BOOLEAN.schema,
    },
    "additionalProperties": False,
}  # fmt: skip
_FORMAT = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": _NAMED_SCHEMA},
    "additionalProperties": False,
}
_STRUCTURED = {
    "type": "object",
    "properties": {row.name.partition(".")[2]: row.kind.schema for row in CONSTRAINTS},
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
}
_STREAMED = {
    "response_format": _FORMAT,
    "structured_outputs": _STRUCTURED,
    "stream": BOOLEAN.schema,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": BOOLEAN.schema, "include_obfuscation": BOOLEAN.schema},
        "additionalProperties": False,
    },
    "user": STRING.schema,
    "return_token_ids": BOOLEAN.schema,
}


def document() -> Json:
    """Return the document."""
    chat = _body({**_CONVERSATION, "logprobs": BOOLEAN.schema, **_STREAMED}, ["messages"], CHAT, CHAT_NEUTRAL)
    completion = _body({"prompt": _PROMPT, **_STREAMED}, ["prompt"], COMPLETION, COMPLETION_NEUTRAL)
    tokenize = _body({"model": STRING.schema, "prompt": STRING.schema, **_CONVERSATION}, [])
    detokenize = _body({"model": STRING.schema, "tokens": TOKEN_IDS.schema}, ["tokens"])
    response = _body(_OF_RESPONSES, ["input"], RESPONSE, RESPONSE_NEUTRAL)
    message = _body(
        {**_ANTHROPIC, "metadata": _OBJECT, "stream": BOOLEAN.schema},
        ["messages", "max_tokens"],
        MESSAGES,
        MESSAGES_NEUTRAL,
    )
    count = _body({**_ANTHROPIC, "model": STRING.schema}, ["messages"], neutral=COUNT_NEUTRAL)
    counted = {"type": "object", "required": ["input_tokens"], "properties": {"input_tokens": {"type": "integer"}}}
    paths = {
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
