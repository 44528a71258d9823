"""Answers of models that mark reasoning and calls: equal however they are cut, whole calls only, nothing lost."""

import json
import tracemalloc

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.parsers import answer_parser
from gateway.parsers.answer_parser import Parsed
from gateway.parsers.calls import CallPart
from gateway.parsers.formats import FORMATS, format_named, format_of
from gateway.parsers.reading import Cut, IncrementalText
from tests.gateway.parsers.joined_calls import joined

TOOLS = {"find": {"properties": {"n": {"type": "integer"}, "text": {"type": "string"}}}, "stop": {}}
# What a text of the form is made of, in any order.
ALPHABET = {
    "harmony": ("analysis", "final", "commentary", " to=functions.find", " to=functions. ", " ", "{}", '{"n": 1}', '{"a": [', '"x", ', "x"),
    "mistral": ("find", '{"text": "\t', '"', "}, ", '[{"name": "find", "arguments": {"n": 1}}]', '{"n": 1}', "{", "[", " ", "x"),
    "deepseek-dsml": ('<｜DSML｜invoke name="find">', '<｜DSML｜invoke name="">', '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>', "</｜DSML｜invoke>", "</｜DSML｜tool_calls>", "\n", "x"),
    "deepseek-v3": ("function", '{"a": [true, ', "nul", "find", "\n```json\n", '{"n": 1}', "\n```", "\n", "x"),
    "qwen-xml": ("<function=find>", "<function=>", "<parameter=n>\n1\n</parameter>", "<parameter=text>", "</function>", "\n", "x"),
    "hermes": ('{"name": "find", "arguments": {"n": 1}}', '{"name": "find", "arguments": ', '{"a": "', "\\u00e9", '"}', "[", ", ", "-1e5", "}", "]", "\n", "x"),
    "pythonic": ("[find(n=1)]", "[find(text='a]\\'", "[", "]", ", ", "x"),
    "llama-json": ('{"name": "find", "parameters": {"n": 1}}', '{"name": "find", "parameters": {"a": ', ', "id": 1}', "{", "}", ";", "\n", "x"),
    "think": ("x", " ", "\n"),
}  # fmt: skip


def parse(name: str, pieces, tools=TOOLS, prompt_end="", is_whole=False) -> Parsed:
    parser = format_named(name).parser({}, tools, prompt_end)
    found = [*map(parser.push, pieces), parser.finish(is_whole)]
    content, reasoning = ("".join(getattr(each, name) for each in found) for name in ("content", "reasoning"))
    return Parsed(content, reasoning, joined(part for each in found for part in each.calls))


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("name", ALPHABET)
@settings(max_examples=150)
@given(data=st.data())
def test_equal_over_every_chunking(name, data):
    form = format_named(name)
    words = st.sampled_from((*ALPHABET[name], *form.markers, *(form.reader.openers if form.reader else ())))
    text = "".join(data.draw(st.lists(words, max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    asked = {"prompt_end": data.draw(st.sampled_from(("", "<think>\n"))), "is_whole": data.draw(st.booleans())}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_parser, "MAX_READ_AGAIN", data.draw(st.sampled_from((1 << 16, 30, 0))))
        whole = parse(name, [text], **asked)
        assert parse(name, pieces, **asked) == whole
        assert parse(name, text, **asked) == whole
    for call in whole.calls:
        assert is_object(call.arguments) == call.is_last


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "find", "arguments": {"n": 1}'),
        ("hermes", '<tool_call>{"name": "find", "arguments": {"n": 1} ?'),
        ("harmony", " to=functions.find<|message|>{}analysis"),
    ],
)
def test_arguments_that_no_call_ends_behind_are_no_json(name, text):
    for pieces in ([text], text):
        (call,) = parse(name, pieces).calls
        assert not call.is_last and not is_object(call.arguments)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen-xml", "<tool_call><function={}></function></tool_call>"),
        ("deepseek-dsml", '<｜DSML｜calls><｜DSML｜invoke name="{}"></｜DSML｜invoke></｜DSML｜calls>'),
        ("harmony", "<|channel|>commentary to=functions.{}<|message|>{{}}<|call|>"),
    ],
)
def test_what_has_no_name_is_no_call(name, text):
    """A part without a name would continue the call before."""
    text = text.format("find") + text.format("")
    for pieces in ([text], text):
        assert parse(name, pieces).calls == [CallPart("find", "{}", True)]


@pytest.mark.parametrize("name", ALPHABET)
@settings(max_examples=60)
@given(text=st.text(st.characters(blacklist_categories=("Cs",)), max_size=60))
def test_plain_text_stays_as_it_is(name, text):
    assume(not any(marker in text for marker in format_named(name).markers))  # the library draws constants of the code
    assert parse(name, text) == Parsed(text)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_without_tools_there_are_no_calls(form):
    text = '<tool_call>{"name": "find", "arguments": {}}</tool_call>[TOOL_CALLS]find[ARGS]{}[find(n=1)]'
    if form.is_harmony:
        text = '<|channel|>commentary to=functions.find<|message|>{"n": 1}'
    assert parse(form.name, [text], tools={}).calls == []


def test_text_goes_out_at_once():
    """What cannot be the beginning of a call waits for nothing; of arguments the last character waits."""
    parser = format_named("hermes").parser({}, TOOLS, "")
    assert parser.push("The fox ").content == "The fox"
    assert parser.push("is <").content == " is"
    assert parser.push("b> here").content == " <b> here"
    assert parser.push('<tool_call>{"name": "find", "argu').calls == []
    assert parser.push('ments": {"n"').calls == [CallPart("find", '{"n', False)]
    assert parser.push(': 1, "text": "a f').calls == [CallPart("", '": 1, "text": "a ', False)]
    assert parser.push('ox"}').calls == [CallPart("", 'fox"', False)]
    assert parser.push("}").calls == [CallPart("", "}", True)]


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
        ('<think>{{ "<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}" }}', "hermes"),  # SmolLM3
        ('{"name": function name, "parameters": dict} ipython', "llama-json"),
        ('<|python_start|> {"name": function name, "parameters": dict} ipython', "llama-json"),  # Llama 4's own
        ("<|python_start|> ipython", "pythonic"),
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
    parsed = parse("hermes", [text])
    assert [call.is_last for call in parsed.calls] == [False] and parsed.content == text


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": tru}',
        '{"a": 1',
        '{"a": "\\x"}',
        '{"a": 01}',
        '{"a" 1}',
        '{"a": 1,}',
        '{"a": NaN}',
        '{"a": ' + "1" * 401 + "}",
    ],
)
def test_arguments_that_go_wrong_are_no_call_but_content(arguments):
    text = f'<tool_call>{{"name": "find", "arguments": {arguments} ]'
    body = f"{arguments} ]"
    for name, whole, content in (
        ("hermes", text, text),
        ("harmony", f"{TO_FIND}{body}", body),  # a stop token is no part of the answer
        ("harmony", f"{TO_FIND}{body}<|call|>", body),
        ("harmony", f"{TO_FIND}{body}<|start|>assistant<|channel|>final<|message|> x", f"{body}\n x"),
    ):
        parsed = parse(name, whole)
        assert [call.is_last for call in parsed.calls] == [False] and parsed.content == content
        assert not is_object(parsed.calls[0].arguments)
        assert parse(name, [whole]) == parsed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'Now.\n<tool_call>\n{"name": "find", "arguments": {"n": 1}'),
        ("hermes", '<tool_call>\n{"name": "find", "arguments": {"text": "say \\"hi}}\n</tool_call>'),
        ("qwen-xml", "Now.\n<tool_call>\n<function=find>\n<parameter=text>\nabc\n</parameter>\n"),
        ("mistral", '[TOOL_CALLS]find[ARGS]{"n": '),
        ("deepseek-v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{"n": 1}'),
        ("deepseek-dsml", '<｜DSML｜calls><｜DSML｜invoke name="find"><｜DSML｜parameter name="text" string="true">abc'),
        ("pythonic", "<|python_start|>[find(n=1"),
        ("llama-json", '<|python_tag|>{"name": "find", "parameters": {"n": 1'),
        ("harmony", '{"n": 1'),  # its <|call|> is a stop token
    ],
)  # fmt: skip
def test_a_call_that_the_model_leaves_without_an_end_is_content(name, text):
    whole = TO_FIND + text if name == "harmony" else text
    for pieces in ([whole], whole):
        parsed = parse(name, pieces, is_whole=True)
        assert parsed.content == text and not any(call.is_last for call in parsed.calls)
        cut = parse(name, pieces)
        assert len(cut.content) < len(text) and not any(call.is_last for call in cut.calls)


def test_whole_calls_stay_calls_before_one_without_an_end():
    text = '[TOOL_CALLS] [{"name": "find", "arguments": {"n": 1}}, {"name": "st'
    for pieces in ([text], text):
        assert parse("mistral-v3", pieces, is_whole=True) == Parsed(
            ', {"name": "st', "", [CallPart("find", '{"n": 1}', True)]
        )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen-xml", 'def is_call(line):\n    return line.startswith("<function=")\n\nThat is all.'),
        ("qwen-xml", "Like this:\n<function=example>\n<parameter=a>\n1\n</parameter>\n</function>\nDone."),
        ("qwen-xml", "x <tool_call> <function=a b\nc d> more"),
        ("mistral", "[TOOL_CALLS]I am sorry, I cannot call anything"),
        ("deepseek-v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find and so on"),
        ("deepseek-v31", "<｜tool▁calls▁begin｜>\n<｜tool▁calls▁end｜>"),
        ("deepseek-dsml", "<｜DSML｜calls>\n</｜DSML｜calls>"),
    ],
)
def test_what_no_call_can_begin_with_goes_out_at_once(name, text):
    parser = format_named(name).parser({}, TOOLS, "")
    assert parser.push(f"{text} x").content == f"{text} x"
    assert parse(name, text) == Parsed(text)


def test_the_opener_of_a_call_in_reasoning_does_not_end_it():
    """The end of reasoning is one character, as it is a token."""
    parser = format_named("qwen-xml").parser({"\U0010f000": "<think>", "\U0010f001": "</think>"}, TOOLS, "<think>\n")
    found = list(map(parser.push, "Lines with `<function=` are calls.\U0010f001\n\nThe answer is 4."))
    assert "".join(each.reasoning for each in found) == "Lines with `<function=` are calls."
    assert "".join(each.content for each in found) == "The answer is 4."


TO_FIND = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>"


@pytest.mark.parametrize("end", ["", "<|call|>"])
def test_a_body_that_is_no_object_is_no_call_of_gpt_oss_but_content(end):
    for body in ("print(1)", " [1]\n"):
        assert parse("harmony", f"{TO_FIND}{body}{end}") == Parsed(body)
        assert parse("harmony", f"{TO_FIND}{body}{end}", tools={}) == Parsed()
    for body in ("", " \n", "{}", ' {"n": 1} '):
        [call] = parse("harmony", f"{TO_FIND}{body}{end}").calls
        assert call == CallPart("find", body.strip() or "{}", True)


def test_messages_of_one_kind_of_gpt_oss_are_lines():
    """They had nothing between them."""
    text = "".join(
        f"<|start|>assistant<|channel|>{channel}<|message|>{text}<|end|>"
        for channel, text in (
            ("analysis", "I look."), ("commentary", "One moment."), ("analysis", ""), ("analysis", "\nI see."), ("final", "It is."),
        )
    )  # fmt: skip
    for pieces in ([text], text):
        assert parse("harmony", pieces) == Parsed("One moment.\nIt is.", "I look.\n\nI see.")


@pytest.mark.parametrize("arguments", ['"{\\"n\\": 1}"', '"[1]"', '"n"'])
def test_arguments_that_are_an_object_as_a_text_are_that_object(arguments):
    text = f'<tool_call>{{"name": "find", "arguments": {arguments}}}</tool_call>'
    expected = Parsed("", "", [CallPart("find", '{"n": 1}', True)]) if "{" in arguments else Parsed(text)
    for pieces in ([text], text):
        assert parse("hermes", pieces) == expected


@pytest.mark.parametrize("begun", ['{"n": 1', '{"n": tru', '{"text": "a'])
def test_a_call_of_gpt_oss_that_is_cut_off_is_left_out(begun):
    parsed = parse("harmony", f"{TO_FIND}{begun}")
    assert [call.is_last for call in parsed.calls] == [False] and not parsed.content


@pytest.mark.parametrize("bad", ["{1, 2}", "1e999"])
def test_a_list_of_python_calls_is_all_calls_or_all_content(bad):
    text = f"[find(a=1), find(b={bad})]"
    for pieces in ([text], text):
        assert parse("pythonic", pieces) == Parsed(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("null", None),
        (r'"a\/b"', "a/b"),
        (r'"\ud83d\ude42\u00e9"', "🙂é"),
        ('{"a": [true, {"b": null}], "c": "\\"]"}', {"a": [True, {"b": None}], "c": '"]'}),
        ('[\r\n  "ö",\n  false\r]', ["ö", False]),
        ("-1.5e3", -1500.0),
        ("True", True),
        ("None", None),
        (r"'it\'s \x41'", "it's A"),
        ("{'a': [True, (1, 2)], 'b': None}", {"a": [True, [1, 2]], "b": None}),
        ("1_000", 1000),
        ('("a" "b")', "ab"),
    ],
)
def test_values_of_python_calls_are_json_or_pythons(text, value):
    whole = f"[find(text='größer',\n  n={text}), stop(), find(n={text})]"
    for pieces in ([whole], whole):
        parsed = parse("pythonic", pieces)
        assert [call.is_last for call in parsed.calls] == [True] * 3 and not parsed.content
        first, _, last = (json.loads(call.arguments) for call in parsed.calls)
        assert (first, last) == ({"text": "größer", "n": value}, {"n": value})


@pytest.mark.parametrize("text", ["[True, null]", "NaN", "1e999", "x", "f(1)", "{1, 2}", "...", "b''"])
def test_what_is_neither_is_content(text):
    whole = f"[find(n={text})]"
    assert parse("pythonic", whole) == Parsed(whole)


@pytest.mark.parametrize("text", ["[Point(x=1, y=2), Point(x=3, y=4)]", "[find(n=1), Point(x=1)]"])
def test_without_a_marker_python_calls_are_those_of_tools(text):
    for pieces in ([text], text):
        assert parse("pythonic", pieces) == Parsed(text)
        behind_a_marker = parse("pythonic", ["<|python_start|>", *pieces])
        assert [call.is_last for call in behind_a_marker.calls] == [True, True] and not behind_a_marker.content


@pytest.mark.parametrize("name", ["hermes", "qwen-xml"])
def test_half_of_a_surrogate_pair_stays_json(name):
    text = '{"name": "find", "arguments": {"n": "\\ud800\n"}}' if name == "hermes" else QUOTED
    [call] = parse(name, f"<tool_call>{text}</tool_call>").calls
    assert json.loads(call.arguments.encode())["n"].startswith("\ud800")


QUOTED = '<function=find><parameter=n>"\\ud800"</parameter></function>'


def test_long_arguments_in_many_pieces_are_whole():
    text = '<tool_call>{"name": "find", "arguments": {"text": "' + "x" * 200_000 + '"}}</tool_call>'
    pieces = [text[begin : begin + 4] for begin in range(0, len(text), 4)]
    [call] = parse("hermes", pieces).calls
    assert len(json.loads(call.arguments)["text"]) == 200_000


@pytest.mark.parametrize(
    ("name", "begun", "more"),
    [
        ("hermes", '<tool_call>{"name": "find", "arguments": {"text": "', "x"),
        ("harmony", '<|channel|>commentary to=functions.find<|message|>{"text": "', "x"),
        ("qwen-xml", "<tool_call><function=find><parameter=text>", "x"),
        ("deepseek-dsml", '<｜DSML｜function_calls><｜DSML｜invoke name="find"><｜DSML｜parameter name="text" string="true">', "x"),
        ("hermes", "x", " "),
        ("think", "<think>x", " "),
    ],
)  # fmt: skip
def test_what_has_come_is_not_copied_for_each_token(name, begun, more):
    """Of one call of 120,000 tokens that took 1.3 to 24 s of the event loop; blanks that may stand before a call, or
    end the reasoning, took as long."""
    parser = format_named(name).parser({}, TOOLS, "")
    parser.push(begun)
    for _ in range(100):  # Python lengthens a text where it is once it has seen that the code does that
        parser.push(more)
    parser.push(more * 4_000_000)
    tracemalloc.start()
    try:
        parser.push(more * 3)  # from here on the text is known to what counts
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        parser.push(more * 4)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most - before < 1_000_000


@pytest.mark.parametrize("begun", ["[find", "[\nfind", "<|python_start|>[find"])
@pytest.mark.parametrize("more", ["a", " "])
def test_a_list_of_python_calls_has_its_first_parenthesis_soon(begun, more):
    """All before it was read again at each token: 12 ms where 640,000 characters had come."""
    whole = begun + more * 2_000
    parser = format_named("pythonic").parser({}, TOOLS, "")
    assert parser.push(whole + "x").content == whole + "x"
    for size in (1, 7, len(whole)):
        pieces = [whole[begin : begin + size] for begin in range(0, len(whole), size)]
        assert parse("pythonic", [*pieces, "(n=1)]"]) == Parsed(whole + "(n=1)]")


BEGUN = "<function=find><parameter=text>" * 4_000
MANY_FUNCTIONS = BEGUN + "</parameter><parameter=n>1e999</parameter></function>"


@pytest.mark.parametrize(
    ("name", "whole", "parsed"),
    [
        ("pythonic", text := "<|python_start|>[f(" * 2_000 + ")]" * 2_000, Parsed(text)),
        ("pythonic", text := "[f(1), " + "<|python_start|>[f(" * 2_000 + ")]" * 2_000 + "]", Parsed(text)),
        ("mistral", text := "[TOOL_CALLS]x[CALL_ID]" * 4_000 + "[ARGS]x", Parsed(text)),
        ("mistral", '[TOOL_CALLS]find[ARGS]{"n": 1}' + text, Parsed(text, "", [CallPart("find", '{"n": 1}', True)])),
        ("qwen-xml", BEGUN, Parsed(BEGUN)),
        ("qwen-xml", "<think>" + MANY_FUNCTIONS + "</think><function=find></function>", Parsed("<function=find></function>", MANY_FUNCTIONS)),
    ],
)  # fmt: skip
def test_what_goes_wrong_as_calls_is_read_again_up_to_a_bound(name, whole, parsed, monkeypatch):
    """Each opener in it may begin what goes wrong again: one answer would hold all the others up."""
    reader, num_read = format_named(name).reader, []
    read = reader.read

    def counted(self, source, opener):
        begin = source.at
        try:
            yield from read(self, source, opener)
        except Cut:
            source.at = len(source.text)
            raise
        finally:
            num_read.append(source.at - begin)

    monkeypatch.setattr(reader, "read", counted)
    for size in (len(whole), 1_000, 7):
        num_read.clear()
        pieces = [whole[begin : begin + size] for begin in range(0, len(whole), size)]
        assert parse(name, pieces, is_whole=True) == parsed
        assert sum(num_read) < 2 * len(whole) + answer_parser.MAX_READ_AGAIN


def test_what_follows_is_not_copied_for_each_opener(monkeypatch):
    whole, forget, num_copied = "[TOOL_CALLS]" * 8_000, IncrementalText.forget, []

    def counted(source):
        text = source.text
        forget(source)
        num_copied.append(0 if source.text is text else len(source.text))

    monkeypatch.setattr(IncrementalText, "forget", counted)
    parser = format_named("mistral").parser({}, TOOLS, "")
    assert parser.push(whole + "{").content == whole + "{"
    assert sum(num_copied) < 2 * len(whole)
