"""JSON schemas that bodies share: conversations, prompts and constraints."""

from collections.abc import Sequence

from gateway.http.anthropic.request import CHOICE_TYPES, DISPLAYS, THINKS
from gateway.http.fields.conversation import TOOL_CHOICES
from gateway.http.fields.kinds import BOOLEAN, EFFORT, INTEGER, JSON_SCHEMA, STRING, SUMMARY, TOKEN_IDS, VERBOSITY
from gateway.http.fields.tables import CONSTRAINTS, FORMAT_TYPES, REASONING_OPTIONS, STRUCTURED_NEUTRAL
from gateway.http.openai.conversations import REPEATED, TYPES
from gateway.http.responses.items import CALL_FIELDS, ITEM_FIELDS, ITEM_PARTS, ITEM_ROLES, OUTPUT_FIELDS
from gateway.http.responses.request import ELSEWHERE, SUMMARIES
from gateway.http.wire.encoding import Json
from gateway.request.messages import NAME, ROLES

OBJECT = {"type": "object"}
_NAME = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_CALLED = {**STRING.schema, "minLength": 1}  # any name, as a model may have made it up


def closed(required: Sequence[str], **properties: Json) -> Json:
    """Return the schema of an object with these properties and no others."""
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _list_of(kind: Json, *others: Json, **bounds: int) -> Json:
    return {"type": "array", "items": {"anyOf": [kind, *others]} if others else kind, **bounds}


def _parts(*kinds: str, **others: Json) -> Json:
    return closed(["type", "text"], type={"enum": kinds}, text=STRING.schema, cache_control=OBJECT, **others)


def _content(*kinds: str, besides: Sequence[Json] = (), **others: Json) -> Json:
    notes: Json = {name: {} for name in ("annotations", "logprobs", "parsed", "id", "index")}  # ignored
    return {"anyOf": [STRING.schema, _list_of(_parts(*kinds, **notes, **others), *besides)]}


_CONTENT = _content("text")


def _conversation(message: Json, *others: Json) -> Json:
    return _list_of(message, *others, minItems=1)


def _message(*roles: str, content: Json, **others: Json) -> Json:
    return closed(["role", "content"], role={"enum": roles}, content=content, **others)


_DOCUMENT = closed(
    ["type", "source"],
    type={"const": "document"},
    source={
        "anyOf": [
            closed(["type", "data"], type={"const": "text"}, media_type=STRING.schema, data=STRING.schema),
            closed(["type", "content"], type={"const": "content"}, content=_CONTENT),
        ]
    },
    title=STRING.schema,
    context=STRING.schema,
    citations=closed([], enabled={"const": False}),
    cache_control=OBJECT,
)
_TOOL_RESULT = closed(
    ["type", "tool_use_id"],
    type={"const": "tool_result"},
    tool_use_id=STRING.schema,
    content={"anyOf": [STRING.schema, _list_of(_parts("text"), _DOCUMENT)]},
    is_error=BOOLEAN.schema,
    cache_control=OBJECT,
)
_TOOL_USE = closed(
    ["type", "id", "name", "input"],
    type={"const": "tool_use"},
    id=STRING.schema,
    name=_CALLED,
    input=OBJECT,
    cache_control=OBJECT,
)
_THINKING = closed(["type", "thinking"], type={"const": "thinking"}, thinking=STRING.schema, signature=STRING.schema)
_REDACTED = closed(["type"], type={"const": "redacted_thinking"}, data=STRING.schema)
_OUTPUT_FORMAT = closed(["type", "schema"], type={"const": "json_schema"}, schema=JSON_SCHEMA.schema)


def _thinking(kind: str, *names: str) -> Json:
    fields: Json = {"budget_tokens": INTEGER.schema, "display": {"enum": DISPLAYS}, "type": {"const": kind}}
    return closed(["type"], **{name: fields[name] for name in names})


ANTHROPIC = {
    "messages": _conversation(
        _message("system", content=_CONTENT),
        _message("user", content={"anyOf": [STRING.schema, _list_of(_parts("text"), _DOCUMENT, _TOOL_RESULT)]}),
        _message(
            "assistant", content={"anyOf": [STRING.schema, _list_of(_parts("text"), _THINKING, _REDACTED, _TOOL_USE)]}
        ),
    ),
    "system": _CONTENT,
    "cache_control": OBJECT,
    "context_management": OBJECT,
    "thinking": {"anyOf": [_thinking(kind, *names) for kind, names in THINKS.items()]},
    "output_config": closed([], format=_OUTPUT_FORMAT, effort=EFFORT.schema),
    "output_format": _OUTPUT_FORMAT,
    "tools": _list_of(
        closed(
            ["name", "input_schema"],
            type={"const": "custom"},
            name=_NAME,
            description=STRING.schema,
            input_schema=OBJECT,
            strict=BOOLEAN.schema,
            cache_control=OBJECT,
            eager_input_streaming=BOOLEAN.schema,
        )
    ),
    "tool_choice": closed(
        ["type"], type={"enum": [*CHOICE_TYPES]}, name=_NAME, disable_parallel_tool_use=BOOLEAN.schema
    ),
}
_FUNCTION = {"name": _NAME, "description": STRING.schema, "parameters": OBJECT, "strict": BOOLEAN.schema}
_ITEMS = _conversation(
    _message(
        *ITEM_ROLES,
        content=_content(*ITEM_PARTS),
        type={"const": "message"},
        **{name: STRING.schema for name in ITEM_FIELDS if name not in ("type", "role", "content")},
    ),
    closed(
        ["type", "call_id", "name", "arguments"],
        type={"const": "function_call"},
        **{name: STRING.schema for name in CALL_FIELDS if name not in ("type", "parsed_arguments")},
        parsed_arguments={},
    ),
    closed(
        ["type", "call_id", "output"],
        **{
            **dict.fromkeys(OUTPUT_FIELDS, STRING.schema),
            "type": {"const": "function_call_output"},
            "output": _content(*ITEM_PARTS),
        },
    ),
    {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"const": "reasoning"}, "content": _content("reasoning_text")},
    },
)
_ITEM_TOOL = closed(["type", "name"], type={"const": "function"}, **_FUNCTION)
OF_RESPONSES = {
    "input": {"anyOf": [STRING.schema, _ITEMS]},
    "instructions": STRING.schema,
    "chat_template_kwargs": OBJECT,
    "reasoning": closed([], effort=EFFORT.schema, **dict.fromkeys(SUMMARIES, SUMMARY.schema)),
    "tools": _list_of(
        _ITEM_TOOL,
        closed(
            ["type", "name"],
            type={"const": "namespace"},
            name=STRING.schema,
            description=STRING.schema,
            tools=_list_of(_ITEM_TOOL),
        ),
        {"type": "object", "required": ["type"], "properties": {"type": {"pattern": f"^({'|'.join(ELSEWHERE)})"}}},
    ),
    "tool_choice": {
        "anyOf": [
            {"enum": [*TOOL_CHOICES]},
            closed(["type", "name"], type={"const": "function"}, name=_NAME),
        ]
    },
    "parallel_tool_calls": BOOLEAN.schema,
    "text": closed(
        [],
        format=closed(
            ["type"],
            type={"enum": FORMAT_TYPES},
            name=STRING.schema,
            description=STRING.schema,
            schema=JSON_SCHEMA.schema,
            strict=BOOLEAN.schema,
        ),
        verbosity=VERBOSITY.schema,
    ),
}
_CALL = closed(
    ["id", "function"],
    id=STRING.schema,
    index={"type": "integer"},
    type={"const": "function"},
    function=closed(["name", "arguments"], name=_CALLED, arguments=STRING.schema, parsed_arguments={}),
)
_ASSISTANT_CONTENT = _content("text", besides=(_THINKING, _REDACTED), **{name: {} for name in REPEATED})
_TEXT_OR_NULL = {"type": ["string", "null"]}
_MESSAGES = _conversation(
    closed(
        ["role"],
        role={"enum": ROLES},
        type={"enum": TYPES},
        name=_TEXT_OR_NULL,
        content={"anyOf": [_ASSISTANT_CONTENT, {"type": "null"}]},
        reasoning_content=_TEXT_OR_NULL,
        reasoning=_TEXT_OR_NULL,
        tool_calls={"anyOf": [_list_of(_CALL), {"type": "null"}]},
        tool_call_id=_TEXT_OR_NULL,
        parsed={},
        id=_TEXT_OR_NULL,  # of a tool's result, as `extra` is
        extra=OBJECT,
    ),
)
_TOOL = closed(["type", "function"], type={"const": "function"}, function=closed(["name"], **_FUNCTION))
_NAMED_CHOICE = closed(["type", "function"], type={"const": "function"}, function=closed(["name"], name=_NAME))


def _reasoning_options() -> Json:
    """Return the schemas of the reasoning options."""
    found: Json = {}
    for name, kind, _ in REASONING_OPTIONS:
        parent, _, own = name.rpartition(".")
        of_object = found.setdefault(parent, closed([]))["properties"] if parent else found
        of_object[own] = kind.schema
    return found


CONVERSATION = {
    "messages": _MESSAGES,
    "tools": _list_of(_TOOL),
    "tool_choice": {"anyOf": [{"enum": [*TOOL_CHOICES]}, _NAMED_CHOICE]},
    "parallel_tool_calls": BOOLEAN.schema,
    "chat_template_kwargs": OBJECT,
    **_reasoning_options(),
    "continue_final_message": BOOLEAN.schema,
    "add_generation_prompt": BOOLEAN.schema,
}
_TOKENS = {**TOKEN_IDS.schema, "minItems": 1}


def prompts(most: int) -> Json:
    """Return the schema of one prompt, or of several."""
    text = {"type": "string", "minLength": 1}
    several = [{"type": "array", "items": each, "minItems": 1, "maxItems": most} for each in (text, _TOKENS)]
    return {"anyOf": [text, _TOKENS, *several]}


_NAMED_SCHEMA = closed(
    ["schema"], name=STRING.schema, description=STRING.schema, schema=JSON_SCHEMA.schema, strict=BOOLEAN.schema
)
FORMAT = closed(
    ["type"],
    type={"enum": FORMAT_TYPES},
    json_schema=_NAMED_SCHEMA,
    schema=JSON_SCHEMA.schema,
    value=JSON_SCHEMA.schema,
)
_STRUCTURED = {row.name.partition(".")[2]: row.kind.schema for row in CONSTRAINTS}
STRUCTURED = {
    **closed(
        [],
        **_STRUCTURED,
        **{name: {"enum": [*values]} for name, values in STRUCTURED_NEUTRAL.items()},
    ),
    "oneOf": [{"required": [name]} for name in _STRUCTURED],
}
