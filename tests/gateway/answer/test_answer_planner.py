"""Tokens of a model that marks reasoning and calls: equal in every grouping, and resumed at any token."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Tokens

from baton.constraints.constraint import MAX_BYTES, Constraint, quoted
from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.answer.answer_planner import AnswerPlanner
from gateway.answer.choice import Choice
from gateway.answer.stop_strings import StopStrings
from gateway.parsers.formats import format_named
from gateway.text.detokenizer import Detokenizer
from gateway.text.templates import ChatMessage, ChatOptions, Conversation
from gateway.text.tokenizer import Tokenizer
from tests.gateway.answer.planned_calls import CONVERSATION, IDS, PLANNER, TOKENIZER, TOKENS, plan_of
from tests.support.gateway.small_tokenizers import byte_level, sentencepiece


def joined(messages: list[pb.GenerateResponse]) -> tuple:
    """A call without a name continues the one before."""
    calls = list[pb.ToolCall]()
    for call in (call for message in messages for call in message.tool_calls):
        if call.name:
            calls.append(pb.ToolCall(id=call.id, name=call.name))
        calls[-1].arguments += call.arguments
    told = [(call.id, call.name, json.loads(call.arguments)) for call in calls]
    return "".join(m.reasoning for m in messages), "".join(m.text for m in messages), told, messages[-1].finish_reason


def streaming(**options):
    """Return a plan by which calls come in parts."""
    options = CONVERSATION.options._replace(streams_arguments=True, **options)
    return plan_of(conversation=CONVERSATION._replace(options=options))


def messages_of(sizes, num_received: int = 0, asked=None) -> list[pb.GenerateResponse]:
    choice, messages, begin = Choice(0, asked or plan_of(), None, 0, num_received, "r1"), [], 0
    for size in (*sizes, len(IDS)):
        ids = IDS[begin : begin + size]
        if ids:
            choice.push(ids, (), pb.FINISH_REASON_STOP if begin + size >= len(IDS) else 0)
            messages.append(choice.take())
        begin += size
    return messages


WHOLE = joined(messages_of([]))


def test_an_answer_has_its_parts():
    reasoning, content, calls, reason = WHOLE
    assert (reasoning, content) == ("I look for naïve 🙂.", "One moment.")
    assert [call[1:] for call in calls] == [("find", {"text": "Größe </tool_call> 東京 🙂"})] * 2
    assert calls[0][0] != calls[1][0] and reason == pb.FINISH_REASON_TOOL_CALLS


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), max_size=120))
def test_equal_in_every_grouping(sizes):
    assert joined(messages_of(sizes)) == WHOLE
    assert joined(messages_of(sizes, asked=streaming())) == WHOLE


def test_arguments_come_as_they_are_written():
    num_parts = [len(m.tool_calls) for m in messages_of([1] * len(IDS), asked=streaming())]
    assert max(num_parts) == 1 and sum(num_parts) > 20
    num_whole = sum(len(m.tool_calls) for m in messages_of([1] * len(IDS)))
    assert num_whole == 2


@settings(max_examples=60)
@given(st.integers(1, len(IDS) - 1))
def test_a_client_that_resumes_gets_the_rest(num_received):
    """As many tokens one by one, then a stream that is resumed behind them: nothing twice, nothing lost."""
    for asked in (plan_of(), streaming()):
        before = messages_of([1] * len(IDS), asked=asked)[:num_received]
        assert joined(before + messages_of([], num_received, asked)) == WHOLE


def num_reasoning(asked, ids: list[int], sizes, stops=None, reason: int = pb.FINISH_REASON_STOP) -> int:
    """Of an answer whose tokens come in groups of these sizes, and the rest at once."""
    choice, begin = Choice(0, asked, stops, 0), 0
    for size in (*sizes, len(ids)):
        if piece := ids[begin : begin + size]:
            choice.push(piece, (), reason if begin + size >= len(ids) else 0)
        begin += size
    return choice.num_reasoning_tokens


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), max_size=120), st.booleans())
def test_tokens_of_the_reasoning_are_counted(sizes, has_stops):
    """Without the tags and the blanks behind the first; the same however many tokens come at once."""
    stops = StopStrings(["moment."]) if has_stops else None
    num_before = len(TOKENS.encode("<think>\n").ids)
    num_counted = IDS.index(TOKENS.token_to_id("</think>")) - num_before
    assert num_reasoning(plan_of(), IDS, sizes, stops) == num_counted
    cut = IDS[: num_before + 4]
    assert num_reasoning(plan_of(), cut, sizes, stops, pb.FINISH_REASON_LENGTH) == 4


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), max_size=120))
def test_tags_of_several_tokens_are_no_reasoning(sizes):
    """Where the tokenizer has none for them."""
    tokens = Tokens.from_str(byte_level().decode())
    plain = Tokenizer(byte_level())
    planner = AnswerPlanner(plain, Detokenizer(plain), format_named("think"))
    begin, thought, end = (tokens.encode(text).ids for text in ("<think>", "I look for 🙂 naïve words", "</think>"))
    ids = [*begin, *thought, *end, *tokens.encode("One moment.").ids]
    assert len(begin) > 1 and len(end) > 1
    asked = planner.plan_for(Conversation((ChatMessage("user", "x"),), ChatOptions()), [])
    assert num_reasoning(asked, ids, sizes) == len(thought)
    nothing = [*begin, *tokens.encode("\n\n").ids, *end, *tokens.encode("One").ids]
    assert num_reasoning(asked, nothing, sizes) == 0


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), max_size=120))
def test_all_messages_of_reasoning_are_counted(sizes):
    """Of gpt-oss, without their headers."""
    harmony = format_named("harmony")
    assert harmony is not None
    source = byte_level(unspecial=harmony.markers)
    tokenizer, tokens = Tokenizer(source), Tokens.from_str(source.decode())
    planner = AnswerPlanner(tokenizer, Detokenizer(tokenizer), harmony)
    head, thoughts = "<|channel|>analysis<|message|>", ("So.", " They want words")
    answer = f"<|end|><|start|>assistant{head}".join(thoughts)
    ids = tokens.encode(f"{head}{answer}<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>").ids
    asked = planner.plan_for(Conversation((ChatMessage("user", "x"),), ChatOptions()), [])
    assert num_reasoning(asked, ids, sizes) == sum(len(tokens.encode(thought).ids) for thought in thoughts)


def test_plain_where_there_is_no_conversation():
    assert joined(messages_of([], asked=plan_of(conversation=None)))[0] == ""
    assert "<tool_call>" in joined(messages_of([], asked=plan_of(conversation=None)))[1]


def test_the_prompt_may_begin_the_reasoning():
    choice = Choice(0, plan_of("x<think>\n"), None, 0)
    choice.push(TOKENS.encode("hm</think>ok<|im_end|>").ids, (), pb.FINISH_REASON_STOP)
    message = choice.take()
    assert (message.reasoning, message.text, message.finish_reason) == ("hm", "ok", pb.FINISH_REASON_STOP)


def test_schemas_that_take_long_to_walk_are_refused_before():
    options = ChatOptions(({"name": "find", "parameters": {"anyOf": [{}] * 40_000}},), callable_tools=("find",))
    conversation = CONVERSATION._replace(options=options._replace(must_call=True))
    with pytest.raises(InvalidRequest, match="^messages.tools: have parameters of 160011 bytes, at most 131072"):
        plan_of(conversation=conversation)
    plan_of(conversation=conversation._replace(options=options))  # where no grammar has them, they are not walked


def test_arguments_that_must_be_none_are_refused():
    tools = ({"name": "find", "parameters": {}}, {"name": "stop", "parameters": {"type": ["array", "null"]}})
    options = ChatOptions(tools, callable_tools=("find", "stop"), must_call=True, strict_tools=("stop",))
    with pytest.raises(InvalidRequest, match=r"tools\[1\]\.parameters: /type: must be object"):
        plan_of(conversation=CONVERSATION._replace(options=options))


def test_a_schema_that_cannot_be_kept_to_is_an_error_of_a_strict_tool_alone():
    big = {"name": "big", "parameters": {"enum": ["x" * MAX_BYTES]}}
    tools = ({"name": "find", "parameters": {"minimun": 3, "type": "array"}}, big)
    options = ChatOptions(tools, callable_tools=("find",), must_call=True)
    bound = plan_of(conversation=CONVERSATION._replace(options=options)).constraint
    assert bound is not None and '"minimun": 3, "type": "object"' in bound.text
    with pytest.raises(InvalidRequest, match=r"tools\[0\]\.parameters: /minimun: is no keyword"):
        plan_of(conversation=CONVERSATION._replace(options=options._replace(strict_tools=("find",))))
    both = CONVERSATION._replace(options=options._replace(callable_tools=("find", "big")))
    with pytest.raises(InvalidRequest, match="have parameters of"):
        PLANNER.plan_for(both, [0])
    free = PLANNER.plan_for(both, [0], kept=()).constraint
    assert free is not None and "minimun" not in free.text and free.text.count('%json {"type": "object"') == 4


@pytest.mark.parametrize("is_strict", [False, True])
def test_arguments_that_would_have_no_end_are_any_of_a_tool_that_is_not_strict(is_strict):
    """That they are an object is said by no schema."""
    tools = ({"name": "find", "parameters": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}},)
    options = ChatOptions(tools, callable_tools=("find",), must_call=True, strict_tools=("find",) * is_strict)
    conversation = CONVERSATION._replace(options=options)
    with pytest.raises(InvalidRequest, match="leads back to it"):
        PLANNER.plan_for(conversation, [0])
    if not is_strict:
        free = PLANNER.plan_for(conversation, [0], kept=()).constraint
        assert free is not None and "$ref" not in free.text


def test_calls_of_strict_tools_are_bound_alone():
    tools = (
        {"name": "find", "parameters": {}},
        {"name": "stop", "parameters": {"type": "array"}},
    )  # the other's is not read
    options = ChatOptions(tools, callable_tools=("find", "stop"), strict_tools=("find",))
    asked = plan_of(conversation=CONVERSATION._replace(options=options))
    assert asked.constraint is not None and "find" in asked.constraint.text and "stop" in asked.constraint.text
    assert joined(messages_of([], asked=asked)) == WHOLE
    assert plan_of(conversation=CONVERSATION._replace(options=options._replace(strict_tools=()))).constraint is None


PYTHONIC = AnswerPlanner(TOKENIZER, Detokenizer(TOKENIZER), format_named("pythonic"))
NAMED = ({"name": "look", "parameters": {}}, {"name": "get-page", "parameters": {}})
NO_NAME = r"^messages\.tools\[1\]\.name: cannot be called in .*\(pythonic\): 'get-page' is no name"


@pytest.mark.parametrize(
    "options",
    [
        {"callable_tools": ("get-page",), "must_call": True},
        {"callable_tools": ("look", "get-page"), "strict_tools": ("get-page",)},
    ],
)
def test_a_tool_whose_name_calls_cannot_have_is_refused_where_it_is_needed(options):
    with pytest.raises(InvalidRequest, match=NO_NAME):
        PYTHONIC.plan_for(CONVERSATION._replace(options=ChatOptions(NAMED, **options)), [])


def test_a_tool_whose_name_calls_cannot_have_has_no_calls_where_others_do():
    options = ChatOptions(NAMED, callable_tools=("look", "get-page"), must_call=True)
    for kept in (None, ()):
        bound = PYTHONIC.plan_for(CONVERSATION._replace(options=options), [], kept=kept).constraint
        assert bound is not None and quoted("look(") in bound.text and "get-page" not in bound.text
    constraint = Constraint("regex", "x")
    alone = ChatOptions(NAMED, callable_tools=("get-page",))
    assert PYTHONIC.plan_for(CONVERSATION._replace(options=alone), []).constraint is None
    assert "page" not in PYTHONIC.plan_for(CONVERSATION._replace(options=alone), [], constraint).constraint.text


def test_what_continues_a_message_of_gpt_oss_is_its_content():
    """Its header is in the prompt."""
    harmony = format_named("harmony")
    assert harmony is not None
    source = byte_level(unspecial=harmony.markers)
    tokenizer, tokens = Tokenizer(source), Tokens.from_str(source.decode())
    planner = AnswerPlanner(tokenizer, Detokenizer(tokenizer), harmony)
    conversation = Conversation((ChatMessage("assistant", "The answer is"),), ChatOptions(continues=True))
    prompt_ids = tokens.encode("<|start|>assistant<|channel|>final<|message|>The answer is").ids
    answer_ids = tokens.encode(" 42.<|end|><|start|>assistant<|channel|>final<|message|> Yes.<|return|>").ids
    choice, messages = Choice(0, planner.plan_for(conversation, prompt_ids), None, 0), []
    for id_ in answer_ids:
        choice.push([id_], (), pb.FINISH_REASON_STOP if id_ == answer_ids[-1] else 0)
        messages.append(choice.take())
    assert joined(messages) == ("", " 42.\n Yes.", [], pb.FINISH_REASON_STOP)


@pytest.mark.parametrize("kind", ["normalizer", "first"])
@pytest.mark.parametrize("continued", [None, Conversation((ChatMessage("user", "x"),), ChatOptions(continues=True))])
def test_what_continues_a_text_keeps_its_space(kind, continued):
    """Prompt and answer are the text of all tokens; an answer that begins one has no space in front."""
    tokenizer = Tokenizer(sentencepiece(kind))
    plain = Detokenizer(tokenizer)
    planner, ids = AnswerPlanner(tokenizer, plain, None), tokenizer.encode_text("the fox the fox")

    def text(conversation, num_prompt: int) -> str:
        choice = Choice(0, planner.plan_for(conversation, ids[:num_prompt]), None, 0)
        choice.push(ids[num_prompt:], (), pb.FINISH_REASON_LENGTH)
        return choice.take().text

    for num_prompt in range(2, len(ids)):
        assert plain.decode(ids[:num_prompt]) + text(continued, num_prompt) == "the fox the fox"
    assert text(None, 1) == text(CONVERSATION, 1) == "the fox the fox"  # behind what has no text


@pytest.mark.parametrize("conversation", [None, CONVERSATION])
def test_an_answer_that_is_bound_keeps_its_first_space(conversation):
    """A grammar knows of no space that is left out: of the choice " the" came "the"."""
    tokenizer = Tokenizer(sentencepiece("normalizer"))
    planner, ids = AnswerPlanner(tokenizer, Detokenizer(tokenizer), None), tokenizer.encode_text("the")
    for constraint, text in ((Constraint("choice", '[" the"]'), " the"), (None, "the")):
        choice = Choice(0, planner.plan_for(conversation, ids[:1], constraint), None, 0)
        choice.push(ids[1:], (), pb.FINISH_REASON_LENGTH)
        assert choice.take().text == text


def test_a_call_that_is_cut_is_no_call():
    choice = Choice(0, plan_of(), None, 0)
    choice.push(TOKENS.encode('wait<tool_call>{"name": "find"').ids, (), pb.FINISH_REASON_LENGTH)
    message = choice.take()
    assert (message.text, list(message.tool_calls), message.finish_reason) == ("wait", [], pb.FINISH_REASON_LENGTH)


def test_a_call_that_the_model_leaves_without_an_end_is_text():
    """One before a stop string is cut, as by `max_tokens`."""
    text = 'wait<tool_call>{"name": "find", "arguments": {"n": 1}'
    for stops, said in ((None, text), (StopStrings([": 1"]), "wait")):
        choice = Choice(0, plan_of(), stops, 0)
        choice.push(TOKENS.encode(f"{text}<|im_end|>").ids, (), pb.FINISH_REASON_STOP)
        message = choice.take()
        assert (message.text, list(message.tool_calls), message.finish_reason) == (said, [], pb.FINISH_REASON_STOP)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), max_size=120))
def test_an_answer_of_one_call_ends_with_it(sizes):
    messages = messages_of(sizes, asked=streaming(is_parallel=False))
    ended = [index for index, message in enumerate(messages) if message.finish_reason]
    reasoning, content, calls, _ = joined(messages)
    assert (reasoning, content, calls) == (WHOLE[0], WHOLE[1], WHOLE[2][:1])
    assert messages[ended[0]].finish_reason == pb.FINISH_REASON_TOOL_CALLS
    num_tokens = sum(len(message.token_ids) for message in messages[: ended[0] + 1])
    quoted, end = [index for index, id_ in enumerate(IDS) if id_ == TOKENS.token_to_id("</tool_call>")][:2]
    assert quoted < num_tokens <= end


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), max_size=120))
def test_with_logprobs_a_message_says_things_of_one_kind(sizes):
    """So that those of the text alone can be told, and are the same in every grouping. Of the whole answer at once they
    were those of all its tokens."""

    def messages_of_kinds(sizes) -> list[pb.GenerateResponse]:
        choice, messages, begin = Choice(0, streaming(), None, 0, 0, "r1"), [], 0
        for size in (*sizes, len(IDS)):
            ids = IDS[begin : begin + size]
            if ids:
                told = [pb.Logprobs(chosen=pb.TokenLogprob(token_id=each)) for each in ids]
                choice.push(ids, told, pb.FINISH_REASON_STOP if begin + size >= len(IDS) else 0)
                messages += [*choice.take_separate(), choice.take()]
            begin += size
        return messages

    def of_text(messages) -> list[int]:
        """As /v1/responses takes them."""
        found, waiting = [], []
        for message in messages:
            waiting += [each.chosen.token_id for each in message.logprobs]
            if message.text:
                found += waiting
            if message.text or message.reasoning or message.tool_calls:
                waiting = []
        return found

    messages = messages_of_kinds(sizes)
    assert joined(messages) == WHOLE and [each for message in messages for each in message.token_ids] == IDS
    for message in messages:
        assert [each.chosen.token_id for each in message.logprobs] == message.token_ids
        assert sum(map(bool, (message.text, message.reasoning, message.tool_calls))) <= 1
    assert of_text(messages) == of_text(messages_of_kinds([1] * len(IDS)))
    assert TOKENS.decode(of_text(messages)) == "\n</think>\n\nOne moment."


def test_a_message_has_the_parts_of_a_call_as_one():
    """Also where tokens are read one by one, as those of an answer that its first call ends."""
    for size in (3, 40, len(IDS)):
        for message in messages_of([size] * len(IDS), asked=streaming(is_parallel=False)):
            assert all(call.name for call in message.tool_calls[1:])
