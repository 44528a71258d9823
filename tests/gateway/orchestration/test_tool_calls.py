"""Tool calls and reasoning of an answer, through gRPC."""

import json

from baton.v1 import inference_pb2 as pb
from tests.gateway.orchestration.test_answers import read

CALL = '<tool_call>{"name": "find", "arguments": {"text": "fox"}}</tool_call>'
TOOLS = [pb.Tool(name="find", description="Find a text.", parameters='{"properties": {"text": {"type": "string"}}}')]


def asked(*tools: pb.Tool, **fields) -> pb.GenerateRequest:
    messages = pb.Messages(messages=[pb.Message(role="user", content="a fox")], tools=tools)
    return pb.GenerateRequest(messages=messages, stopping=pb.Stopping(max_tokens=400), **fields)


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
