"""Tool calls and reasoning of an answer, through gRPC."""

import json

from baton.v1 import inference_pb2 as pb
from tests.gateway.orchestration.test_answers import read

CALL = '<tool_call>{"name": "find", "arguments": {"text": "fox"}}</tool_call>'
TOOLS = [pb.Tool(name="find", description="Find a text.", parameters='{"properties": {"text": {"type": "string"}}}')]


def asked(*tools: pb.Tool, request_id: str = "", **fields) -> pb.GenerateRequest:
    messages = pb.Messages(messages=[pb.Message(role="user", content="a fox")], tools=tools, **fields)
    stopping = pb.Stopping(max_tokens=400)
    return pb.GenerateRequest(messages=messages, stopping=stopping, request_id=request_id)


async def test_parts_of_an_answer_whole_and_streamed(saying):
    async with saying(f"<think>\nI look.\n</think>\n\nOne moment.\n{CALL}\n{CALL}") as c:
        request = asked(*TOOLS, request_id="r1")
        (choice,) = (await c.stub.Complete(request, timeout=20)).choices
        assert (choice.reasoning, choice.text) == ("I look.", "One moment.")
        assert [(call.name, json.loads(call.arguments)) for call in choice.tool_calls] == [
            ("find", {"text": "fox"})
        ] * 2
        assert choice.finish_reason == pb.FINISH_REASON_TOOL_CALLS
        messages = await read(c.stub.Generate(request, timeout=20))
        assert "".join(message.text for message in messages) == choice.text
        assert "".join(message.reasoning for message in messages) == choice.reasoning
        assert [call for message in messages for call in message.tool_calls] == list(choice.tool_calls)
        assert messages[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS and len({m.text for m in messages}) > 3


async def test_without_tools_a_call_is_text(saying):
    async with saying(f"So: {CALL}") as c:
        (choice,) = (await c.stub.Complete(asked(), timeout=20)).choices
        assert (choice.text, list(choice.tool_calls)) == (f"So: {CALL}", [])
        assert choice.finish_reason == pb.FINISH_REASON_STOP


async def test_a_form_that_is_not_known_is_text(saying):
    async with saying(f"<think>so</think>{CALL}", tool_call_parser="none") as c:
        (choice,) = (await c.stub.Complete(asked(*TOOLS), timeout=20)).choices
        assert choice.text == f"<think>so</think>{CALL}"


async def test_a_choice_of_none_leaves_calls_in_the_text(saying):
    async with saying(f"So: {CALL}") as c:
        request = asked(*TOOLS, tool_choice=pb.TOOL_CHOICE_NONE)
        (choice,) = (await c.stub.Complete(request, timeout=20)).choices
        assert (choice.text, list(choice.tool_calls)) == (f"So: {CALL}", [])


async def test_one_call_ends_the_answer_and_the_workers_hear_of_it(saying):
    async with saying(f"So: {CALL}{CALL}and more") as c:
        response = await c.stub.Complete(asked(*TOOLS, parallel_tool_calls=False), timeout=20)
        (choice,) = response.choices
        assert (choice.text, len(choice.tool_calls), choice.finish_reason) == ("So:", 1, pb.FINISH_REASON_TOOL_CALLS)
        await c.idle()
