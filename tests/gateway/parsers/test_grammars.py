"""Grammars of answers: whatever keeps to one is read as calls of its tools, or keeps to its constraint."""

import itertools
import json
import re
import tracemalloc

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.constraints.constraint import MAX_CHOICES, Constraint
from baton.constraints.grammar import Vocabulary
from baton.constraints.loosening import loosened
from baton.service.errors import InvalidRequest
from gateway.parsers.answer_grammar import GrammarAsked, answer_grammar
from gateway.parsers.formats import FORMATS, format_named
from gateway.request.messages import MAX_TOOLS
from tests.gateway.parsers.joined_calls import joined
from tests.support.gateway.small_tokenizers import byte_level

TOOLS = {
    "find": {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "n": {"$ref": "#/$defs/small"}, "deep": {"type": "boolean"}},
        "required": ["kind", "n"],
        "additionalProperties": False,
        "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
STRING = {"type": "string"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
WITH_CALLS = [form.name for form in FORMATS if form.calls]
_CHARACTERS = 0x10F000


class Model:
    """A tokenizer that has the markers of a form as tokens, or has them not."""

    def __init__(self, name: str, has_tokens: bool = True):
        self.form = format_named(name)
        source = byte_level(unspecial=self.form.markers if has_tokens else ())
        self.tokens = Tokenizer.from_str(source.decode())
        self.vocabulary = Vocabulary(source, self.tokens.get_vocab_size())
        known = {marker: self.tokens.token_to_id(marker) for marker in self.form.markers}
        self.control_ids = {marker: id_ for marker, id_ in known.items() if id_ is not None}
        self.spellings = {chr(_CHARACTERS + n): marker for n, marker in enumerate(self.control_ids)}

    def grammar(self, asked: GrammarAsked, prompt_end: str = ""):
        text = answer_grammar(self.form, self.control_ids, prompt_end, asked)
        return self.vocabulary.compile(Constraint("grammar", text))

    def draw(self, grammar, seed: int) -> str | None:
        """An answer, drawn by chance among those that keep to the grammar; None for one that has no end."""
        draws, cursor, ids = np.random.default_rng(seed), grammar.cursor(), []
        mask, ends = self.vocabulary.new_masks(1)[0], [*self.control_ids.values(), *map(self.tokens.token_to_id, '"}')]
        while cursor.fill(mask) and not cursor.is_over and len(ids) < 400:
            if cursor.may_end and draws.random() < 0.5:
                break
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed < self.vocabulary.vocab_size]
            ending = np.intersect1d(allowed, ends)  # often enough for answers that end
            ids.append(int(draws.choice(ending if len(ending) and draws.random() < 0.3 else allowed)))
            cursor.read(ids)
        return self.text(ids) if cursor.is_over or cursor.may_end else None

    def text(self, ids: list[int]) -> str:
        """The text as parsers get it."""
        characters = {self.control_ids[marker]: char for char, marker in self.spellings.items()}
        parts, plain = [], []
        for id_ in [*ids, None]:
            if id_ is None or id_ in characters:
                parts += [self.tokens.decode(plain), characters.get(id_, "")]
                plain = []
            else:
                plain.append(id_)
        return "".join(parts)

    def parse(self, text: str, prompt_end: str = ""):
        parser = self.form.parser(self.spellings, TOOLS, prompt_end)
        found = [parser.push(text), parser.finish(is_whole=False)]
        calls = joined(part for each in found for part in each.calls)
        return "".join(each.content for each in found), [call for call in calls if call.is_last]


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", WITH_CALLS)
def test_what_must_be_calls_is_read_as_calls(name, has_tokens):
    model = Model(name, has_tokens)
    grammar = model.grammar(GrammarAsked(TOOLS, True, True, None))
    texts = [text for seed in range(60) if (text := model.draw(grammar, seed)) is not None]
    assert len(texts) > 5
    nums = set()
    for text in texts:
        content, calls = model.parse(text)
        assert calls and not content, text
        nums.add(len(calls))
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])
    assert name == "harmony" or max(nums) > 1


@pytest.mark.parametrize("name", WITH_CALLS)
def test_one_call_where_several_are_not_wanted(name):
    model = Model(name)
    grammar = model.grammar(GrammarAsked({"find": TOOLS["find"]}, True, False, None))
    texts = [text for seed in range(40) if (text := model.draw(grammar, seed)) is not None]
    assert texts and all([call.name for call in model.parse(text)[1]] == ["find"] for text in texts)


@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize("name", WITH_CALLS)
def test_as_many_tools_as_a_request_may_have_can_be_called(name, must_call):
    """A bracket that stands in a text of the grammar is none that nests."""
    model, tools = Model(name), {f"stop_{number}": TOOLS["stop"] for number in range(MAX_TOOLS)}
    grammar = model.grammar(GrammarAsked(tools, must_call, True, None))
    texts = [text for seed in range(60) if (text := model.draw(grammar, seed)) is not None]
    assert texts


@pytest.mark.parametrize("types", [{}, {"type": ["object", "null"]}])
@pytest.mark.parametrize("name", WITH_CALLS)
def test_arguments_are_an_object_whatever_their_schema_says(name, types):
    model = Model(name)
    tools = {"find": types | {"properties": {"n": {"type": "integer"}}, "additionalProperties": False}}
    grammar = model.grammar(GrammarAsked(tools, True, False, None))
    texts = [text for seed in range(40) if (text := model.draw(grammar, seed)) is not None]
    assert texts and all([call.name for call in model.parse(text)[1]] == ["find"] for text in texts)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_constraint_holds_behind_reasoning_or_there_are_calls(name):
    model = Model(name)
    grammar = model.grammar(GrammarAsked(TOOLS, False, True, ("json_schema", json.dumps(SCHEMA))))
    texts = [text for seed in range(60) if (text := model.draw(grammar, seed)) is not None]
    kinds = set()
    for text in texts:
        content, calls = model.parse(text)
        kinds.add(bool(calls))
        if not calls:
            jsonschema.validate(json.loads(content), SCHEMA)
    assert kinds == {True, False}


@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_keep_to_their_schemas_where_text_may_come(name):
    model = Model(name)
    grammar = model.grammar(GrammarAsked(TOOLS, False, True, None))
    texts = [text for seed in range(120) if (text := model.draw(grammar, seed)) is not None]
    kinds = set()
    for text in texts:
        content, calls = model.parse(text)
        kinds.add((bool(content), bool(calls)))
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])
    # By chance no text begins as a call of Llama does, or of DeepSeek with what stands before its token.
    is_drawn = name not in ("llama-json", "pythonic", "deepseek-dsml")
    assert kinds >= ({(True, False), (False, True)} if is_drawn else {(True, False)})


@pytest.mark.parametrize(
    ("name", "head", "others"),
    [
        ("hermes", '<tool_call>\n{"name": "find", "arguments": ', ["{}", '{"x": [1, "y"]}']),
        ("harmony", "<|channel|>commentary to=functions.find <|constrain|>json<|message|>", ["{}", '{"x": [1, "y"]}']),
        (
            "qwen-xml",
            "<tool_call>\n<function=find>\n",
            ["</function>", "<parameter=x>\n[1]\n</parameter>\n</function>"],
        ),
        (
            "deepseek-dsml",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n',
            [
                "</｜DSML｜invoke>",
                '<｜DSML｜parameter name="x" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>',
            ],
        ),
        ("pythonic", "[find(", [")]", 'x=[1, "y"], classy=null)]']),
    ],
)
def test_one_that_is_not_strict_takes_any_arguments(name, head, others):
    model = Model(name)
    for tools, is_kept in ((TOOLS, True), (TOOLS | {"find": None}, False)):
        grammar = model.grammar(GrammarAsked(tools, False, True, None))
        for text in others:
            ids = model.tokens.encode(head + text).ids
            assert (grammar.cursor().num_valid(ids) == len(ids)) != is_kept, text


LOOKING = {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}  # pydantic's Decimal
UNKEPT = {  # what no grammar has, beside what one has
    "type": "object",
    "properties": {
        "price": {"anyOf": [{"type": "number"}, LOOKING]},
        "marks": {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}},
        "name": {"type": "string", "format": "rhyme", "not": {"const": "x"}, "enum": ["x", "y"]},
        "kind": {"enum": ["a", "b"], "hint": "an unknown word"},
    },
    "required": ["price", "marks", "name", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "name", [name for name in WITH_CALLS if name not in ("qwen-xml", "deepseek-dsml")]
)  # whose texts end by no chance
def test_a_schema_is_kept_to_as_far_as_can_be(name):
    model, kinds = Model(name), {"kind": {"enum": ["a", "b"]}, "marks": {"items": {"enum": [1, 2]}}}
    tools = {"find": loosened(UNKEPT), "stop": TOOLS["stop"]}
    grammar = model.grammar(GrammarAsked(tools, True, False, None, loose=("find",)))
    texts = [text for seed in range(120) if (text := model.draw(grammar, seed)) is not None]
    calls = [call for text in texts for call in model.parse(text)[1] if call.name == "find"]
    assert len(calls) > 3
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), {"required": UNKEPT["required"], "properties": kinds})


def test_arguments_between_tags_are_kept_to_as_far_as_can_be():
    model = Model("qwen-xml")
    grammar = model.grammar(GrammarAsked({"find": loosened(UNKEPT)}, True, False, None, loose=("find",)))
    for marks, kind in (("[1, 1]", "a"), ("[3]", "a"), ("[1]", "c")):
        arguments = {"price": "1.5", "marks": marks, "name": "z", "kind": kind}
        parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        answer = f"<tool_call>\n<function=find>\n{parts}</function>\n</tool_call>"
        assert is_accepted(model, grammar, answer) == (marks == "[1, 1]")


def test_several_tools_may_take_any_arguments():
    """The name of an argument was a word that the grammar said twice."""
    for name in WITH_CALLS:
        model = Model(name)
        grammar = model.grammar(GrammarAsked(TOOLS | {"find": None, "look": None}, False, True, None))
        assert any(model.draw(grammar, seed) is not None for seed in range(20)), name


@pytest.mark.parametrize(
    "schema",
    [
        {"required": ["a"]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
        {"properties": {"a": {"not": {"const": "x"}}}},
        {"properties": {"a": STRING | {"enum": [1]}}},
    ],
)
def test_what_tags_cannot_keep_to_binds_nothing_of_a_tool_that_is_not_strict(schema):
    model = Model("qwen-xml")
    grammar = model.grammar(GrammarAsked({"find": schema}, True, False, None, loose=("find",)))
    answer = "<tool_call>\n<function=find>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    assert is_accepted(model, grammar, answer)


CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
LLAMA_CALL = '{"name": "stop", "parameters": {}}'
DSML_CALL = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
HARMONY_CALL = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("name", "text", "is_whole"),
    [
        ("hermes", "", True),
        ("hermes", "{}", True),
        ("hermes", "Well.\n\n" + CALL, True),
        ("hermes", f"<think>a\n</think>\n\nWell.{CALL}\n{CALL}", True),
        ("hermes", f"<think>a</think>\n\n{CALL}", True),
        ("hermes", "<think>a</think> \n b", True),
        ("hermes", CALL.replace("{}", '{"a": 1}'), False),
        ("hermes", CALL.replace("stop", "other"), False),
        ("hermes", f"{CALL} Well.", False),
        ("qwen-xml", "Well.\n<tool_call>\n<function=stop>\n</function>\n</tool_call>", True),
        ("qwen-xml", "Well. <function=other>\n</function>", False),
        ("mistral", "Well.[TOOL_CALLS]stop[ARGS]{}[TOOL_CALLS]stop[ARGS]{}", True),
        ("mistral", "Well.[TOOL_CALLS]other[ARGS]{}", False),
        ("mistral-v3", 'Well.[TOOL_CALLS] [{"name": "stop", "arguments": {}}]', True),
        ("mistral-v3", 'Well.[TOOL_CALLS] [{"name": "stop", "arguments": {"a": 1}}]', False),
        ("llama-json", "Well. " + LLAMA_CALL, True),
        ("llama-json", LLAMA_CALL, True),
        ("llama-json", " \n", True),
        ("llama-json", "\n{}", False),
        ("pythonic", "[stop(), stop()]", True),
        ("pythonic", "Well. [stop(a=1)]", True),
        ("pythonic", "\n[1]", False),
        ("pythonic", "[stop(a=1)]", False),
        ("pythonic", "[other()]", False),
        ("pythonic", "[stop()] Well.", False),
        ("deepseek-dsml", f"Well.\n\n{DSML_CALL}", True),
        ("deepseek-dsml", DSML_CALL, True),
        ("deepseek-dsml", "1 < 2 </ 3", True),
        ("deepseek-dsml", DSML_CALL.replace("stop", "other"), False),
        ("deepseek-dsml", f"{DSML_CALL} Well.", False),
        ("harmony", "<|channel|>final<|message|>Well.", True),
        ("harmony", PREAMBLE + HARMONY_CALL, True),
        ("harmony", HARMONY_CALL.replace("stop", "other"), False),
    ],
)
def test_what_may_be_text_or_calls(name, text, is_whole):
    for has_tokens in (True, False):
        model = Model(name, has_tokens)
        assert is_accepted(model, model.grammar(GrammarAsked(TOOLS, False, True, None)), text) == is_whole


def is_accepted(model: Model, grammar, text: str) -> bool:
    cursor, ids = grammar.cursor(), model.tokens.encode(text).ids
    if cursor.num_valid(ids) < len(ids):
        return False
    cursor.read(ids)
    cursor.fill(model.vocabulary.new_masks(1)[0])
    return cursor.is_over or cursor.may_end


@pytest.mark.parametrize(
    ("constraint", "texts", "others"),
    [
        (("regex", r"a/b[c/d]\/\nx"), ["a/b//\nx", "a/bc/\nx"], ["a/bc/x"]),
        (("regex", "[^[a&&b]{2}[[x]"), ["cdx", "cd["], ["c&x", "adx", "cd]"]),
        (("choice", '["yes", "no\\"/"]'), ["yes", 'no"/'], ["no"]),
        (("json_object", ""), ['{"a": 1}'], ["[1]"]),
        (("json_schema", r'{"type": "string", "pattern": "^[^\"]+$"}'), [r'"a\\\n"'], [r'"a\""']),
        (("json_schema", '{"type": "array", "uniqueItems": false}'), ["[1, 1]"], ["1"]),
    ],
)
def test_every_constraint_may_follow_reasoning(constraint, texts, others):
    model = Model("think")
    grammar = model.grammar(GrammarAsked({}, False, True, constraint), "<think>\n")
    for text in (*texts, *others):
        assert is_accepted(model, grammar, f"hm</think>\n\n{text}") == (text in texts), text


def test_a_choice_of_many_texts_may_stand_beside_calls():
    """Each a rule of its own, they would be more than the parser takes."""
    model, texts = Model("hermes"), [f"text {number}" for number in range(MAX_CHOICES)]
    grammar = model.grammar(GrammarAsked(TOOLS, False, True, ("choice", json.dumps(texts))))
    cursor, ids = grammar.cursor(), model.tokens.encode(texts[-1]).ids
    assert cursor.num_valid(ids) == len(ids)
    cursor.read(ids)
    assert cursor.fill(model.vocabulary.new_masks(1)[0]) and cursor.may_end


def test_nothing_is_bound_where_nothing_has_to_be():
    model, loose = Model("hermes"), dict.fromkeys(TOOLS)
    for tools, constraint in ((loose, None), ({}, None), (TOOLS, ("grammar", 'start: "x"'))):
        assert answer_grammar(model.form, model.control_ids, "", GrammarAsked(tools, False, True, constraint)) is None
    plain = Model("hermes", has_tokens=False)  # no reasoning, and no tools: the constraint alone
    asked = GrammarAsked({}, False, True, ("regex", "x"))
    assert answer_grammar(plain.form, plain.control_ids, "", asked) is None


CHOSEN = {"C": {"enum": ["a", "b"], "type": "string"}, "N": {"type": "integer"}}
TEXTS = [  # a schema, and texts that keep to it, and others
    (STRING | {"pattern": "^[0-9]{2}$"}, ["12"], ["1", "123", "x"]),
    (STRING | {"pattern": r"^[^[\]]+$"}, ["ab"], ["a[", "]"]),
    (STRING | {"pattern": r"^\d[\d_]\w$"}, ["12a", "1_Z"], ["१2a", "1१a", "12é"]),
    (STRING | {"pattern": r"^\D[^\w]\W$"}, ["a--"], ["1--", "a_-", "a-_"]),
    (STRING | {"pattern": "b|c\\$"}, ["abc", "c$"], ["a", ""]),
    (STRING | {"pattern": r"^a\\$"}, ["a\\"], ["a", "a\\b", "a$"]),
    (STRING | {"pattern": r"^a\\\$"}, ["a\\$", "a\\$b"], ["a\\"]),
    (STRING | {"minLength": 2, "maxLength": 3}, ["ab", "a\n", "abc"], ["a", "abcd"]),
    (STRING | {"minLength": 9, "maxLength": 2000}, ["a\n</param>"], ["a", "a\n</parameter>\n<parameter=b>"]),
    (STRING | {"enum": ["a", "bc", None], "maxLength": 1}, ["a"], ["bc", "null"]),
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", "null"], ["b"]),
    ({"type": ["string", "null"], "maxLength": 2}, ["ab", "null"], ["abc"]),
    ({"anyOf": [{"enum": ["a"]}, {"type": "null"}]}, ["a", "null"], ["b"]),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    ({"enum": ["a", 1]}, ["a"], ["1", "b"]),
    ({"const": "a"}, ["a"], ["b"]),
    ({"$ref": "#/$defs/C"}, ["a", "b"], ["c"]),
    ({"allOf": [{"$ref": "#/$defs/C"}, {"enum": ["b", "c"]}]}, ["b"], ["a", "c"]),
    ({"allOf": [{"$ref": "#/$defs/N"}]}, ["7"], ["x", '"7"']),
    ({"properties": {"x": {"type": "integer"}}, "required": ["x"], "type": "object"}, ['{"x": 1}'], ["x"]),
    ({"allOf": [{"items": {"type": "integer"}}]}, ["[1]"], ["[x]"]),
    ({"anyOf": [STRING, {"type": "integer"}]}, ["7", "x"], []),
    ({}, ["7", "", "a\n"], ["a\n<parameter=b>\n"]),
]


@pytest.mark.parametrize(("schema", "texts", "others"), TEXTS)
def test_arguments_between_tags_keep_to_their_schema(schema, texts, others):
    model, others = Model("qwen-xml"), [*others, "a\n</function>\n</tool_call>"]
    tool = {"$ref": "#/$defs/T", "$defs": CHOSEN | {"T": {"properties": {"a": schema}, "required": ["a"]}}}
    grammar = model.grammar(GrammarAsked({"find": tool}, True, False, None))
    parts = ("<function=find>\n<parameter=a>\n", "\n</parameter>\n</function>\n")
    for text in (*texts, *others):
        answer = f"<tool_call>\n{parts[0]}{text}{parts[1]}</tool_call>"
        ids, cursor = model.tokens.encode(answer).ids, grammar.cursor()
        assert (cursor.num_valid(ids) == len(ids)) == (text in texts), text
        if text in texts:
            parser = model.form.parser({}, {"find": tool}, "")
            (call,) = joined([*parser.push(answer).calls, *parser.finish(is_whole=False).calls])
            jsonschema.validate(json.loads(call.arguments), tool)


WITH_NULL = {"type": ["string", "null"], "enum": ["a", None]}


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        (STRING, ['true">a</b>\n<c', 'true">'], ['false">"a"']),
        (STRING | {"pattern": "^[0-9]{2}$"}, ['true">12'], ['true">1', 'false">12', 'false">"12"']),
        (WITH_NULL, ['true">a', 'false">null'], ['true">null', 'true">b']),
        ({"$ref": "#/$defs/N"}, ['false">7'], ['true">7', 'false">x']),
        ({"anyOf": [STRING, {"type": "integer"}]}, ['true">7', 'false">7'], ['false">[7]']),
        ({"type": "array", "items": {"type": "integer"}}, ['false">[1, 2]'], ['false">["1"]', 'true">[1]']),
        ({}, ['true">a', 'false">[1]'], ['false">x']),
        (True, ['true">a', 'false">[1]'], ['false">x']),
    ],
)
def test_arguments_between_tags_that_name_their_kind(has_tokens, schema, texts, others):
    model = Model("deepseek-dsml", has_tokens)
    tool = {"properties": {"a": schema}, "required": ["a"], "$defs": CHOSEN}
    grammar = model.grammar(GrammarAsked({"find": tool}, True, False, None))
    head, behind = DSML_CALL.replace("stop", "find").split("</｜DSML｜invoke>")
    for text in (*texts, *others):
        answer = f'{head}<｜DSML｜parameter name="a" string="{text}</｜DSML｜parameter>\n</｜DSML｜invoke>{behind}'
        assert is_accepted(model, grammar, answer) == (text in texts), text
        if text in texts:
            parser = model.form.parser({}, {"find": tool}, "")
            (call,) = joined([*parser.push(answer).calls, *parser.finish(is_whole=False).calls])
            jsonschema.validate(json.loads(call.arguments), tool)


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize(
    "behind",
    ["zzz", '<｜DSML｜parameter name="evil" string="true">y', '</｜DSML｜invoke><｜DSML｜invoke name="other">'],
)
def test_a_text_between_tags_ends_where_it_is_read_to_end(has_tokens, behind):
    """Behind its tag there had to be an end of a line for the grammar, and not for who reads."""
    model = Model("deepseek-dsml", has_tokens)
    tool = {"properties": {"a": STRING}, "required": ["a"], "additionalProperties": False}
    grammar = model.grammar(GrammarAsked({"find": tool}, True, False, None))
    head, end = DSML_CALL.replace("stop", "find").split("</｜DSML｜invoke>")
    answer = f'{head}<｜DSML｜parameter name="a" string="true">x < 2\n{{}}</｜DSML｜parameter>\n</｜DSML｜invoke>{end}'
    assert is_accepted(model, grammar, answer.format(""))
    assert not is_accepted(model, grammar, answer.format(f"</｜DSML｜parameter>{behind}"))


@pytest.mark.parametrize("key", ['a"b', "a>b", "a\nb"])
def test_a_name_that_no_tag_has(key):
    model = Model("deepseek-dsml")
    with pytest.raises(InvalidRequest, match="messages.tools: find: .* has a name that no tag has"):
        model.grammar(GrammarAsked({"find": {"properties": {key: {}}}}, True, False, None))
    grammar = model.grammar(GrammarAsked({"find": {"properties": {key: {}}}}, True, False, None, loose=("find",)))
    assert is_accepted(model, grammar, DSML_CALL.replace("stop", "find"))


REFERRING = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "x": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "y": {"type": "array", "items": {"$ref": "#/properties/n"}},
        "z": {"$ref": "#/definitions/Record%3Cstring,a~1b%3E"},
    },
    "additionalProperties": False,
    "definitions": {"Record<string,a/b>": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen-xml", "<tool_call>\n<function=find>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"),
        (
            "deepseek-dsml",
            DSML_CALL.replace("stop", "find").replace(
                "</｜DSML｜invoke>",
                '<｜DSML｜parameter name="{}" string="false">{}</｜DSML｜parameter>\n</｜DSML｜invoke>',
            ),
        ),
        ("pythonic", "[find({}={})]"),
        ("hermes", '<tool_call>\n{{"name": "find", "arguments": {{"{}": {}}}}}\n</tool_call>'),
    ],
)
@pytest.mark.parametrize(
    ("key", "values", "others"),
    [
        ("x", ['{"n": 1}', '{"x": {"y": [2]}}', "null"], ["[]", '{"a": 1}', '{"x": 1}']),
        ("y", ["[1, 2]"], ['["a"]', "1"]),
        ("z", ["[]", '[{"z": [{"n": 1}]}]'], ["[1]", "{}", '[{"z": 1}]']),
    ],
)
def test_a_reference_within_an_argument_leads_to_a_part_of_the_tools_schema(name, call, key, values, others):
    """To the argument itself it led, or nowhere."""
    model = Model(name)
    grammar = model.grammar(GrammarAsked({"find": REFERRING}, True, False, None))
    for value in (*values, *others):
        answer = call.format(key, value)
        assert is_accepted(model, grammar, answer) == (value in values), value
        if value in values:
            parser = model.form.parser({}, {"find": REFERRING}, "")
            (read,) = joined([*parser.push(answer).calls, *parser.finish(is_whole=False).calls])
            assert json.loads(read.arguments) == {key: json.loads(value)}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"required": ["a"]}, "find: requires 'a'"),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "find: has anyOf at its root"),
        ({"$ref": "#/$defs/none"}, r"find: has \$ref at its root"),
        ({"properties": {"a": {"not": {"const": "x"}}}}, "find: 'a' has not,"),
        ({"properties": {"a": STRING | {"maxLength": "3}"}}}, "find: 'a' has a minLength or maxLength"),
        ({"properties": {"a": STRING | {"pattern": 3}}}, "find: 'a' has a pattern that is no text"),
        (
            {"properties": {"a": STRING | {"pattern": "(?=b)b", "format": "date"}}},
            "find: 'a' has a pattern with look-around",
        ),
        ({"properties": {"a": STRING | {"enum": [1]}}}, "find: 'a' has a schema that no text keeps to"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, r"find: 'a' has a \$ref that names nothing"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "find: 'a' has references or alternatives more than"),
        ({"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 9}}}, "more than"),
        ({"properties": {"a": {"anyOf": [{"anyOf": [{}] * 100}] * 100}}}, "grammar of more than"),
    ],
)
def test_what_tags_cannot_keep_to_is_refused(schema, problem):
    model = Model("qwen-xml")
    with pytest.raises(InvalidRequest, match=f"messages.tools: .*{problem}"):
        model.grammar(GrammarAsked({"find": schema}, True, False, None))


def test_a_definition_that_stands_in_many_arguments_is_not_written_until_it_fills_the_memory():
    model = Model("qwen-xml")
    shared = {"n": {"description": "x" * 10_000, "type": "integer"}}
    properties = {f"a{n}": {"$ref": "#/$defs/n"} for n in range(10_000)}
    tools = {"find": {"properties": properties, "$defs": shared}}
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match="grammar of more than"):
        answer_grammar(model.form, model.control_ids, "", GrammarAsked(tools, True, True, None))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_parts_that_stand_in_one_another_are_not_written_until_they_fill_the_memory():
    model, deep = Model("qwen-xml"), {"description": "x" * 50_000}
    for _ in range(50):
        deep = {"properties": {"a": deep}}
    references = [{"$ref": "#/properties/a" + "/properties/a" * n} for n in range(50)]
    tools = {"find": {"properties": {"a": deep, "b": {"type": "object", "anyOf": references}}}}
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match="grammar of more than"):
        answer_grammar(model.form, model.control_ids, "", GrammarAsked(tools, True, True, None))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["pythonic", "qwen-xml", "deepseek-dsml"])
def test_what_is_required_is_not_searched_for_each_argument(name):
    """5,000 arguments beside a list of 7,000 took up to 0.4 s of the event loop."""

    class Required(list):
        def __contains__(self, key):
            raise AssertionError("searched from its beginning")

    model = Model(name)
    tool = {"properties": {"a": {}, "b": {}}, "required": Required("bb")}
    grammar = model.grammar(GrammarAsked({"find": tool}, True, False, None))
    assert grammar.cursor()


@pytest.mark.parametrize("is_required", list(itertools.product([False, True], repeat=4)))
def test_keywords_of_a_python_call_stand_in_order_and_some_may_be_left_out(is_required):
    model, keys = Model("pythonic"), "abcd"
    required = [key for key, is_needed in zip(keys, is_required, strict=True) if is_needed]
    tool = {"properties": {key: {"type": "integer"} for key in keys}, "required": required}
    grammar = model.grammar(GrammarAsked({"find": tool}, True, False, None))
    for size in range(len(keys) + 1):
        for given in itertools.permutations(keys, size):
            is_kept = list(given) == sorted(given) and set(given) >= set(required)
            answer = f"[find({', '.join(f'{key}=1' for key in given)})]"
            assert is_accepted(model, grammar, answer) == is_kept, answer
    for answer in ("[find(a=1,b=1,c=1,d=1)]", "[find(a=1, b=1, c=1, d=1, )]", "[find(a=1 b=1 c=1 d=1)]"):
        assert not is_accepted(model, grammar, answer)


def test_a_call_of_python_may_have_very_many_keywords():
    """Along a chain of rules those of more than 500 were not followed to their end."""
    model, keys = Model("pythonic"), [f"a{n}" for n in range(560)]
    tool = {"properties": {key: {"type": "integer"} for key in keys}}
    text = answer_grammar(model.form, model.control_ids, "", GrammarAsked({"find": tool}, True, False, None))
    assert all(text.count(f'"{key}="') == 1 for key in keys)
    grammar = model.vocabulary.compile(Constraint("grammar", text))
    assert is_accepted(model, grammar, f"[find({', '.join(f'{key}=1' for key in keys)})]")


PYTHON_VALUES = [  # a schema, and values that keep to it, and others
    ({"type": "boolean"}, ["true"], ["True", "1"]),
    ({"type": ["string", "null"]}, ["null", r'"a)], [\""', r'"\n\u0001\\"'], ["None", "'a'", "a"]),
    ({"$ref": "#/$defs/C"}, ['"a"'], ['"c"', "a"]),
    ({"type": "array", "items": {"enum": [True, None, 1.5]}}, ["[true, null, 1.5]", "[]"], ["[True]", "[1.5, ]"]),
    ({"properties": {"x": {"type": "integer"}}, "type": "object"}, ['{"x": -1}'], ["{'x': 1}", '{"x": true}']),
    ({"anyOf": [{"$ref": "#/$defs/N"}, {"const": None}]}, ["7", "null"], ['"7"']),
    (True, ['{"x": [true, {"class": null}]}', '""'], ["x"]),
]


@pytest.mark.parametrize(("schema", "texts", "others"), PYTHON_VALUES)
def test_keywords_of_a_python_call_have_values_in_json(schema, texts, others):
    model = Model("pythonic")
    tool = {"$ref": "#/$defs/T", "$defs": CHOSEN | {"T": {"properties": {"a": schema}, "required": ["a"]}}}
    grammar = model.grammar(GrammarAsked({"find": tool}, True, False, None))
    for text in (*texts, *others):
        answer = f"[find(a={text})]"
        assert is_accepted(model, grammar, answer) == (text in texts), text
        if text in texts:
            parser = model.form.parser({}, {"find": tool}, "")
            (call,) = joined([*parser.push(answer).calls, *parser.finish(is_whole=False).calls])
            assert json.loads(call.arguments) == {"a": json.loads(text)}
            jsonschema.validate(json.loads(call.arguments), tool)


LEAF = {"type": ["number", "null"], "minimum": -9, "maximum": 9}
NESTED = {
    "type": "object",
    "properties": {
        "class_": {"enum": [True, False, None]},
        "größe": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
        "said": {"type": "string", "maxLength": 8},
        "any": {},
    },
    "required": ["größe"],
    "additionalProperties": False,
    "$defs": {"tree": {"type": "object", "properties": {"leaf": LEAF}, "required": ["leaf"]}},
}


@pytest.mark.parametrize("loose", [(), ("math.find",)])
def test_what_a_python_call_may_be_is_read_as_it_was_written(loose):
    model = Model("pythonic")
    grammar = model.grammar(GrammarAsked({"math.find": NESTED, "look": None}, True, True, None, loose))
    texts = [text for seed in range(150) if (text := model.draw(grammar, seed)) is not None]
    names, keys = set(), set()
    for text in texts:
        if re.search(r"\d[eE]\+?\d{3}", text):
            continue  # a number beyond those of Python is no call
        parser = model.form.parser(model.spellings, {"math.find": NESTED, "look": {}}, "")
        found = [parser.push(text), parser.finish(is_whole=False)]
        calls = joined(part for each in found for part in each.calls)
        assert calls and not "".join(each.content for each in found), text
        names |= {call.name for call in calls}
        for call in calls:
            arguments = json.loads(call.arguments)
            if call.name == "math.find":
                keys |= arguments.keys()
                jsonschema.validate(arguments, NESTED)
    assert names == {"math.find", "look"} and keys == NESTED["properties"].keys()


@pytest.mark.parametrize("key", ["a-b", "1a", "class", "None", "a b", "", "\ufb01nd"])
def test_a_name_that_no_keyword_of_a_python_call_has(key):
    """Python reads the last one as "find"."""
    model = Model("pythonic")
    with pytest.raises(
        InvalidRequest, match="messages.tools: find: .* has a name that no keyword of a Python call has"
    ):
        model.grammar(GrammarAsked({"find": {"properties": {key: {}}}}, True, False, None))
    grammar = model.grammar(GrammarAsked({"find": {"properties": {key: {}}}}, True, False, None, loose=("find",)))
    assert is_accepted(model, grammar, "[find(a=1)]") and not is_accepted(model, grammar, f"[find({key}=1)]")


@pytest.mark.parametrize(
    ("schema", "problem", "takes_any"),
    [
        ({"required": ["a"]}, "find: requires 'a'", True),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "find: has anyOf at its root", True),
        ({"properties": {"a": False}}, "find: 'a' has a schema that nothing keeps to", False),
    ],
)
def test_what_keywords_of_a_python_call_cannot_keep_to(schema, problem, takes_any):
    """A tool that is not strict then takes any, unless it is one of them alone that cannot be kept to."""
    model = Model("pythonic")
    with pytest.raises(InvalidRequest, match=f"messages.tools: {problem}"):
        model.grammar(GrammarAsked({"find": schema}, True, False, None))
    grammar = model.grammar(GrammarAsked({"find": schema}, True, False, None, loose=("find",)))
    assert is_accepted(model, grammar, "[find(a=1)]")
    assert is_accepted(model, grammar, '[find(a=1, b="x")]') == takes_any
