"""Messages as clients send them: each thing that is wrong is named with its place."""

import json

import pytest

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.config.served_model import RequestLimits
from gateway.request.messages import MAX_DEPTH, check_conversation
from gateway.text.templates import ChatToolCall

USER = pb.Message(role="user", content="x")
CALL = pb.ToolCall(id="c1", name="find", arguments='{"a": [1, "b"]}')
CALLING = pb.Message(role="assistant", tool_calls=[CALL])


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def calling(**fields) -> pb.Messages:
    call = pb.ToolCall()
    call.CopyFrom(CALL)
    for name, value in fields.items():
        setattr(call, name, value)
    return pb.Messages(messages=[USER, pb.Message(role="assistant", tool_calls=[call])])


def having(*tools: pb.Tool) -> pb.Messages:
    return pb.Messages(messages=[USER], tools=tools)


AT = "messages.messages"
BAD = [
    (pb.Messages(), AT, "is empty"),
    (pb.Messages(messages=[USER] * 1025), AT, "at most 1024"),
    (pb.Messages(messages=[pb.Message(role="root")]), f"{AT}[0].role", "is unknown"),
    (pb.Messages(messages=[USER, pb.Message()]), f"{AT}[1].role", "is empty"),
    (pb.Messages(messages=[pb.Message(role="user", tool_calls=[CALL])]), f"{AT}[0].tool_calls", "role assistant"),
    (pb.Messages(messages=[pb.Message(role="user", reasoning="x")]), f"{AT}[0].reasoning", "role assistant"),
    (pb.Messages(messages=[pb.Message(role="user", tool_call_id="c1")]), f"{AT}[0].tool_call_id", "role tool"),
    (
        pb.Messages(messages=[pb.Message(role="tool", tool_call_id="c1"), CALLING]),
        f"{AT}[0].tool_call_id",
        "no call of",
    ),
    (
        pb.Messages(messages=[pb.Message(role="assistant", tool_calls=[CALL, CALL])]),
        f"{AT}[0].tool_calls[1].id",
        "of another call",
    ),
    (
        pb.Messages(messages=[pb.Message(role="user", content="x", parts=[pb.ContentPart(text="y")])]),
        f"{AT}[0].parts",
        "one of them",
    ),
    (pb.Messages(messages=[pb.Message(role="user", parts=[pb.ContentPart()])]), f"{AT}[0].parts[0]", "only text"),
    (calling(name=""), f"{AT}[1].tool_calls[0].name", "is empty"),
    (calling(arguments="[1]"), f"{AT}[1].tool_calls[0].arguments", "not a JSON object"),
    (calling(arguments=nested(MAX_DEPTH + 1)), f"{AT}[1].tool_calls[0].arguments", "levels deep"),
    (calling(arguments=nested(50_000)), f"{AT}[1].tool_calls[0].arguments", "nested too deeply"),
    (calling(arguments=f'{{"a": {"1" * 10_000}}}'), f"{AT}[1].tool_calls[0].arguments", "too long"),
    (pb.Messages(messages=[USER], tool_choice=pb.TOOL_CHOICE_REQUIRED), "messages.tool_choice", "needs tools"),
    (pb.Messages(messages=[USER], tool_choice=9), "messages.tool_choice", "not known"),
    (pb.Messages(messages=[USER], tool_name="find"), "messages.tool_name", "the name of no tool"),
    (
        pb.Messages(messages=[USER], tools=[pb.Tool(name="a")], tool_name="a", tool_choice=pb.TOOL_CHOICE_AUTO),
        "messages.tool_name",
        "one of them",
    ),
    (
        pb.Messages(
            messages=[USER, pb.Message(role="assistant", content="x")],
            tools=[pb.Tool(name="a")],
            tool_name="a",
            continue_final_message=True,
        ),
        "messages.continue_final_message",
        "cannot become a call",
    ),
    (having(pb.Tool(name="find"), pb.Tool(name="find")), "messages.tools[1].name", "earlier tool"),
    (having(pb.Tool(name="a b")), "messages.tools[0].name", "must match"),
    (having(pb.Tool(name="a" * 129)), "messages.tools[0].name", "must match"),
    (having(pb.Tool(name="a", parameters='{"a": "\\ud800"}')), "messages.tools[0].parameters", "surrogate pair"),
    (having(pb.Tool()), "messages.tools[0].name", "is empty"),
    (having(pb.Tool(name="find", parameters="{")), "messages.tools[0].parameters", "is not JSON"),
    (having(pb.Tool(name="find", parameters="3")), "messages.tools[0].parameters", "not a JSON object"),
    (having(*(pb.Tool(name=f"t{index}") for index in range(129))), "messages.tools", "at most 128"),
    (
        pb.Messages(messages=[USER], chat_template_kwargs=f'{{"a": "{"é" * 32_764}"}}'),
        "messages.chat_template_kwargs",
        "has 65537 bytes, at most 65536",
    ),
    (pb.Messages(messages=[USER], chat_template_kwargs="[]"), "messages.chat_template_kwargs", "not a JSON object"),
    (pb.Messages(messages=[USER], continue_final_message=True), "messages.continue_final_message", "an assistant's"),
    (
        pb.Messages(messages=[CALLING], continue_final_message=True),
        "messages.continue_final_message",
        "without tool_calls",
    ),
]


@pytest.mark.parametrize(("given", "field", "message"), BAD)
def test_the_place_is_named(given, field, message):
    with pytest.raises(InvalidRequest) as error:
        check_conversation(given, RequestLimits())
    assert error.value.field == field and message in error.value.message and "\n" not in error.value.message


def test_what_is_given_arrives():
    given = pb.Messages(
        messages=[
            pb.Message(role="developer", parts=[pb.ContentPart(text="a"), pb.ContentPart(text="b")]),
            CALLING,
            pb.Message(role="tool", tool_call_id="c1", content="found", name="search"),
            pb.Message(role="assistant", content="It is", reasoning="hm"),
        ],
        tools=[pb.Tool(name="find", description="Find it.", parameters='{"type": "object"}'), pb.Tool(name="stop")],
        chat_template_kwargs='{"enable_thinking": false}',
        continue_final_message=True,
    )
    conversation = check_conversation(given, RequestLimits())
    messages, options = conversation
    assert messages[2].name == "search" and "search" in conversation.client_texts.texts
    assert [message.role for message in messages] == ["developer", "assistant", "tool", "assistant"]
    assert messages[0].content == "ab"
    assert messages[1].tool_calls == (ChatToolCall("c1", "find", json.loads(CALL.arguments)),)
    assert (messages[2].tool_call_id, messages[3].reasoning) == ("c1", "hm")
    assert [tool["name"] for tool in options.tools] == ["find", "stop"]
    assert options.tools[1]["parameters"] == {"type": "object", "properties": {}}
    assert (options.callable_tools, options.must_call, options.is_parallel) == (("find", "stop"), False, True)
    assert options.kwargs == {"enable_thinking": False} and options.continues


@pytest.mark.parametrize("name", ["get weather", "functions/find", "größe", "<|im_end|>", "a" * 1_000])
def test_a_call_of_an_earlier_answer_may_have_the_name_that_a_model_made_up(name):
    """A client that answers it says that there is no such tool, and goes on."""
    messages, _ = check_conversation(calling(name=name), RequestLimits())
    assert messages[1].tool_calls[0].name == name


def test_half_of_a_surrogate_pair_in_a_call_of_an_earlier_answer_is_replaced():
    given = calling(arguments='{"\\udc00": ["\\ud83d\\ude42", "a\\ud83d"]}')
    messages, _ = check_conversation(given, RequestLimits())
    assert messages[1].tool_calls[0].arguments == {"\ufffd": ["🙂", "a\ufffd"]}


def test_an_id_may_be_used_again_in_a_later_turn():
    """Some clients count them anew in each."""
    result = pb.Message(role="tool", tool_call_id="c1", content="found")
    messages, _ = check_conversation(pb.Messages(messages=[CALLING, result, CALLING, result]), RequestLimits())
    assert [len(each.tool_calls) for each in messages] == [1, 0, 1, 0]


@pytest.mark.parametrize("arguments", ["{", '{"a": "x', "find it", " "])
def test_a_call_that_was_cut_off_is_one_without_arguments(arguments):
    """A stream that ends in it leaves it to the client, whose conversation goes on."""
    messages, _ = check_conversation(calling(arguments=arguments), RequestLimits())
    assert messages[1].tool_calls == (ChatToolCall("c1", "find", {}),)


def test_a_tool_s_name_has_up_to_128_characters():
    name = "a" * 128
    _, options = check_conversation(having(pb.Tool(name=name)), RequestLimits())
    assert options.callable_tools == (name,)


@pytest.mark.parametrize(
    ("fields", "names", "must_call", "is_parallel"),
    [
        ({"tool_choice": pb.TOOL_CHOICE_NONE}, (), False, True),
        ({"tool_choice": pb.TOOL_CHOICE_REQUIRED}, ("find", "stop"), True, True),
        ({"tool_name": "stop"}, ("stop",), True, False),
        ({"parallel_tool_calls": False}, ("find", "stop"), False, False),
    ],
)
def test_which_tools_may_be_called(fields, names, must_call, is_parallel):
    given = pb.Messages(messages=[USER], tools=[pb.Tool(name="find"), pb.Tool(name="stop")], **fields)
    options = check_conversation(given, RequestLimits()).options
    assert (options.callable_tools, options.must_call, options.is_parallel) == (names, must_call, is_parallel)
