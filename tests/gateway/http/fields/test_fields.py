"""The table, both ways: a value lands in its field of baton.v1 and in no other, and what is wrong with that field is
told in the client's own word for it."""

import subprocess
import sys
from functools import partial

import pytest

from baton.service import errors
from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.attempts.retry_throttle import poison_error
from gateway.config.served_model import RequestLimits
from gateway.http.anthropic.request import MESSAGES, MESSAGES_NEUTRAL, read_count_tokens, read_messages
from gateway.http.fields.body import parse
from gateway.http.fields.tables import (
    CHAT,
    CHAT_NEUTRAL,
    COHERE_RERANK,
    COMPLETION,
    COMPLETION_NEUTRAL,
    EMBEDDING,
    RERANK,
    RESPONSE,
    RESPONSE_NEUTRAL,
    Field,
)
from gateway.http.openai.embeddings import read_cohere_rerank, read_embeddings, read_rerank
from gateway.http.openai.requests import read_chat, read_completion, read_detokenize, read_tokenize
from gateway.http.openapi import document
from gateway.http.responses.request import LOGPROBS, read_input_tokens, read_response
from gateway.http.wire.errors import rename, status_of, to_json
from gateway.request.messages import check_conversation
from gateway.request.validation import validate
from tests.support.gateway.served import SERVED
from tests.support.pace import patience

VALUES = {
    "true or false": (True, True),
    "a number": (0.5, 0.5),
    "an integer, 0 to 4294967295": (3, 3),
    "an integer, 0 to 4294967295; -1: to the end": (3, 3),
    "an integer of 64 bits": (-1, (1 << 64) - 1),
    "an integer": (-2, -2),
    "a string": ("word", "word"),
    "a string, or a list of strings": ("end", ["end"]),
    "a list of token ids": ([4, 5], [4, 5]),
    "an integer; 0 and -1: off": (-1, 0),
    "one of last, mean, cls": ("mean", 2),
    "an object of numbers by token id": ({"7": -1.5}, {7: -1.5}),
}
READERS = {
    "chat": (read_chat, {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
    "completion": (read_completion, {"prompt": "hi", "max_tokens": 1}),
    "response": (read_response, {"input": "hi", "include": [LOGPROBS]}),
    "messages": (read_messages, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
}
OF_PATHS = {
    "/v1/chat/completions": READERS["chat"],
    "/v1/completions": READERS["completion"],
    "/v1/rerank": (read_rerank, {"query": "a", "documents": ["b"]}),
    "/v2/rerank": (read_cohere_rerank, {"query": "a", "documents": ["b"]}),
    "/v1/embeddings": (read_embeddings, {"input": "hi"}),
    "/v1/responses": READERS["response"],
    "/v1/messages": READERS["messages"],
    "/v1/messages/count_tokens": (read_count_tokens, {"messages": READERS["messages"][1]["messages"]}),
}
REQUIRED = {("messages", "max_tokens"): {"max_tokens": 1}}  # nothing is read without it
OBJECTS = (
    "metadata", "client_metadata", "cache_control", "context_management", "chat_template_kwargs", "prompt_cache_options",
    "prediction", "guided_json", "json_schema",
)  # fmt: skip
TABLES = {"chat": CHAT, "completion": COMPLETION, "response": RESPONSE, "messages": MESSAGES}
ROWS = [(door, row) for door, table in TABLES.items() for row in table]
TOO_LONG = {
    "stopping.stop": [0] * 17,
    "stopping.stop_token_ids": [""] * 1025,
    "sampling.logit_bias": dict.fromkeys(range(1025), ""),
}


def anthropic_blocks(role: str, **block) -> dict:
    return {"messages": [{"role": role, "content": [block]}], "max_tokens": 1}


def at(message, path: str):
    for name in path.split("."):
        message = getattr(message, name)
    return message


def leaves(message, before: str = "") -> set[str]:
    found = set()
    for descriptor, value in message.ListFields():
        is_message = descriptor.message_type is not None and not descriptor.message_type.GetOptions().map_entry
        found |= leaves(value, f"{before}{descriptor.name}.") if is_message else {before + descriptor.name}
    return found


@pytest.mark.parametrize("door, row", ROWS, ids=lambda each: each.name if isinstance(each, Field) else each)
def test_each_field_lands_in_its_own_and_is_told_by_its_own_word(door, row):
    read, body = READERS[door]
    given, wanted = VALUES[row.kind.description]
    body = {name: value for name, value in body.items() if name != row.name}
    asked, plain = read({**body, row.name: given}), read({**body, **REQUIRED.get((door, row.name), {})})
    found = at(asked.requests[0], row.path)
    assert (dict(found) if isinstance(wanted, dict) else list(found) if isinstance(wanted, list) else found) == wanted
    added = leaves_of(asked) - leaves_of(plain)
    assert added <= {row.path} and row.path in leaves_of(asked)
    assert rename(row.path, asked.names) == row.name
    told = to_json(InvalidRequest(row.path, "must not"), asked.names)["error"]
    assert (told["param"], told["message"]) == (row.name, f"{row.name}: must not")


def leaves_of(asked) -> set[str]:
    request = pb.GenerateRequest()
    request.CopyFrom(asked.requests[0])
    request.ClearField("messages")
    return leaves(request)


@pytest.mark.parametrize("door, row", ROWS, ids=lambda each: each.name if isinstance(each, Field) else each)
@pytest.mark.parametrize("wrong", [{"a": 1}, [None], "\ud800", -(1 << 70)], ids=str)
def test_a_value_of_another_form_names_its_field(door, row, wrong):
    read, body = READERS[door]
    if row.kind.description == "a number" and isinstance(wrong, int):
        wrong = True  # no number; each other one is for the field's own range to refuse
    with pytest.raises(InvalidRequest) as caught:
        read({**body, row.name: wrong})
    assert caught.value.field == row.name and row.kind.description in caught.value.message


@pytest.mark.parametrize(
    "read, body, field",
    [
        (read_chat, {}, "messages"),
        (read_chat, {"messages": []}, "messages"),
        (read_chat, {"messages": ["hi"]}, "messages[0]"),
        (read_chat, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (read_chat, {"messages": [{"content": "hi"}]}, "messages[0].role"),
        (
            read_chat,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "video": "a"}]}]},
            "messages[0].content[0].video",
        ),
        (read_chat, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        (read_chat, {"messages": [{"role": "user", "content": "", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        (read_chat, {"messages": [{"role": "tool", "content": "", "name": 7}]}, "messages[0].name"),
        (
            read_chat,
            {"messages": [{"role": "assistant", "content": "", "reasoning_content": "\ud83d"}]},
            "messages[0].reasoning_content",
        ),
        (read_chat, {"messages": [{"role": "assistant", "content": "", "reasoning": 7}]}, "messages[0].reasoning"),
        (read_chat, {**READERS["chat"][1], "metadata": {"a": 1}}, "metadata"),
        (read_chat, {**READERS["chat"][1], "service_tier": "gold"}, "service_tier"),
        (read_chat, {**READERS["chat"][1], "seed": 1 << 64}, "seed"),
        (read_chat, {**READERS["chat"][1], "seed": -(1 << 63) - 1}, "seed"),
        (read_chat, {"messages": [{"role": "user", "content": "", "tool_calls": 1}]}, "messages[0].tool_calls"),
        (read_chat, {**READERS["chat"][1], "tools": [{"type": "function"}]}, "tools[0].function"),
        (read_chat, {**READERS["chat"][1], "tools": [{"type": "custom"}]}, "tools[0].type"),
        (read_chat, {**READERS["chat"][1], "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (read_chat, {**READERS["chat"][1], "chat_template_kwargs": []}, "chat_template_kwargs"),
        (read_chat, {**READERS["chat"][1], "continue_final_message": 1}, "continue_final_message"),
        (read_chat, {**READERS["chat"][1], "add_generation_prompt": False}, "add_generation_prompt"),
        (read_chat, {**READERS["chat"][1], "temprature": 1}, "temprature"),
        (read_chat, {**READERS["chat"][1], "logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        (read_chat, {**READERS["chat"][1], "max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        (read_chat, {**READERS["chat"][1], "stream_options": {"include_usage": True}}, "stream_options"),
        (read_chat, {**READERS["chat"][1], "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (read_completion, {}, "prompt"),
        (read_completion, {"prompt": []}, "prompt"),
        (read_completion, {"prompt": 7}, "prompt"),
        (read_completion, {"prompt": [[]]}, "prompt[0]"),
        (read_completion, {"prompt": [[-1]]}, "prompt[0]"),
        (read_completion, {"prompt": ["a"] * 129}, "prompt"),
        (read_completion, {"prompt": "a", "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        (read_completion, {"prompt": "a", "echo": 1}, "echo"),
        (read_chat, {**READERS["chat"][1], "echo": True}, "echo"),
        (read_chat, {**READERS["chat"][1], "prompt_logprobs": 1}, "prompt_logprobs"),
        (read_response, {"input": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
        (read_messages, {**READERS["messages"][1], "echo": True}, "echo"),
        (read_completion, {"prompt": "a", "best_of": 2}, "best_of"),
        (read_completion, {"prompt": "a", "best_of": True}, "best_of"),
        (read_messages, {}, "messages"),
        (read_messages, {"messages": READERS["messages"][1]["messages"]}, "max_tokens"),
        (read_messages, {**READERS["messages"][1], "messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        (read_messages, {**READERS["messages"][1], "messages": [{"role": "assistant", "content": "a"}]}, "messages"),
        (read_messages, {**READERS["messages"][1], "system": 7}, "system"),
        (read_messages, {**READERS["messages"][1], "system": [{"type": "image"}]}, "system[0]"),
        (read_messages, {**READERS["messages"][1], "metadata": "me"}, "metadata"),
        (read_messages, {**READERS["messages"][1], "cache_control": True}, "cache_control"),
        (read_messages, {**READERS["messages"][1], "thinking": {"type": "always"}}, "thinking"),
        (read_messages, {**READERS["messages"][1], "n": 2}, "n"),
        (
            read_messages,
            {**READERS["messages"][1], "tools": [{"name": "f", "input_schema": 7}]},
            "tools[0].input_schema",
        ),
        (
            read_messages,
            {**READERS["messages"][1], "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
            "tools[0].type",
        ),
        (read_messages, {**READERS["messages"][1], "tools": [{"name": "f", "strict": "yes"}]}, "tools[0].strict"),
        (read_messages, {**READERS["messages"][1], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        (read_messages, {**READERS["messages"][1], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (read_messages, {**READERS["messages"][1], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name"),
        (
            read_messages,
            anthropic_blocks("user", type="tool_use", id="a", name="f", input={}),
            "messages[0].content[0]",
        ),
        (read_messages, anthropic_blocks("assistant", type="tool_result"), "messages[0].content[0]"),
        (read_messages, anthropic_blocks("user", type="tool_result"), "messages[0].content[0].tool_use_id"),
        (
            read_messages,
            anthropic_blocks("assistant", type="tool_use", id="a", name="f"),
            "messages[0].content[0].input",
        ),
        (
            read_messages,
            anthropic_blocks("user", type="tool_result", tool_use_id="a", content=[{"type": "image"}]),
            "messages[0].content[0].content[0]",
        ),
        (
            read_messages,
            {**READERS["messages"][1], "thinking": {"type": "enabled", "display": "all"}},
            "thinking.display",
        ),
        (read_messages, anthropic_blocks("user", type="document"), "messages[0].content[0].source"),
        (
            read_messages,
            anthropic_blocks("user", type="document", source={"type": "base64", "data": ""}),
            "messages[0].content[0].source",
        ),
        (
            read_messages,
            anthropic_blocks("user", type="document", source={"type": "text", "data": 7}),
            "messages[0].content[0].source.data",
        ),
        (
            read_messages,
            anthropic_blocks("user", type="document", source={"type": "content", "content": [{"type": "image"}]}),
            "messages[0].content[0].source.content[0]",
        ),
        (
            read_messages,
            anthropic_blocks("user", type="document", source={"type": "text", "data": ""}, citations={"enabled": True}),
            "messages[0].content[0].citations",
        ),
        (read_count_tokens, READERS["messages"][1], "max_tokens"),
        (read_messages, {**READERS["messages"][1], "messages": [7] * 1025}, "messages"),
        (read_messages, {**READERS["messages"][1], "tools": [7] * 129}, "tools"),
        (read_chat, {"messages": [7] * 1025}, "messages"),
        (read_chat, {**READERS["chat"][1], "tools": [7] * 129}, "tools"),
        (read_chat, {"messages": [{"role": "assistant", "tool_calls": [7] * 129}]}, "messages[0].tool_calls"),
        (read_response, {"input": [7] * 4097}, "input"),
        (read_response, {"input": "a", "tools": [7] * 129}, "tools"),
        (read_response, {}, "input"),
        (read_response, {"input": []}, "input"),
        (read_response, {"input": 7}, "input"),
        (read_response, {"input": ["hi"]}, "input[0]"),
        (read_response, {"input": [{"type": "web_search_call"}]}, "input[0].type"),
        (read_response, {"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        (read_response, {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        (read_response, {"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            read_response,
            {"input": "a", "tools": [{"type": "function", "name": "f", "strict": "yes"}]},
            "tools[0].strict",
        ),
        (read_response, {"input": "a", "tool_choice": {"type": "function"}}, "tool_choice.name"),
        (read_response, {"input": "a", "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function"),
        (read_response, {"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        (read_response, {"input": [{"role": "user", "content": "a", "name": "me"}]}, "input[0].name"),
        (read_response, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        (read_response, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        (read_response, {"input": "a", "store": "yes"}, "store"),
        (read_response, {"input": "a", "store": 1}, "store"),
        (read_response, {"input": "a", "background": True}, "background"),
        (read_response, {"input": "a", "text": {"verbosity": "terse"}}, "text.verbosity"),
        (read_response, {"input": "a", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
        (read_response, {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (read_response, {"input": "a", "text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        (read_response, {"input": "a", "include": ["file_search_call.results"]}, "include[0]"),
        (read_response, {"input": "a", "reasoning": {"effort": "much"}}, "reasoning.effort"),
        (read_response, {"input": "a", "reasoning": {"summary": True}}, "reasoning.summary"),
        (read_response, {"input": "a", "reasoning": {"mode": "pro"}}, "reasoning.mode"),
        (read_response, {"input": "a", "reasoning": "low"}, "reasoning"),
        (read_chat, {**READERS["chat"][1], "reasoning_effort": "much"}, "reasoning_effort"),
        (read_input_tokens, {"input": "a", "max_output_tokens": 1}, "max_output_tokens"),
        (read_input_tokens, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        (read_input_tokens, {"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        (read_input_tokens, {}, "input"),
        (read_response, {"input": "a", "top_logprobs": 2}, "top_logprobs"),
        (read_response, {"input": "a", "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        (read_response, {"input": "a", "n": 2}, "n"),
        (read_tokenize, {}, "prompt"),
        (read_tokenize, {"prompt": "a", "messages": READERS["chat"][1]["messages"]}, "prompt"),
        (read_embeddings, {}, "input"),
        (read_embeddings, {"input": []}, "input"),
        (read_embeddings, {"input": ["a"] * 2049}, "input"),
        (read_embeddings, {"input": ["a", 7]}, "input[1]"),
        (read_embeddings, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        (read_embeddings, {"input": "a", "pooling": "max"}, "pooling"),
        (read_embeddings, {"input": "a", "temperature": 0}, "temperature"),
        (read_rerank, {"query": "a"}, "documents"),
        (read_rerank, {"query": "a", "documents": "b"}, "documents"),
        (read_rerank, {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        (read_rerank, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        (read_rerank, {"query": "a", "documents": ["b"], "return_documents": 1}, "return_documents"),
        (read_rerank, {"query": 7, "documents": ["b"]}, "query"),
        (read_rerank, {"query": "a", "documents": ["b"], "rank_fields": []}, "rank_fields"),
        (read_cohere_rerank, {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        (read_cohere_rerank, {"query": "a", "documents": ["b"], "return_documents": 1}, "return_documents"),
        (read_cohere_rerank, {"query": "a", "documents": ["b"], "priority": 1}, "priority"),
        (read_detokenize, {"tokens": "a"}, "tokens"),
        (read_detokenize, {"tokens": [1 << 40]}, "tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(read, body, field):
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"\xff", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"],
    ids=range(8),
)
def test_what_is_no_json_is_the_sender_s_fault(body):
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    assert caught.value.field == "body" and len(caught.value.message) < 300


@pytest.mark.parametrize("door", ["chat", "completion"])
@pytest.mark.parametrize("endless", [-1, -1.0])
def test_a_length_of_minus_1_is_none(door, endless):
    read, body = READERS[door]
    assert not read({**body, "max_tokens": endless}).requests[0].stopping.HasField("max_tokens")
    with pytest.raises(InvalidRequest) as caught:
        read({**body, "max_tokens": -2})
    assert caught.value.field == "max_tokens"


def test_either_name_of_a_length_may_say_that_there_is_none():
    body = READERS["chat"][1]
    assert not read_chat({**body, "max_completion_tokens": -1}).requests[0].stopping.HasField("max_tokens")
    assert read_chat({**body, "max_completion_tokens": 5, "max_tokens": -1}).requests[0].stopping.max_tokens == 5
    assert read_completion({"prompt": "a"}).requests[0].stopping.max_tokens == 16


def test_what_is_echoed_has_logprobs_where_the_answer_has_them():
    (request,) = read_completion({"prompt": "a", "echo": True, "logprobs": 2}).requests
    assert request.echo and (request.sampling.logprobs, request.sampling.prompt_logprobs) == (2, 2)
    (request,) = read_completion({"prompt": "a", "logprobs": 2}).requests
    assert not request.sampling.HasField("prompt_logprobs")
    asked = read_completion({"prompt": "a", "echo": True, "logprobs": 99})
    assert rename("sampling.prompt_logprobs", asked.names) == "logprobs"


@pytest.mark.parametrize("row", EMBEDDING, ids=lambda row: row.name)
def test_each_field_of_an_embedding_lands_in_its_own(row):
    given, wanted = VALUES[row.kind.description]
    asked, plain = read_embeddings({"input": "hi", row.name: given}), read_embeddings({"input": "hi"})
    assert at(asked.requests[0], row.path) == wanted and rename(row.path, asked.names[0]) == row.name
    del plain.requests[0].inputs[:]
    asked.requests[0].inputs.clear()
    assert leaves(asked.requests[0]) - leaves(plain.requests[0]) == {row.path}
    for wrong in ({"a": 1}, [None], "\ud800"):
        with pytest.raises(InvalidRequest) as caught:
            read_embeddings({"input": "hi", row.name: wrong})
        assert caught.value.field == row.name and row.kind.description in caught.value.message


def test_inputs_of_an_embedding_of_every_form():
    for given, texts, ids in (
        ("a", ["a"], []), (["a", "b"], ["a", "b"], []), ([4, 5], [], [[4, 5]]), ([[4], [5]], [], [[4], [5]]),
    ):  # fmt: skip
        asked = read_embeddings({"input": given, "user": "me"})
        assert [each.text for each in asked.requests[0].inputs if each.text] == texts
        assert [list(each.token_ids.ids) for each in asked.requests[0].inputs if each.HasField("token_ids")] == ids
    assert rename("inputs[1].text", asked.names[0]) == "input[1].text"


def test_texts_beyond_one_request_are_in_others_with_ids_of_their_own():
    asked = read_embeddings({"input": ["a"] * 300, "request_id": "x", "dimensions": 3})
    assert [len(each.inputs) for each in asked.requests] == [128, 128, 44]
    assert [(each.request_id, each.dimensions) for each in asked.requests] == [("x-0", 3), ("x-1", 3), ("x-2", 3)]
    assert rename("inputs[43].text", asked.names[2]) == "input[299].text"


@pytest.mark.parametrize("row", RERANK, ids=lambda row: row.name)
def test_each_field_of_a_rerank_lands_in_its_own(row):
    given, wanted = VALUES[row.kind.description]
    body = {"documents": ["a", "b"]}
    asked, plain = read_rerank({**body, row.name: given}), read_rerank(body)
    assert at(asked.request, row.path) == wanted and rename(row.path, asked.names) == row.name
    assert leaves(asked.request) - leaves(plain.request) == {row.path}


@pytest.mark.parametrize("door", ["chat", "completion", "response"])
@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("user", "note"),
        ("safety_identifier", "note"),
        ("prompt_cache_key", "note"),
        ("prompt_cache_retention", "24h"),
        ("prompt_cache_options", {"mode": "implicit"}),
        ("metadata", {"trace": "7"}),
        ("store", True),
        ("store", False),
        ("service_tier", "flex"),
        ("service_tier", "priority"),
    ],
)
def test_notes_of_the_sender_change_nothing(door, name, note):
    read, body = READERS[door]
    body = {**body, "seed": 1, "request_id": "r"}
    assert read({**body, name: note}).requests == read(body).requests
    with pytest.raises(InvalidRequest, match=name):
        read({**body, name: 3})


ANYWAY = {
    "include_stop_str_in_output": False, "spaces_between_special_tokens": True, "skip_special_tokens": True, "use_beam_search": False,
    "length_penalty": 1.0, "early_stopping": False, "bad_words": [], "best_of": 1, "echo": False, "no_stop_trim": False,
    "cache_prompt": True, "service_tier": "scale", "n": 1, "min_tokens": 0,
}  # fmt: skip
ANYWAY_IN_CHAT = {
    "add_special_tokens": False, "include_reasoning": True, "separate_reasoning": True, "stream_reasoning": True,
    "reasoning_format": "deepseek", "logprobs": False, "top_logprobs": 0,
}  # fmt: skip


@pytest.mark.parametrize(("door", "more"), [("chat", ANYWAY_IN_CHAT), ("completion", {"add_special_tokens": True})])
def test_what_asks_for_what_is_done_anyway_is_taken(door, more):
    read, body = READERS[door]
    body = {name: value for name, value in body.items() if name != "logprobs"}
    told, plain = read({**body, **ANYWAY, **more}).requests[0], read(body).requests[0]
    validated, bare = (validate(each, SERVED) for each in (told, plain))
    assert (validated.num_logprobs, validated.num_choices, validated.min_tokens, validated.echo) == (0, 1, 0, False)
    assert validated.prompt == bare.prompt


@pytest.mark.parametrize(
    ("door", "name", "other"),
    [
        ("chat", "include_stop_str_in_output", True), ("chat", "spaces_between_special_tokens", False), ("chat", "use_beam_search", True),
        ("chat", "length_penalty", 1.2), ("chat", "length_penalty", True), ("chat", "early_stopping", 0), ("chat", "bad_words", ["no"]),
        ("chat", "best_of", 2), ("chat", "add_special_tokens", True), ("completion", "add_special_tokens", False),
        ("chat", "separate_reasoning", False), ("chat", "stream_reasoning", False), ("chat", "no_stop_trim", True),
        ("chat", "cache_prompt", False), ("chat", "reasoning_format", "none"), ("completion", "separate_reasoning", True),
    ],
)  # fmt: skip
def test_what_asks_for_something_else_is_refused(door, name, other):
    read, body = READERS[door]
    with pytest.raises(InvalidRequest) as caught:
        read({**body, name: other})
    assert caught.value.field == name


def test_what_is_predicted_of_an_answer_changes_nothing():
    body = {**READERS["chat"][1], "seed": 1, "request_id": "r"}
    given = {"prediction": {"type": "content", "content": "hi"}}
    assert read_chat({**body, **given}).requests == read_chat(body).requests
    with pytest.raises(InvalidRequest, match="prediction"):
        read_completion({"prompt": "hi", **given})


@pytest.mark.parametrize(
    ("given", "wanted"), [(-1, (1 << 64) - 1), (-(1 << 63), 1 << 63), (0, 0), ((1 << 64) - 1,) * 2]
)
def test_each_seed_of_64_bits_is_one(given, wanted):
    assert read_chat({**READERS["chat"][1], "seed": given}).requests[0].sampling.seed == wanted


@pytest.mark.parametrize("num_chars", [1, 61, 62, 63, 64])
def test_each_of_several_prompts_has_an_id_of_its_own_that_is_one(num_chars):
    for num_prompts in (2, 128):
        request_id = "x" * num_chars
        asked, again, other = (
            read_completion({"prompt": ["a"] * num_prompts, "request_id": each, "max_tokens": 1})
            for each in (request_id, request_id, f"{request_id[:-1]}y")
        )
        ids = [[validate(request, SERVED).request_id for request in each.requests] for each in (asked, again, other)]
        assert ids[0] == ids[1] and len({*ids[0], *ids[2]}) == 2 * num_prompts
        assert asked.id == f"cmpl-{request_id}"


@pytest.mark.parametrize("request_id", ["x" * 65, "x" * 62 + "!"])
def test_an_id_that_is_none_is_refused_with_several_prompts_too(request_id):
    asked = read_completion({"prompt": ["a", "b"], "request_id": request_id})
    with pytest.raises(InvalidRequest, match="request_id"):
        validate(asked.requests[0], SERVED)


@pytest.mark.parametrize("door, more", [("response", {"text": {"verbosity": "low"}}), ("chat", {"verbosity": "high"})])
def test_how_wordy_an_answer_should_be_changes_nothing(door, more):
    read, body = READERS[door]
    (told,), (plain,) = read({**body, **more}).requests, read(body).requests
    told.request_id = plain.request_id
    assert told == plain


def test_null_is_as_if_it_were_left_out():
    assert read_chat(parse(b'{"messages": [{"role": "user", "content": "hi"}], "stop": null, "tools": null}')).requests


@pytest.mark.parametrize(
    "door, more",
    [
        ("chat", {"stream": True, "stream_options": {"include_usage": None, "chunk": None}}),
        ("chat", {"stream_options": {"include_usage": None}}),
        ("response", {"reasoning": {"effort": None, "summary": None}}),
        ("response", {"input": [{"type": None, "role": "user", "content": "hi", "name": None}]}),
        ("messages", {"messages": [{"role": "user", "content": "hi", "name": None}]}),
    ],
)
def test_null_within_an_object_is_as_if_it_were_left_out(door, more):
    read, body = READERS[door]
    (told,), (plain,) = read({**body, **more}).requests, read(body).requests
    told.request_id = plain.request_id
    assert told == plain and not read({**body, **more}).include_usage


def test_the_document_has_every_field_and_no_other():
    paths = document()["paths"]
    for path, table, neutral in (
        ("/v1/chat/completions", CHAT, CHAT_NEUTRAL),
        ("/v1/completions", COMPLETION, COMPLETION_NEUTRAL),
        ("/v1/embeddings", EMBEDDING, {}),
        ("/v1/rerank", RERANK, {}),
        ("/v2/rerank", COHERE_RERANK, {}),
        ("/v1/responses", RESPONSE, RESPONSE_NEUTRAL),
        ("/v1/messages", MESSAGES, MESSAGES_NEUTRAL),
        ("/v1/messages/count_tokens", (), {}),
    ):
        read, given = OF_PATHS[path]
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert {row.name for row in table} | neutral.keys() <= body.keys()
        for name in body:
            with pytest.raises(InvalidRequest) as caught:
                read({**given, name: {"no": "such value"} if name not in OBJECTS else 7})
            assert caught.value.field.startswith(name)


def test_only_what_is_our_own_fault_is_500():
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.BatonError)]
    ours = {errors.BatonError, errors.Internal, errors.DataLoss}
    of_fields = dict.fromkeys((InvalidRequest, errors.ContextLengthExceeded), ("field", "why"))
    more = of_fields | {errors.Overloaded: ("why", 1.0)}
    told = [kind(*more.get(kind, ("why",))) for kind in set(kinds) - ours]
    told += [poison_error("workers died of it")]
    documented = document()["paths"]["/v1/completions"]["post"]["responses"].keys()
    assert len(told) > 9
    for error in told:
        assert status_of(error) < 500 or error.code.name in ("UNAVAILABLE", "DEADLINE_EXCEEDED"), error
        assert str(status_of(error)) in documented or isinstance(error, errors.Cancelled), error


def num_calls(work) -> int:
    """Return how many calls of Python's own functions it takes, which is what its time depends on."""
    found = 0

    def note(frame, event, argument) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_large_bodies_are_read_in_few_steps():
    """Some took 0.3 s of the event loop."""
    ids, wide = [7] * 50_000, {f"k{index}": "a" for index in range(20_000)}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert num_calls(lambda: read_completion({"prompt": ids})) < 1000
    assert num_calls(lambda: read_completion({"prompt": [ids[:5000]] * 10})) < 1000
    assert num_calls(lambda: read_embeddings({"input": [ids[:5000]] * 10})) < 1000
    assert num_calls(lambda: read_detokenize({"tokens": ids})) < 1000
    (request,) = read_chat({**chat, "chat_template_kwargs": wide}).requests
    assert request.messages.chat_template_kwargs.count('"a"') == 20_000
    tool = {"type": "function", "function": {"name": "f", "parameters": wide}}
    (request,) = read_chat({**chat, "tools": [tool]}).requests
    conversation = check_conversation(request.messages, RequestLimits())
    assert num_calls(lambda: conversation.client_texts) < 1000


@pytest.mark.parametrize(
    "door, row", [each for each in ROWS if each[1].path in TOO_LONG], ids=lambda value: getattr(value, "name", value)
)
def test_a_list_that_nobody_may_have_is_refused_before_it_is_read(door, row):
    """What is in these is of no form."""
    read, body = READERS[door]
    with pytest.raises(InvalidRequest, match="at most") as caught:
        read({**body, row.name: TOO_LONG[row.path]})
    assert caught.value.field == row.name


@pytest.mark.parametrize("name", ["guided_choice", "structured_outputs.choice"])
def test_so_is_one_of_texts_to_choose_from(name):
    parent, _, own = name.rpartition(".")
    texts = [0] * 4097
    with pytest.raises(InvalidRequest, match="at most 4096") as caught:
        read_completion({"prompt": "hi", **({parent: {own: texts}} if parent else {own: texts})})
    assert caught.value.field == name


@pytest.mark.parametrize(
    "read, body, field",
    [
        (read_completion, {"prompt": ["a"] * 128, "suffix": "b" * 300_000}, "prompt"),
        (read_completion, {"prompt": ["a"] * 128, "request_id": "b" * 300_000}, "prompt"),
        (partial(read_embeddings, most_inputs=1), {"input": ["a"] * 128, "model": "b" * 300_000}, "input"),
    ],
)
def test_what_prompts_share_is_not_copied_without_end(read, body, field):
    """One body could take 0.8 GB, and the event loop for 2.5 s."""
    with pytest.raises(InvalidRequest, match="send fewer") as caught:
        read(body)
    assert caught.value.field == field
    fewer = {name: value[:8] if isinstance(value, list) else value for name, value in body.items()}
    assert len(read(fewer).requests) == 8


@pytest.mark.parametrize(
    ("role", "block", "said"),
    [
        ("assistant", {"type": "tool_use", "id": "", "name": "", "input": {}}, "128 calls"),
        ("user", {"type": "tool_result", "tool_use_id": ""}, "1024 messages"),
    ],
)
def test_blocks_beyond_what_a_conversation_may_have_are_not_read(role, block, said):
    """20,000 took 0.15 s of the event loop before they were refused."""
    body = {"messages": [{"role": role, "content": [block] * 20_000}], "max_tokens": 1}

    def read() -> None:
        with pytest.raises(InvalidRequest, match=said) as caught:
            read_messages(body)
        assert (caught.value.field or "").startswith("messages")

    assert num_calls(read) < 50_000


def test_ids_are_integers_all_of_them():
    assert list(read_completion({"prompt": [1, 2.0, 3]}).requests[0].token_ids.ids) == [1, 2, 3]
    for wrong in ([1, True], [1, 2.5], [1, "2"]):
        with pytest.raises(InvalidRequest, match="token ids"):
            read_completion({"prompt": wrong})


def test_many_small_blocks_take_their_own_bytes():
    """Anthropic's are one text, which protobuf would keep at every length that it had."""
    program = (
        "import re; from gateway.http.anthropic.request import read_messages\n"
        "blocks = [{'type': 'text', 'text': 'abcd'}] * 20_000\n"
        "asked = read_messages({'messages': [{'role': 'user', 'content': blocks}], 'max_tokens': 1})\n"
        "most = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(len(asked.requests[0].messages.messages[0].content), most)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(60))
    assert ran.returncode == 0, ran.stderr
    length, most_kib = map(int, ran.stdout.split())
    assert length == 80_000 and most_kib < 300 << 10
