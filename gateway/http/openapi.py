"""Make the OpenAPI document from the tables by which requests are read."""

from collections.abc import Mapping, Sequence

from baton.protocol import MAX_INPUTS
from gateway.http.anthropic.request import MESSAGES, MESSAGES_NEUTRAL
from gateway.http.fields.kinds import BOOLEAN, METADATA, STRING, TEXTS, TOKEN_IDS, VERBOSITY
from gateway.http.fields.tables import (
    BARE_CONSTRAINTS,
    CHAT,
    CHAT_NEUTRAL,
    COHERE_RERANK,
    COMPLETION,
    COMPLETION_NEUTRAL,
    EMBEDDING,
    INPUT_NEUTRAL,
    NOTES,
    RERANK,
    RESPONSE,
    RESPONSE_NEUTRAL,
    TOKENIZE_NEUTRAL,
    Field,
)
from gateway.http.openai.embeddings import ENCODINGS, MAX_TEXTS
from gateway.http.openai.requests import MAX_PROMPTS
from gateway.http.responses.request import INCLUDED
from gateway.http.schemas import ANTHROPIC, CONVERSATION, FORMAT, OBJECT, OF_RESPONSES, STRUCTURED, closed, prompts
from gateway.http.wire.encoding import Json

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
_RANKED_COHERE = {**_RANKED, "required": ["id", "results", "meta"]}
_NOTES = {name: kind.schema for name, kind in NOTES.items()}
_STREAMED = {
    "response_format": FORMAT,
    "structured_outputs": STRUCTURED,
    "guided_decoding_backend": STRING.schema,
    **{row.name: row.kind.schema for row in BARE_CONSTRAINTS},
    "stream": BOOLEAN.schema,
    "stream_options": closed(
        [], include_usage=BOOLEAN.schema, continuous_usage_stats=BOOLEAN.schema, include_obfuscation=BOOLEAN.schema
    ),
    **_NOTES,
    "return_token_ids": BOOLEAN.schema,
}
_OF_CHAT = {
    **CONVERSATION,
    "logprobs": BOOLEAN.schema,
    "prediction": OBJECT,
    "verbosity": VERBOSITY.schema,
    "include_reasoning": BOOLEAN.schema,
    **_STREAMED,
}
_OF_RESPONSE = {
    **OF_RESPONSES,
    "include": {"type": "array", "items": {"enum": INCLUDED}},
    "stream": BOOLEAN.schema,
    "stream_options": closed([], include_obfuscation=BOOLEAN.schema),
    "client_metadata": METADATA.schema,
    **_NOTES,
}
_OF_MESSAGES = {**ANTHROPIC, "metadata": OBJECT, "stream": BOOLEAN.schema}


def document() -> Json:
    """Return the OpenAPI document."""
    chat = _body(_OF_CHAT, ["messages"], CHAT, CHAT_NEUTRAL)
    completion = _body({"prompt": prompts(MAX_PROMPTS), **_STREAMED}, ["prompt"], COMPLETION, COMPLETION_NEUTRAL)
    embeddings = _body(
        {"input": prompts(MAX_TEXTS), "encoding_format": {"enum": ENCODINGS}, "user": STRING.schema},
        ["input"],
        EMBEDDING,
    )
    ranked: Json = {
        "documents": {**TEXTS.schema, "minItems": 1, "maxItems": MAX_INPUTS},
        "top_n": {"type": "integer", "minimum": 1},
    }
    ranked["return_documents"] = BOOLEAN.schema
    rerank = _body({**ranked, "user": STRING.schema}, ["query", "documents"], RERANK)
    rank = {"post": _operation("How well documents answer a query, best first.", _RANKED, rerank)}
    cohere = _body(ranked, ["query", "documents"], COHERE_RERANK)
    text: Json = {"model": STRING.schema, "prompt": STRING.schema, "add_special_tokens": BOOLEAN.schema}
    tokenize = _body({**text, **CONVERSATION}, [], neutral=TOKENIZE_NEUTRAL)
    detokenize = _body({"model": STRING.schema, "tokens": TOKEN_IDS.schema}, ["tokens"])
    response = _body(_OF_RESPONSE, ["input"], RESPONSE, RESPONSE_NEUTRAL)
    count_input = _body({**OF_RESPONSES, "model": STRING.schema}, ["input"], neutral=INPUT_NEUTRAL)
    message = _body(_OF_MESSAGES, ["messages", "max_tokens"], MESSAGES, MESSAGES_NEUTRAL)
    count = _body({**ANTHROPIC, "model": STRING.schema}, ["messages"])
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
        "/v1/responses/input_tokens": {"post": _operation("How many tokens an input has.", counted, count_input)},
        "/v1/embeddings": {"post": _operation("Vectors of texts.", _EMBEDDINGS, embeddings)},
        "/v1/rerank": rank,
        "/rerank": rank,
        "/v2/rerank": {"post": _operation("The same in Cohere's form.", _RANKED_COHERE, cohere)},
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
    """Return the schema of a body. `neutral`: fields that accept only these values."""
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
    """Return an operation of a path. `answer`, `body` and `error`: schemas; `streams`: the answer may be events."""
    content: Json = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    failures = {
        str(status): {"description": text, "content": {"application/json": {"schema": error}}}
        for status, text in _STATUSES.items()
    }
    operation: Json = {"summary": summary, "responses": {"200": {"description": "The answer.", "content": content}}}
    operation["responses"] |= failures
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
