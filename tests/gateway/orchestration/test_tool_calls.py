"""Tool calls and reasoning of an answer, through gRPC."""

import json

import pytest

from baton.v1 import inference_pb2 as pb
from tests.gateway.calls import expect_refusal, read
from tests.support.pace import patience

CALL = '<tool_call>{"name": "find", "arguments": {"text": "fox"}}</tool_call>'
TOOLS = [pb.Tool(name="find", description="Find a text.", parameters='{"properties": {"text": {"type": "string"}}}')]


def asked(
    *tools: pb.Tool, request_id: str = "", constraint: pb.Constraint | None = None, **fields
) -> pb.GenerateRequest:
    messages = pb.Messages(messages=[pb.Message(role="user", content="a fox")], tools=tools, **fields)
    stopping = pb.Stopping(max_tokens=400)
    return pb.GenerateRequest(messages=messages, stopping=stopping, request_id=request_id, constraint=constraint)


async def test_parts_of_an_answer_whole_and_streamed(saying):
    async with saying(f"<think>\nI look.\n</think>\n\nOne moment.\n{CALL}\n{CALL}") as c:
        request = asked(*TOOLS, request_id="r1")
        (choice,) = (await c.stub.Complete(request, timeout=patience(20))).choices
        assert (choice.reasoning, choice.text) == ("I look.", "One moment.")
        assert [(call.name, json.loads(call.arguments)) for call in choice.tool_calls] == [
            ("find", {"text": "fox"})
        ] * 2
        assert choice.finish_reason == pb.FINISH_REASON_TOOL_CALLS
        messages = await read(c.stub.Generate(request, timeout=patience(20)))
        assert "".join(message.text for message in messages) == choice.text
        assert "".join(message.reasoning for message in messages) == choice.reasoning
        assert [call for message in messages for call in message.tool_calls] == list(choice.tool_calls)
        assert messages[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS and len({m.text for m in messages}) > 3


async def test_arguments_come_as_they_are_written_where_that_is_asked_for(saying):
    async with saying(f"So: {CALL}") as c:
        whole = (await c.stub.Complete(asked(*TOOLS, request_id="r1"), timeout=patience(20))).choices[0].tool_calls
        request = asked(*TOOLS, request_id="r1", stream_tool_arguments=True)
        assert (await c.stub.Complete(request, timeout=patience(20))).choices[0].tool_calls == whole
        messages = await read(c.stub.Generate(request, timeout=patience(20)))
        first, *rest = [part for message in messages for part in message.tool_calls]
        assert (first.id, first.name) == (whole[0].id, "find") and len(rest) > 3
        assert not any(part.id or part.name for part in rest)
        assert "".join(part.arguments for part in (first, *rest)) == whole[0].arguments
        assert messages[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS


async def test_a_call_that_is_cut_off_is_never_whole(saying):
    async with saying(f"So: {CALL[:-20]}") as c:
        request = asked(*TOOLS, stream_tool_arguments=True)
        assert not (await c.stub.Complete(request, timeout=patience(20))).choices[0].tool_calls
        messages = await read(c.stub.Generate(request, timeout=patience(20)))
        begun = "".join(part.arguments for message in messages for part in message.tool_calls)
        assert begun.startswith('{"text":') and not begun.endswith("}")
        assert messages[-1].finish_reason == pb.FINISH_REASON_STOP


async def test_without_tools_a_call_is_text(saying):
    async with saying(f"So: {CALL}") as c:
        (choice,) = (await c.stub.Complete(asked(), timeout=patience(20))).choices
        assert (choice.text, list(choice.tool_calls)) == (f"So: {CALL}", [])
        assert choice.finish_reason == pb.FINISH_REASON_STOP


async def test_a_form_that_is_not_known_is_text(saying):
    async with saying(f"<think>so</think>{CALL}", tool_call_parser="none") as c:
        (choice,) = (await c.stub.Complete(asked(*TOOLS), timeout=patience(20))).choices
        assert choice.text == f"<think>so</think>{CALL}"


async def test_a_choice_of_none_leaves_calls_in_the_text(saying):
    async with saying(f"So: {CALL}") as c:
        request = asked(*TOOLS, tool_choice=pb.TOOL_CHOICE_NONE)
        (choice,) = (await c.stub.Complete(request, timeout=patience(20))).choices
        assert (choice.text, list(choice.tool_calls)) == (f"So: {CALL}", [])


async def test_one_call_ends_the_answer_and_the_workers_hear_of_it(saying):
    async with saying(f"So: {CALL}{CALL}and more") as c:
        response = await c.stub.Complete(asked(*TOOLS, parallel_tool_calls=False), timeout=patience(20))
        (choice,) = response.choices
        assert (choice.text, len(choice.tool_calls), choice.finish_reason) == ("So:", 1, pb.FINISH_REASON_TOOL_CALLS)
        await c.idle()


async def test_what_must_be_a_call_is_a_grammar_for_both_workers(saying, capable):
    async with saying(CALL) as c:
        for fields in ({"tool_choice": pb.TOOL_CHOICE_REQUIRED}, {"tool_name": "find"}):
            (choice,) = (await c.stub.Complete(asked(*TOOLS, **fields), timeout=patience(20))).choices
            assert len(choice.tool_calls) == 1
        specs = [m.spec for worker in c.workers for kind, m in worker.commands if kind in ("admit", "prefill")]
        assert len(specs) == 4 and all("find" in spec.constraint.grammar for spec in specs)


async def test_a_constraint_and_tools_are_one_grammar(saying, capable):
    async with saying(CALL) as c:
        request = asked(*TOOLS, constraint=pb.Constraint(choice=pb.TextChoices(texts=["yes", "no"])))
        await c.stub.Complete(request, timeout=patience(20))
        grammar = next(m.spec for kind, m in c.prefill[0].commands if kind == "prefill").constraint.grammar
        assert '"yes" | "no"' in grammar and "find" in grammar


BAD_TOOL = pb.Tool(name="find", parameters='{"properties": {"a": {"minimun": 1}}}', strict=True)
BAD_ENUM = pb.Tool(name="find", parameters='{"properties": {"a": {"type": "string", "enum": 5}}}', strict=True)
BAD_TYPE = pb.Tool(name="find", parameters='{"type": 7}', strict=True)
BAD_NAME = pb.Tool(name="find-it", parameters="{}")
BAD_KEY = pb.Tool(name="find", parameters='{"required": [[]]}', strict=True)
FAR_REFERENCE = pb.Tool(name="find", parameters='{"anyOf": [{"$ref": "#/anyOf/' + "1" * 5000 + '"}]}', strict=True)
BAD_WORD = pb.Tool(name="find", parameters='{"properties": {"class": {}}}', strict=True)
BAD_SHAPE = pb.Tool(name="find", parameters='{"properties": 5}', strict=True)
UNKEPT = [
    ("hermes", (BAD_TOOL,), "messages.tools[0].parameters"),
    ("hermes", (BAD_SHAPE,), "messages.tools[0].parameters"),
    ("qwen-xml", (BAD_TYPE,), "messages.tools[0].parameters"),
    ("qwen-xml", (BAD_KEY,), "messages.tools[0].parameters"),
    ("qwen-xml", (pb.Tool(name="a", parameters="{}"), BAD_TOOL), "messages.tools[1].parameters"),
    ("qwen-xml", (BAD_ENUM,), "messages.tools[0].parameters"),
    ("pythonic", (BAD_WORD,), "messages.tools"),
]
REFUSED = [
    *((parser, asked(*tools, tool_name="find"), field) for parser, tools, field in UNKEPT),
    ("hermes", asked(FAR_REFERENCE, tool_name="find"), "messages.tools[0].parameters"),
    ("pythonic", asked(BAD_NAME, tool_name="find-it"), "messages.tools[0].name"),
    ("think", asked(*TOOLS, tool_name="find"), "messages.tool_choice"),
    ("none", asked(*TOOLS, tool_name="find"), "messages.tool_choice"),
    ("hermes", asked(*TOOLS, tool_name="find", constraint=pb.Constraint(json_object=True)), "constraint"),
]


@pytest.mark.parametrize(("parser", "tools", "_"), UNKEPT)
async def test_one_that_is_not_strict_keeps_to_what_can_be_kept(cluster, capable, parser, tools, _):
    loose = [pb.Tool(name=tool.name, parameters=tool.parameters) for tool in tools]
    async with cluster(tool_call_parser=parser) as c:
        assert (await c.stub.Complete(asked(*loose, tool_name="find"), timeout=patience(20))).choices


JSON_OBJECT = pb.Constraint(json_object=True)
NOT_CALLED = [
    ("hermes", asked(BAD_TOOL, pb.Tool(name="b"), tool_name="b")),
    ("hermes", asked(BAD_TOOL, tool_choice=pb.TOOL_CHOICE_NONE, constraint=JSON_OBJECT)),
    ("pythonic", asked(pb.Tool(name="find-it", parameters=BAD_TOOL.parameters), constraint=JSON_OBJECT)),
]


@pytest.mark.parametrize(("parser", "request_"), NOT_CALLED)
async def test_a_tool_that_no_grammar_has_may_have_any_schema(cluster, capable, parser, request_):
    async with cluster(tool_call_parser=parser) as c:
        assert (await c.stub.Complete(request_, timeout=patience(20))).choices


@pytest.mark.parametrize(("parser", "request_", "field"), REFUSED)
async def test_what_cannot_be_kept_to_is_refused_by_name(cluster, capable, parser, request_, field):
    async with cluster(tool_call_parser=parser) as c:
        error = await expect_refusal(read(c.stub.Generate(request_, timeout=patience(20))))
        assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", (field,)) and len(error.message) < 400


@pytest.mark.parametrize("tools", [(BAD_TOOL,), (BAD_TOOL, pb.Tool(name="b"))])
async def test_what_is_refused_is_tried_again_where_a_tool_is_not_strict_alone(cluster, capable, monkeypatch, tools):
    async with cluster(tool_call_parser="hermes") as c:
        planner, tried = c.pipeline.planner, []
        plan_for = planner.plan_for
        monkeypatch.setattr(planner, "plan_for", lambda *args: tried.append(args[-1]) or plan_for(*args))
        request = asked(*tools, tool_choice=pb.TOOL_CHOICE_REQUIRED)
        refusal = await expect_refusal(c.stub.Complete(request, timeout=patience(20)))
        assert refusal.fields == ("messages.tools[0].parameters",)
        assert tried == [None, ()][: len(tools)]
