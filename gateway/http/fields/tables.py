"""Tables of the fields of requests: the client's name, the kind of value, and the field of baton.v1 with this meaning.
The readers of requests, the names in errors and the OpenAPI document derive from them."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from baton.v1 import inference_pb2 as pb
from gateway.http.fields.kinds import (
    ALL,
    BOOLEAN,
    EFFORT,
    INTEGER,
    JSON_SCHEMA,
    LENGTH,
    LOGIT_BIAS,
    METADATA,
    NUMBER,
    OBJECT,
    POOLING,
    SEED,
    SIGNED,
    STRING,
    STRINGS,
    SUMMARY,
    TEXTS,
    THINKING_TYPE,
    TOKEN_IDS,
    TOP_K,
    TRUE,
    ValueKind,
)


class Field(NamedTuple):
    """A field of a body. `path`: the field of the message of baton.v1, such as "sampling.top_p"."""

    name: str
    path: str
    kind: ValueKind


class ReasoningOption(NamedTuple):
    """A field that says how a model is to reason. `about`: how much ("effort"), whether at all ("thinks"), whether it
    sees its earlier reasoning again ("keeps"); empty: it is ignored, or does not concern the template."""

    name: str
    kind: ValueKind
    about: str = ""


_KINDS = {
    FieldDescriptor.TYPE_FLOAT: NUMBER,
    FieldDescriptor.TYPE_UINT32: INTEGER,
    FieldDescriptor.TYPE_INT32: SIGNED,
    FieldDescriptor.TYPE_UINT64: SEED,
    FieldDescriptor.TYPE_BOOL: BOOLEAN,
    FieldDescriptor.TYPE_STRING: STRING,
}
_UNLIKE = {
    "top_k": TOP_K,
    "logit_bias": LOGIT_BIAS,
    "stop": STRINGS,
    "stop_token_ids": TOKEN_IDS,
    "max_tokens": LENGTH,
}


def _rows(message: Any, names: Iterable[str], before: str = "") -> tuple[Field, ...]:
    """Return rows for fields that have the same name in OpenAI's or vLLM's API as in baton.v1."""
    kinds = {name: _UNLIKE.get(name) or _KINDS[message.fields_by_name[name].type] for name in names}
    return tuple(Field(name, before + name, kind) for name, kind in kinds.items())


_BOTH = (
    *_rows(pb.GenerateRequest.DESCRIPTOR, ("model", "request_id", "priority", "slo_class", "stream_interval_ms")),
    *_rows(
        pb.Sampling.DESCRIPTOR,
        (name for name in pb.Sampling.DESCRIPTOR.fields_by_name if name not in ("logprobs", "prompt_logprobs")),
        "sampling.",
    ),
    *_rows(pb.Stopping.DESCRIPTOR, pb.Stopping.DESCRIPTOR.fields_by_name, "stopping."),
)
CHAT = (
    *_BOTH,
    Field("max_completion_tokens", "stopping.max_tokens", LENGTH),
    Field("top_logprobs", "sampling.logprobs", INTEGER),
)
RESPONSE = (
    *(row for row in _BOTH if row.name not in ("n", "max_tokens")),
    Field("max_output_tokens", "stopping.max_tokens", INTEGER),
    Field("top_logprobs", "sampling.logprobs", INTEGER),
)
COMPLETION = (
    *_BOTH,
    *_rows(pb.Sampling.DESCRIPTOR, ("logprobs", "prompt_logprobs"), "sampling."),
    *_rows(pb.GenerateRequest.DESCRIPTOR, ("echo", "suffix")),
)
EMBEDDING = (
    *_rows(pb.EmbedRequest.DESCRIPTOR, ("model", "request_id", "priority", "slo_class", "dimensions", "normalize")),
    Field("pooling", "pooling", POOLING),
)
RERANK = _rows(pb.ScoreRequest.DESCRIPTOR, ("model", "request_id", "priority", "slo_class", "query", "instruction"))
COHERE_RERANK = tuple(row for row in RERANK if row.name != "priority")  # there a lower one is first
# Constraints on the answer, of which a request has one: OpenAI's response_format, and text.format of a response,
# Anthropic's output_config, then vLLM's structured_outputs.
FORMAT_TYPES = ("text", "json_object", "json_schema")
FORMATS = (
    Field("response_format.type", "constraint.json_object", TRUE),  # if it is json_object
    Field("response_format.json_schema.schema", "constraint.json_schema", JSON_SCHEMA),
    Field("response_format.schema", "constraint.json_schema", JSON_SCHEMA),
    Field("response_format.value", "constraint.json_schema", JSON_SCHEMA),
    Field("text.format.type", "constraint.json_object", TRUE),
    Field("text.format.schema", "constraint.json_schema", JSON_SCHEMA),
    Field("output_config.format.schema", "constraint.json_schema", JSON_SCHEMA),
    Field("output_format.schema", "constraint.json_schema", JSON_SCHEMA),
)
CONSTRAINTS = (
    Field("structured_outputs.json", "constraint.json_schema", JSON_SCHEMA),
    Field("structured_outputs.json_object", "constraint.json_object", TRUE),
    Field("structured_outputs.regex", "constraint.regex", STRING),
    Field("structured_outputs.choice", "constraint.choice.texts", TEXTS),
    Field("structured_outputs.grammar", "constraint.grammar", STRING),
)
# The same as fields at the top of the body: of older vLLM, SGLang and llama.cpp.
BARE_CONSTRAINTS = (
    Field("guided_json", "constraint.json_schema", JSON_SCHEMA),
    Field("guided_regex", "constraint.regex", STRING),
    Field("guided_choice", "constraint.choice.texts", TEXTS),
    Field("guided_grammar", "constraint.grammar", STRING),
    Field("regex", "constraint.regex", STRING),
    Field("ebnf", "constraint.grammar", STRING),
    Field("json_schema", "constraint.json_schema", JSON_SCHEMA),
    Field("grammar", "constraint.grammar", STRING),
)
_EFFORT_OF_OPENROUTER = ReasoningOption("reasoning.effort", EFFORT, "effort")
EFFORT_OF_RESPONSE = (_EFFORT_OF_OPENROUTER,)
REASONING_OPTIONS = (
    ReasoningOption("reasoning_effort", EFFORT, "effort"),
    # of DashScope and SiliconFlow
    ReasoningOption("enable_thinking", BOOLEAN, "thinks"),
    ReasoningOption("preserve_thinking", BOOLEAN, "keeps"),
    ReasoningOption("thinking_budget", INTEGER),
    # of DeepSeek, Z.ai, Moonshot and MiniMax
    ReasoningOption("thinking.type", THINKING_TYPE, "thinks"),
    ReasoningOption("thinking.effort", EFFORT, "effort"),
    ReasoningOption("thinking.keep", ALL, "keeps"),
    ReasoningOption("thinking.clear_thinking", BOOLEAN._replace(read=lambda value: not BOOLEAN.read(value)), "keeps"),
    ReasoningOption("thinking.budget_tokens", INTEGER),
    # of OpenRouter
    _EFFORT_OF_OPENROUTER,
    ReasoningOption("reasoning.enabled", BOOLEAN, "thinks"),
    ReasoningOption("reasoning.max_tokens", INTEGER._replace(read=lambda value: INTEGER.read(value) > 0), "thinks"),
    ReasoningOption("reasoning.exclude", BOOLEAN),
    ReasoningOption("reasoning.summary", SUMMARY),
)
# Fields that are ignored: they are for the sender itself, or hints for a cache that needs none.
NOTES: Mapping[str, ValueKind] = {
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), STRING),
    "metadata": METADATA,
    "prompt_cache_options": OBJECT,
}
# Fields that are accepted with these values, which ask for what is done in any case.
_TIERS = ("auto", "default", "flex", "scale", "priority")  # there is one tier
_STORE = (False, True)  # nothing is stored, as a response says; true is the default of the Responses API
_NEUTRAL = {
    "service_tier": _TIERS,
    "store": _STORE,
    "best_of": (1,),
    # Of vLLM, whose clients may send all parameters.
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "bad_words": ([],),
    # Of SGLang, and of llama.cpp.
    "no_stop_trim": (False,),
    "cache_prompt": (True,),
}
CHAT_NEUTRAL: Mapping[str, tuple] = {
    **_NEUTRAL,
    "modalities": (["text"],),
    "echo": (False,),
    "add_special_tokens": (False,),  # the template writes them
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek", "parsed"),  # llama.cpp's two names for it, and Groq's
}
RESPONSE_NEUTRAL: Mapping[str, tuple] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": _TIERS,
    "store": _STORE,
    "truncation": ("disabled",),
}
STRUCTURED_NEUTRAL: Mapping[str, tuple] = {  # of structured_outputs, as there is one backend
    "disable_fallback": (False, True),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}
INPUT_NEUTRAL = {name: RESPONSE_NEUTRAL[name] for name in ("conversation", "previous_response_id", "truncation")}
TOKENIZE_NEUTRAL: Mapping[str, tuple] = {"return_token_strs": (False,)}
COMPLETION_NEUTRAL: Mapping[str, tuple] = {**_NEUTRAL, "add_special_tokens": (True,)}
