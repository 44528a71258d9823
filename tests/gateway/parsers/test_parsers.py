"""Answers of models that mark reasoning and calls: equal however they are cut, whole calls only, nothing lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.parsers.answer_parser import FoundCall, Parsed
from gateway.parsers.formats import FORMATS, format_named, format_of

TOOLS = {"find": {"properties": {"n": {"type": "integer"}, "text": {"type": "string"}}}, "stop": {}}
# What a text of the form is made of, in any order.
ALPHABET = {
    "harmony": ("analysis", "final", "commentary", " to=functions.find", " ", "{}", '{"n": 1}', "x"),
    "mistral": ("find", '[{"name": "find", "arguments": {"n": 1}}]', '{"n": 1}', "{", "[", " ", "x"),
    "deepseek-dsml": ('<｜DSML｜invoke name="find">', '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>', "</｜DSML｜invoke>", "</｜DSML｜tool_calls>", "\n", "x"),
    "deepseek-v3": ("function", "find", "\n```json\n", '{"n": 1}', "\n```", "\n", "x"),
    "qwen-xml": ("<function=find>", "<parameter=n>\n1\n</parameter>", "<parameter=text>", "</function>", "\n", "x"),
    "hermes": ('{"name": "find", "arguments": {"n": 1}}', '{"a": "', "}", "\n", "x"),
    "pythonic": ("[find(n=1)]", "[find(text='a]\\'", "[", "]", ", ", "x"),
    "llama-json": ('{"name": "find", "parameters": {"n": 1}}', "{", "}", ";", "\n", "x"),
    "think": ("x", " ", "\n"),
}  # fmt: skip


def parse(name: str, pieces, tools=TOOLS, prompt_end="") -> Parsed:
    parser = format_named(name).parser({}, tools, prompt_end)
    found = [*map(parser.push, pieces), parser.finish()]
    calls = [call for each in found for call in each.calls]
    return Parsed("".join(each.content for each in found), "".join(each.reasoning for each in found), calls)


@pytest.mark.parametrize("name", ALPHABET)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_equal_over_every_chunking(name, data):
    form = format_named(name)
    words = st.sampled_from((*ALPHABET[name], *form.markers, *(form.reader.openers if form.reader else ())))
    text = "".join(data.draw(st.lists(words, max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    prompt_end = data.draw(st.sampled_from(("", "<think>\n")))
    whole = parse(name, [text], prompt_end=prompt_end)
    assert parse(name, pieces, prompt_end=prompt_end) == whole
    assert parse(name, text, prompt_end=prompt_end) == whole
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls)


@pytest.mark.parametrize("name", [name for name in ALPHABET if name != "harmony"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(blacklist_categories=("Cs",)), max_size=60))
def test_plain_text_stays_as_it_is(name, text):
    assert parse(name, text) == Parsed(text)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_without_tools_there_are_no_calls(form):
    text = '<tool_call>{"name": "find", "arguments": {}}</tool_call>[TOOL_CALLS]find[ARGS]{}[find(n=1)]'
    if form.is_harmony:
        text = '<|channel|>commentary to=functions.find<|message|>{"n": 1}'
    assert parse(form.name, [text], tools={}).calls == []


def test_text_goes_out_at_once():
    """What cannot be the beginning of a call waits for nothing."""
    parser = format_named("hermes").parser({}, TOOLS, "")
    assert parser.push("The fox ").content == "The fox"
    assert parser.push("is <").content == " is"
    assert parser.push("b> here").content == " <b> here"
    assert parser.push('<tool_call>{"name": "find", ').calls == []
    assert parser.push('"arguments": {"n": 1}}').calls == [FoundCall("find", '{"n": 1}')]


def test_characters_stand_for_control_tokens():
    """Where the tokenizer has markers as tokens, the same words in a text are a text."""
    spellings = {"\U0010f000": "<think>", "\U0010f001": "</think>"}
    parser = format_named("think").parser(spellings, {}, "")
    parsed = parser.push("\U0010f000I write </think> here\U0010f001<think>\U0010f001")
    assert (parsed.reasoning, parsed.content) == ("I write </think> here", "<think></think>")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|start|>{{ role }}<|channel|>final<|message|>", "harmony"),
        ("{{ '[TOOL_CALLS]' }}", "mistral-v3"),
        ("<tool_call>\\n<function=example>", "qwen-xml"),
        ('<tool_call>{"name": {{ name }}, "arguments": {{ arguments }}}</tool_call><think>', "hermes"),
        ('{"name": function name, "parameters": dict} ipython', "llama-json"),
        ("<|python_start|>", "pythonic"),
        ("<｜tool▁calls▁begin｜>", "deepseek-v31"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek-v3"),
        ("<｜DSML｜function_calls>", "deepseek-dsml"),
        ("{{ '<think>' }}", "think"),
    ],
)
def test_the_form_comes_from_the_chat_template(template, name):
    assert format_of(template).name == name


def test_a_template_without_marks_has_no_form():
    assert format_of("{% for message in messages %}{{ message.content }}{% endfor %}") is None


@pytest.mark.parametrize("depth", [300, 100_000])
def test_depth_is_bounded(depth):
    text = '<tool_call>{"name": "find", "arguments": ' + '{"a":' * depth + "1" + "}" * depth + "}</tool_call>"
    assert parse("hermes", [text]).calls == []


def test_long_arguments_in_many_pieces_are_whole():
    text = '<tool_call>{"name": "find", "arguments": {"text": "' + "x" * 400_000 + '"}}</tool_call>'
    pieces = [text[begin : begin + 4] for begin in range(0, len(text), 4)]
    [call] = parse("hermes", pieces).calls
    assert len(json.loads(call.arguments)["text"]) == 400_000
