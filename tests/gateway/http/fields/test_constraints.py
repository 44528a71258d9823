"""Answers with a shape over HTTP, asked for with OpenAI's own client: each form is the constraint that gRPC has."""

import json

import openai
import pytest
from pydantic import BaseModel

from baton.constraints.gbnf import in_lark
from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.anthropic.request import read_messages
from gateway.http.fields.body import parse
from gateway.http.fields.tables import BARE_CONSTRAINTS, CONSTRAINTS, FORMATS
from gateway.http.openai.requests import read_chat, read_completion
from gateway.http.responses.request import read_response
from gateway.http.wire.errors import rename
from gateway.text import constraint_checks
from tests.support.pace import patience

ASK = {"model": "fake", "messages": [{"role": "user", "content": "the quick"}], "max_completion_tokens": 4}
PLAIN = {"messages": ASK["messages"]}
SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
# The row's word -> the body's field, and the constraint that it is.
FORMS = {
    "response_format.type": ({"response_format": {"type": "json_object"}}, pb.Constraint(json_object=True)),
    "response_format.json_schema.schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        pb.Constraint(json_schema=json.dumps(SCHEMA, ensure_ascii=False)),
    ),
    "response_format.schema": (
        {"response_format": {"type": "json_object", "schema": SCHEMA, "json_schema": None}},
        pb.Constraint(json_schema=json.dumps(SCHEMA, ensure_ascii=False)),
    ),
    "response_format.value": (
        {"response_format": {"type": "json_object", "value": SCHEMA}},
        pb.Constraint(json_schema=json.dumps(SCHEMA, ensure_ascii=False)),
    ),
    "text.format.type": ({"text": {"format": {"type": "json_object"}}}, pb.Constraint(json_object=True)),
    "text.format.schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}}},
        pb.Constraint(json_schema=json.dumps(SCHEMA, ensure_ascii=False)),
    ),
    "output_config.format.schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        pb.Constraint(json_schema=json.dumps(SCHEMA, ensure_ascii=False)),
    ),
    "output_format.schema": (
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        pb.Constraint(json_schema=json.dumps(SCHEMA, ensure_ascii=False)),
    ),
    "structured_outputs.json": (
        {"structured_outputs": {"json": SCHEMA}}, pb.Constraint(json_schema=json.dumps(SCHEMA, ensure_ascii=False))
    ),
    "structured_outputs.json_object": ({"structured_outputs": {"json_object": True}}, pb.Constraint(json_object=True)),
    "structured_outputs.regex": ({"structured_outputs": {"regex": "[a-c]+"}}, pb.Constraint(regex="[a-c]+")),
    "structured_outputs.choice": (
        {"structured_outputs": {"choice": ["yes", "no"]}}, pb.Constraint(choice=pb.TextChoices(texts=["yes", "no"]))
    ),
    "structured_outputs.grammar": (
        {"structured_outputs": {"grammar": 'start: "a"', "regex": None}}, pb.Constraint(grammar='start: "a"')
    ),
    **{
        name: ({name: SCHEMA}, pb.Constraint(json_schema=json.dumps(SCHEMA, ensure_ascii=False)))
        for name in ("guided_json", "json_schema")
    },
    **{name: ({name: "[a-c]+"}, pb.Constraint(regex="[a-c]+")) for name in ("guided_regex", "regex")},
    "guided_choice": ({"guided_choice": ["yes", "no"]}, pb.Constraint(choice=pb.TextChoices(texts=["yes", "no"]))),
    **{
        name: ({name: 'start: "a"', "guided_decoding_backend": "xgrammar"}, pb.Constraint(grammar='start: "a"'))
        for name in ("guided_grammar", "ebnf", "grammar")
    },
}  # fmt: skip


@pytest.mark.parametrize("row", [*FORMATS, *CONSTRAINTS, *BARE_CONSTRAINTS], ids=lambda row: row.name)
def test_each_form_lands_in_the_contract_and_is_told_by_its_own_word(row):
    body, wanted = FORMS[row.name]
    if "text" in body:
        doors = [read_response({"input": "a", **body})]
    elif body.keys() & {"output_config", "output_format"}:
        doors = [read_messages({**PLAIN, "max_tokens": 4, **body})]
    else:
        doors = [read_chat({**PLAIN, **body}), read_completion({"prompt": ["a", "b"], **body})]
    for asked in doors:
        assert all(request.constraint == wanted for request in asked.requests)
        assert rename(row.path, asked.names) == row.name
        assert rename(f"constraint.{wanted.WhichOneof('kind')}", asked.names) == row.name
        assert rename("constraint", asked.names) == row.name.partition(".")[0]


@pytest.mark.parametrize("body", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}], ids=str)
def test_none_is_none(body):
    asked = read_chat({**PLAIN, **parse(json.dumps(body).encode())})
    assert not asked.requests[0].HasField("constraint")


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_may_stand_beside_its_type(kind):
    """As llama.cpp documents it, and clients of Fireworks and Together send it."""
    asked = read_chat({**PLAIN, "response_format": {"type": kind, "schema": SCHEMA}})
    assert json.loads(asked.requests[0].constraint.json_schema) == SCHEMA


def test_a_schema_may_come_as_its_text():
    asked = read_chat({**PLAIN, "structured_outputs": {"json": '{"type": "null"}'}})
    assert asked.requests[0].constraint.json_schema == '{"type": "null"}'


def test_what_turns_nothing_off_may_stand_there():
    """What vLLM calls its fallback there is not."""
    neutral = {"disable_fallback": True, "disable_any_whitespace": False, "disable_additional_properties": False}
    asked = read_chat({**PLAIN, "structured_outputs": {"regex": "[a-c]+", **neutral}})
    assert asked.requests[0].constraint == pb.Constraint(regex="[a-c]+")


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"grammar": 'start: "a"'}, "guided_grammar": 'start: "a"'},
        {"structured_outputs": {"choice": ["a", "b"]}, "guided_choice": ["a", "b"]},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}, "guided_json": SCHEMA, "json_schema": SCHEMA},
    ],
    ids=str,
)
def test_one_may_come_under_several_names(body):
    """As guidance sends each grammar to vLLM: under its old name and its new one."""
    first, *_ = body
    both, one = (read_chat({**PLAIN, **each}) for each in (body, {first: body[first]}))
    assert both.requests[0].constraint == one.requests[0].constraint and both.names == one.names


def test_a_format_of_a_message_has_one_of_its_two_names():
    form = {"type": "json_schema", "schema": SCHEMA}
    for body, field in (
        ({"output_format": {**form, "schema": {}}, "output_config": {"format": form}}, "output_format"),
        ({"output_format": {"type": "json_object"}}, "output_format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            read_messages({**PLAIN, "max_tokens": 4, **body})
        assert caught.value.field == field


@pytest.mark.parametrize(
    "body, field",
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": 7}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
            "response_format.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": {}, "value": {}}}, "response_format.schema"),
        ({"response_format": {"type": "text", "value": {}}}, "response_format.value"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strictly": True}}},
            "response_format.json_schema.strictly",
        ),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["yes", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "\ud800"}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "guided_choice"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"regex": "a", "disable_fallback": 0}}, "structured_outputs.disable_fallback"),
        ({"structured_outputs": {"disable_fallback": True}}, "structured_outputs"),
        ({"grammar": 'start: "a"', "json_schema": {}}, "grammar"),
        ({"guided_json": 7}, "guided_json"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"regex": ["a"]}, "regex"),
        ({"ebnf": 7}, "ebnf"),
        ({"guided_decoding_backend": 7}, "guided_decoding_backend"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(body, field):
    with pytest.raises(InvalidRequest) as caught:
        read_chat({**PLAIN, **body})
    assert caught.value.field == field


class Person(BaseModel):
    name: str
    age: int


async def test_the_client_s_own_helpers_reach_both_workers(served, capable):
    async with served() as (c, client):
        await client.chat.completions.create(
            **ASK, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        )
        await client.chat.completions.create(**ASK, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
        async with client.chat.completions.stream(
            **{**ASK, "max_completion_tokens": openai.NOT_GIVEN}, max_tokens=2, response_format=Person
        ) as stream:
            with pytest.raises(openai.LengthFinishReasonError):  # fake workers keep to nothing: the client sees it cut
                async for _ in stream:
                    pass
        specs = [message.spec for kind, message in c.prefill[0].commands if kind == "prefill"]
        found = [spec.constraint for spec in specs]
        assert [each.WhichOneof("kind") for each in found] == ["json_schema", "choice", "json_schema"]
        assert json.loads(found[0].json_schema) == SCHEMA and list(found[1].choice.texts) == ["yes", "no"]
        assert set(json.loads(found[2].json_schema)["properties"]) == {"name", "age"}
        assert {spec.constraint.WhichOneof("kind") for kind, spec in admitted(c)} == {"json_schema", "choice"}


@pytest.mark.parametrize("name", ["ebnf", "grammar", "guided_grammar", "structured_outputs"])
async def test_a_grammar_in_gbnf_reaches_workers_in_lark(served, capable, name):
    """Workers of an older version know no other."""
    grammar = 'root ::= [a-z]+ "ing"'
    async with served() as (c, client):
        body = {name: grammar if name != "structured_outputs" else {"grammar": grammar}}
        await client.chat.completions.create(**ASK, extra_body=body)
        specs = [message.spec for kind, message in c.prefill[0].commands if kind == "prefill"]
        assert [spec.constraint.grammar for spec in specs] == [in_lark(grammar)] and "::=" not in in_lark(grammar)
        assert [spec.constraint.grammar for _, spec in admitted(c)] == [in_lark(grammar)]


def admitted(c):
    return [(kind, message.spec) for kind, message in c.decode[0].commands if kind == "admit"]


DEEP = {"json": '{"items":' * 10_000 + "{}" + "}" * 10_000}
# Field of the body -> the field that the error names, a word of its message.
BAD = {
    "1 MB": ({"json": {"description": "x" * 1_000_000}}, "json", "bytes"),
    "10,000 deep": (DEEP, "json", "deep"),
    "unknown keyword": ({"json": {"properties": {"a": {"minimun": 1}}}}, "json", "/properties/a/minimun"),
    "nothing satisfies it": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "json", "nsatisfiable"),
    "explodes": ({"regex": "((a{1000}){1000}){1000}"}, "regex", "too much"),
    "left recursion": ({"grammar": 'start: start "a"'}, "grammar", "no text"),
    "GBNF cut off": ({"grammar": 'root ::= "a" b\nb ::= ('}, "grammar", "line 2: a bracket is not closed"),
    "GBNF that nothing satisfies": ({"grammar": 'root ::= root "a"'}, "grammar", "no text"),
    "no choice": ({"choice": []}, "choice", "is empty"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_ones_are_one_clear_400_while_a_stream_goes_on(served, capable, name, monkeypatch):
    monkeypatch.setattr(constraint_checks, "_MAX_WAIT_S", patience(60))  # it has to have its 2 s of a core
    constraint, word, words = BAD[name]
    async with served() as (_, client):
        client = client.with_options(timeout=patience(90))
        stream = await client.chat.completions.create(**{**ASK, "max_completion_tokens": 64}, stream=True)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ASK, extra_body={"structured_outputs": constraint})
        error = caught.value.body
        assert error["param"] == f"structured_outputs.{word}" and words in error["message"]
        assert len(error["message"]) < 500 and "constraint" not in error["message"]
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"


CALLING = {"tools": [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]}
FLAT = {"tools": [{"type": "function", "name": "find", "parameters": SCHEMA}]}
USING = {"tools": [{"name": "find", "input_schema": SCHEMA}]}


@pytest.mark.parametrize(
    "read, body, choice",
    [
        (read_chat, {**PLAIN, **CALLING, **FORMS["response_format.json_schema.schema"][0]}, "required"),
        (read_chat, {**PLAIN, **CALLING, **FORMS["response_format.type"][0]}, {"type": "function", "function": {"name": "find"}}),
        (read_response, {"input": "a", **FLAT, **FORMS["text.format.schema"][0]}, {"type": "function", "name": "find"}),
        (read_messages, {**PLAIN, **USING, "max_tokens": 4, **FORMS["output_config.format.schema"][0]}, {"type": "any"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_format_is_of_text_which_an_answer_that_has_to_be_calls_has_not(read, body, choice):
    """As instructor sends it: a schema for the text, and the tool to call."""
    assert read(body).requests[0].HasField("constraint")
    assert not read({**body, "tool_choice": choice}).requests[0].HasField("constraint")
    asked = {**PLAIN, **CALLING, "structured_outputs": {"regex": "a"}, "tool_choice": "required"}
    assert read_chat(asked).requests[0].HasField("constraint")  # which is refused: vLLM's is of all that is written
