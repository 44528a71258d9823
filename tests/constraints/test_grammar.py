"""Grammars over a vocabulary: which tokens may be next, from any beginning."""

import json
import re
from functools import partial

import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.constraints import grammar
from baton.constraints.constraint import BadConstraint, Constraint
from baton.constraints.grammar import GrammarCursor, Vocabulary
from baton.constraints.json_patterns import FORMATS
from baton.constraints.json_schema import check_support, rewrite_schema
from tests.support.gateway.vocabularies import byte_vocabulary

JSON = byte_vocabulary()
TOKENIZER = Tokenizer.from_buffer(JSON)
SIZE = TOKENIZER.get_vocab_size()
VOCABULARY = Vocabulary(JSON, SIZE)
SCHEMA = Constraint(
    "json_schema",
    json.dumps({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["the", "hello"]}},
                "required": ["a", "b"], "additionalProperties": False}),
)  # fmt: skip
ANSWER = '{"a": 12, "b": "hello"}'


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def allowed(cursor: GrammarCursor, vocabulary: Vocabulary = VOCABULARY) -> set[int]:
    mask = vocabulary.new_masks(1)[0]
    assert cursor.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def is_whole(cursor: GrammarCursor, text: str) -> bool:
    token_ids = ids_of(text)
    if cursor.num_valid(token_ids) < len(token_ids):
        return False
    cursor.read(token_ids)
    allowed(cursor)
    return cursor.may_end


def test_every_token_of_a_valid_answer_is_allowed_and_the_end_only_behind_it():
    cursor, token_ids = VOCABULARY.compile(SCHEMA).cursor(), ids_of(ANSWER)
    for index, token_id in enumerate(token_ids):
        assert token_id in allowed(cursor) and not cursor.may_end
        assert cursor.is_over_behind(token_id) == (index == len(token_ids) - 1)
        cursor.read(token_ids[: index + 1])
    assert cursor.is_over
    assert allowed(cursor) == set() and cursor.may_end


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ('^[^"]*$', ["ab", "a\nb", "a\\b", "ü"], ['a"b']),
        (r"^[^\x22\n\\\]]+$", ["ab", "a\tb", "[", "ü"], ['a"b', "a\\b", "a]b"]),
        (r"^[]a\x00-\x1f]+\[$", ["]a[", "\n["], ['"[', "\\["]),
        (r"^[a[^\W\d_]-]+$", ["a-]", "[-]]", '"-]'], ["a-b", "b-]"]),
        (r"^[^[\]&&--\n]+$", ["ab", 'a"', "\\"], ["a[", "]", "&", "-", "\n"]),
        (r"^[*--9[a~~]+$", ["*+,-9[a~"], [".", "0"]),
        (r"^[--0]+$", ["-./0"], ["1"]),
        (r"^[]-a]+$", ["]^_`a"], ["-"]),
        (r"^[!-\d\s-.]+$", ["!-7 ."], ['"', "/"]),
        (r"^\s[\s]$", ["\ufeff\ufeff", "\u00a0\t"], ["\u0085 ", " \u0085"]),
        (r"^\S[\S][^\s]$", ["\u0085\u0085\u0085"], ["\ufeffaa", "a\ufeffa", "aa\ufeff"]),
        (r"^a.b$", ["axb", "aüb", "a\tb", "a\\b", 'a"b'], ["a\nb", "a\rb", "a\u2028b", "a\u2029b"]),
    ],
)
def test_a_class_of_a_pattern_has_the_characters_of_ecma_262(pattern, good, bad):
    """In a text and in a name."""
    schemas = (
        {"type": "string", "pattern": pattern},
        {"patternProperties": {pattern: {}}, "additionalProperties": False},
    )
    for schema, begin, end in zip(schemas, ("", "{"), ("", ":1}"), strict=True):
        grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps({"type": "object", **schema})))
        for text in (*good, *bad):
            token_ids = ids_of(begin + json.dumps(text, ensure_ascii=False) + end)
            assert (grammar.cursor().num_valid(token_ids) == len(token_ids)) == (text in good), (schema, text)


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # of re, which may read sets in sets one day
@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        ("[[a]]", ["[]", "a]"], ["a"]),
        ("[^a&&b]", ["z"], ["a", "b", "&"]),
        ("[a-z~~b]+", ["ab~"], ["A"]),
        ("[+--]+", ["+,-"], ["."]),
        (r"^[[(][0-9]{2}[\])]$", ["[12]", "(12)"], ["12"]),
        (r"[\w\s\[\]{}&&%--]+", ["hi & [bye]", "a-b"], ["#"]),
        (r"\[[^\]]+", ["[[a"], ["[]"]),
        (r".[\x00].", ["a\0b"], ["\n\0\n"]),
        (" ", [" "], ["  ", "a"]),
        ("\n", ["\n"], [" "]),
    ],
)
def test_a_class_of_a_regex_has_the_characters_of_pythons_re(regex, good, bad):
    grammar = VOCABULARY.compile(Constraint("regex", regex))
    for text in (*good, *bad):
        assert is_whole(grammar.cursor(), text) == (text in good) == bool(re.fullmatch(regex, text)), text


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"minimum": 0.001, "maximum": 0.125, "multipleOf": 0.1}, ["0.1"], ["0", "0.2", "0.12"]),
        ({"minimum": -0.125, "maximum": 12.34, "multipleOf": 0.3}, ["12.3", "0", "6"], ["12.6", "-0.3", "12.34"]),
        ({"exclusiveMinimum": 0.2, "exclusiveMaximum": 0.45, "multipleOf": 0.2}, ["0.4"], ["0.2", "0.6"]),
        ({"minimum": 5, "exclusiveMinimum": True, "multipleOf": 2.5}, ["7.5"], ["5", "2.5"]),
        ({"maximum": 3, "multipleOf": 0.25}, ["3", "2.75", "-1"], ["3.25", "0.1"]),
        ({"minimum": 1, "multipleOf": 1e-9, "maximum": 123456789.5}, ["1.5", "123456789.5"], ["0.9", "123456790"]),
        ({"exclusiveMaximum": 1.5, "multipleOf": 0.001}, ["1.4", "1.499"], ["1.5"]),
    ],
)
def test_a_bound_between_two_multiples_keeps_out_those_outside_alone(schema, good, bad):
    grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps(schema)))
    for text in (*good, *bad):
        assert is_whole(grammar.cursor(), text) == (text in good), text


@pytest.mark.parametrize("more", [{}, {"pattern": ":"}, {"pattern": ":", "allOf": [{}]}, {"type": ["string", "null"]}])
@pytest.mark.parametrize(("name", "before"), [("time", ""), ("date-time", "2024-12-31T"), ("date-time", "2023-02-28t")])
def test_a_minute_has_60_seconds(name, before, more):
    grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps({"type": "string", "format": name, **more})))
    good = ("23:59:59Z", "09:49:00.60+14:41", "00:00:10.5z", "23:00:59-22:13")
    for text in (*good, "23:59:60Z", "09:49:60.7217+14:41", "03:12:60.97-22:13", "13:60:00Z"):
        assert is_whole(grammar.cursor(), f'"{before}{text}"') == (text in good), text


@pytest.mark.parametrize("more", [{}, {"pattern": "0"}, {"pattern": "0", "allOf": [{}]}, {"type": ["string", "null"]}])
@pytest.mark.parametrize(("name", "behind"), [("date", ""), ("date-time", "T10:00:00Z")])
def test_29_february_is_a_date_of_leap_years_alone(name, behind, more):
    grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps({"type": "string", "format": name, **more})))
    good = ("2024-02-29", "2000-02-29", "2023-02-28", "1900-01-31", "2023-12-30", "2023-11-09", "2023-10-20")
    for text in (*good, "2023-02-29", "1900-02-29", "2022-02-29", "2024-02-30", "2023-11-31", "2023-00-10"):
        assert is_whole(grammar.cursor(), f'"{text}{behind}"') == (text in good), text


def test_a_date_beside_what_is_no_list_of_schemas_is_refused():
    with pytest.raises(BadConstraint):
        VOCABULARY.compile(Constraint("json_schema", '{"format": "date", "pattern": "0", "allOf": 5}'))


@pytest.mark.parametrize(
    ("keywords", "good", "bad"),
    [
        ({"prefixItems": [{"const": 1}], "additionalItems": False}, "[1,2]", "[2]"),
        ({"prefixItems": [{"const": 1}], "items": {"const": 2}, "additionalItems": {}}, "[1,2]", "[1,1]"),
        ({"items": [{"const": 1}], "anyOf": [{"minItems": 1}], "additionalItems": False}, "[1]", "[1,2]"),
        ({"exclusiveMinimum": True, "allOf": [{"maximum": 6}], "minimum": 5}, "6", "5"),
        ({"maximum": 5, "anyOf": [{"minimum": 4}], "exclusiveMaximum": True}, "4", "5"),
        ({"additionalProperties": False, "anyOf": [{}], "patternProperties": {"^x": {}}}, '{"x":1}', '{"y":1}'),
    ],
)
def test_keywords_that_belong_together_are_read_together(keywords, good, bad):
    """Whatever stands between them, and however many drafts they are from."""
    kind = "array" if good[0] == "[" else "object" if good[0] == "{" else "integer"
    grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps({"type": kind, **keywords})))
    assert is_whole(grammar.cursor(), good) and not is_whole(grammar.cursor(), bad)


def test_one_of_several_models_is_told_by_a_property_as_pydantic_says_it():
    """`discriminator` is OpenAPI's, and says nothing that the constants do not."""
    models = {
        name: {"type": "object", "properties": {"kind": {"const": name}, name: {"type": "integer"}}, "required": ["kind", name]}
        for name in ("a", "b")
    }  # fmt: skip
    told = {"propertyName": "kind", "mapping": {name: f"#/$defs/{name}" for name in models}}
    one = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in models], "discriminator": told}
    schema = {"type": "object", "properties": {"pet": one}, "required": ["pet"], "$defs": models}
    grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps(schema)))
    for name, good in (("a", True), ("b", True), ("c", False)):
        token_ids = ids_of(f'{{"pet": {{"kind": "{name}", "{name}": 1}}}}')
        assert (grammar.cursor().num_valid(token_ids) == len(token_ids)) == good


def test_no_name_of_a_property_is_written_with_escapes():
    """Beside names of others, which may be anything else."""
    inner = {"properties": {"a": {"type": "integer"}, "größe": {"type": "integer"}}, "type": "object"}
    others = ({}, {"additionalProperties": True}, {"additionalProperties": {}})
    schemas = [
        *({**inner, **each} for each in others),
        *({**each, **inner} for each in others),
        {"anyOf": [{**inner, "additionalProperties": False}, inner]},
        {"allOf": [inner, {"type": "object", "properties": {"z": {}}, "required": ["b"]}, {"required": ["d"]}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"additionalProperties": True, "$ref": "#/$defs/y", **inner}, "y": inner}},
    ]
    names = ["b", "aa", "", "ü", "größe2", 'q"', "q\\", "\n\t\x01"]
    good = [json.dumps({"b": 0, "d": 0, name: "x"}, ensure_ascii=False) for name in names]
    good.append('{"a":1,"größe":2,"b":{},"d":[null],"e":3,"e":4}')
    escaped = [r'"\u0061"', r'"gr\u00f6\u00dfe"', r'"gr\u00F6ße"', r'"\u0061b"']
    bad = [f'{{"b":1,"d":2,{name}:"x"}}' for name in (*escaped, '"a"', '"größe"')]
    for schema in schemas:
        grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps(schema)))
        for text in (*good, *bad):
            token_ids = ids_of(text)
            assert (grammar.cursor().num_valid(token_ids) == len(token_ids)) == (text in good), (schema, text)


# Objects whose property "a" is 1, and all others are 2.
MIXED = [
    {"properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}},
    {"patternProperties": {"^a$": {"const": 1}}, "additionalProperties": {"const": 2}},
    {
        "properties": {"a": {"const": 1}},
        "patternProperties": {"^x": {"const": 2}},
        "additionalProperties": {"const": 2},
    },
    {"properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}, "minProperties": 1, "required": ["a"]},
    {
        "allOf": [
            {"properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}},
            {"required": ["a"], "maxProperties": 9},
        ]
    },
    {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}}}},
    {
        "properties": {"a": {"const": 1}, "y": {"$ref": "#/additionalProperties"}},
        "additionalProperties": {"allOf": [{"const": 2}]},
    },
]


@pytest.mark.parametrize("schema", MIXED, ids=str)
def test_no_name_passes_for_another_one_whose_values_keep_to_something_else(schema):
    grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps({"type": "object", **schema})))
    good = ['{"a":1}', '{"a":1,"x":2}', '{"a":1,"größe":2,"\\n\\"":2,"x":2,"x":2}']
    bad = [r'{"a":1,"\u0061":2}', r'{"a":1,"x\u0061":2}', r'{"a":1,"\u000a":2}', '{"a":1,"a":2}', '{"a":1,"x":1}']
    for text in (*good, *bad):
        token_ids = ids_of(text)
        assert (grammar.cursor().num_valid(token_ids) == len(token_ids)) == (text in good), text


@pytest.mark.parametrize(("name", "written"), [("\n", r"\u000a"), ("\x1f", r"\u001F"), ("\x7f", r"\u007f")])
def test_no_name_with_a_control_character_passes_for_another_one(name, written):
    """What JSON has to escape it may escape in more than one way."""
    schema = {"type": "object", "properties": {name: {"const": 1}}}
    grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps(schema)))
    for text, is_good in ((json.dumps({name: 1}, ensure_ascii=False), True), (f'{{"{written}":2}}', False)):
        token_ids = ids_of(text)
        assert (grammar.cursor().num_valid(token_ids) == len(token_ids)) == is_good, text


KEY = {"title": "Key", "type": "string", "enum": ["a", "b"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"propertyNames": {"type": "string", "title": "N"}}, ['{"x":1}', "{}"], ['{"x":"1"}']),
        ({"propertyNames": True}, ['{"x":1}'], ['{"x":"1"}']),
        ({"propertyNames": KEY}, ["{}", '{"a":1,"b":2}', '{"b":2}'], ['{"x":1}', '{"a":"1"}']),
        ({"propertyNames": {"const": "a"}, "required": ["a"]}, ['{"a":1}'], ["{}", '{"b":1}']),
        ({"propertyNames": {"$ref": "#/$defs/K"}, "$defs": {"K": KEY}}, ['{"b":1}'], ['{"x":1}']),
        ({"propertyNames": KEY, "properties": {"b": {"const": "c"}, "x": {}}}, ['{"a":1,"b":"c"}'], ['{"b":1}', '{"x":1}']),
        ({"propertyNames": KEY, "additionalProperties": False}, ["{}"], ['{"a":1}']),
    ],
)  # fmt: skip
def test_names_that_say_nothing_or_are_listed_are_kept_to(schema, good, bad):
    """As zod writes its records, and pydantic the keys of a dict."""
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, **schema}
    grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps(schema)))
    for text in (*good, *bad):
        assert is_whole(grammar.cursor(), text) == (text in good), text


INNER = {"additionalProperties": {"type": "integer"}, "propertyNames": KEY, "properties": {"c": {"const": 7}}}


@pytest.mark.parametrize(
    ("schema", "is_support_kept"),
    [
        ({"properties": {"m": INNER, "n": {"$ref": "#/properties/m"}}}, True),
        ({"properties": {"m": INNER, "n": {"$ref": "#/properties/m/additionalProperties"}}}, False),
        ({"properties": {"m": INNER, "n": {"$ref": "#/properties/m/properties/c"}}}, False),
        ({"$defs": {"M": INNER}, "properties": {"n": {"$ref": "#/$defs/M/properties/c"}}}, False),
        ({"propertyNames": {"enum": ["n"]}, "properties": {"m": INNER, "n": {"$ref": "#/properties/m"}}}, False),
        ({"properties": ["m"], "propertyNames": KEY}, False),
    ],
)
def test_listed_names_are_refused_where_they_would_move_what_a_reference_leads_to(schema, is_support_kept):
    schema = {"type": "object", **schema}
    problem = check_support(schema)
    assert (problem is None) == is_support_kept and (not problem or problem[0].endswith("/propertyNames"))
    if isinstance(schema["properties"], dict):
        for is_strict in {is_support_kept, False}:
            grammar = VOCABULARY.compile(
                Constraint("grammar", f"start: %json {json.dumps(rewrite_schema(schema, is_strict))}")
            )
            assert is_whole(grammar.cursor(), "{}")


LOOKING = "^(?!x)(?=.).*$"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"format": "rhyme", "pattern": "^ab"}, ['"abc"'], ['"a"']),
        ({"format": "uuid4"}, ['"x"'], ["1"]),
        ({"format": "unknown", "maxLength": 1}, ['"x"'], ['"xy"']),
        ({"format": "duration", "pattern": LOOKING}, ['"P1D"'], ['"P1"']),
        ({"format": "date", "pattern": LOOKING, "maxLength": 10}, ['"2024-02-29"'], ['"2023-02-29"']),
    ],
)
def test_a_format_that_nobody_knows_is_a_note_and_a_known_one_stands_for_a_pattern_with_look_around(schema, good, bad):
    grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps({"type": "string", **schema})))
    for text in (*good, *bad):
        assert is_whole(grammar.cursor(), text) == (text in good), text


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_that_is_kept_to_binds_the_text(name):
    grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps({"type": "string", "format": name})))
    assert not is_whole(grammar.cursor(), '"(no such thing)"')


def test_texts_have_control_characters_beside_a_map():
    """Whose names are all alike, so that one is as good as the other: a terminal's keys, beside its environment."""
    environment = {"type": "object", "additionalProperties": {"type": "string"}}
    schema = {"type": "object", "properties": {"keys": {"type": "string"}, "env": environment}, "required": ["keys"]}
    for additional in ({}, {"additionalProperties": False}):
        grammar = VOCABULARY.compile(Constraint("json_schema", json.dumps({**schema, **additional})))
        token_ids = ids_of(r'{"keys":"\u0003","env":{"A":"\u001b[0m"}}')
        assert grammar.cursor().num_valid(token_ids) == len(token_ids)


@pytest.mark.parametrize(
    "keywords", [{"dependentRequired": {"a": ["b"]}}, {"unevaluatedProperties": False}, {"contains": {"const": 1}}]
)
def test_a_draft_that_is_named_makes_no_keyword_unknown(keywords):
    """The library ignores those that are younger."""
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", **keywords}
    with pytest.raises(BadConstraint, match=f"/{next(iter(keywords))}: is not supported"):
        VOCABULARY.compile(Constraint("json_schema", json.dumps(schema)))


def test_a_cursor_is_a_function_of_the_tokens():
    """Read at once or one by one."""
    grammar, token_ids = VOCABULARY.compile(SCHEMA), ids_of(ANSWER)
    slow = grammar.cursor()
    for num_tokens in range(len(token_ids)):
        slow.read(token_ids[:num_tokens])
        other = Vocabulary(JSON, SIZE).compile(SCHEMA).cursor()
        other.read(token_ids[:num_tokens])
        assert allowed(slow) == allowed(other)


def test_masks_behind_drafts_are_those_of_the_places_they_lead_to():
    grammar, token_ids = VOCABULARY.compile(SCHEMA), ids_of(ANSWER)
    cursor, plain = grammar.cursor(), grammar.cursor()
    cursor.read(token_ids[:3])
    draft = token_ids[3:8]
    wrong = [*draft[:2], ids_of("}")[0], *draft[3:]]
    assert cursor.num_valid(draft) == 5 and cursor.num_valid(wrong) == 2
    for place, following in enumerate([cursor, *cursor.behind(draft)]):
        plain.read(token_ids[: 3 + place])
        assert allowed(following) == allowed(plain) and following.num_read == 3 + place
    unknown = [*draft[:3], SIZE + 40]
    assert cursor.num_valid(unknown) == 3 and cursor.num_valid(unknown[3:]) == 0 and cursor.problem == ""
    assert cursor.num_read == 3 and cursor.num_valid(draft) == 5


def test_a_grammar_may_end_and_go_on():
    cursor = VOCABULARY.compile(Constraint("regex", "[0-9]+")).cursor()
    assert not cursor.may_end
    cursor.read(ids_of("12"))
    assert ids_of("1")[0] in allowed(cursor) and cursor.may_end and not cursor.is_over


def test_what_can_be_followed_no_further_is_not_over(monkeypatch):
    """Right recursion makes each row of the parser larger, to more than a row may have."""
    monkeypatch.setattr(grammar, "LLParserLimits", partial(grammar.LLParserLimits, max_items_in_row=20))
    cursor = VOCABULARY.compile(Constraint("grammar", 'start: "a" | "a" start')).cursor()
    token_ids = ids_of("a") * 20
    over_behind = []
    for num_tokens in range(1, 21):
        over_behind.append(cursor.is_over_behind(token_ids[0]))
        cursor.read(token_ids[:num_tokens])
    assert "has 21 items" in cursor.problem and not cursor.is_over and not any(over_behind)


@pytest.mark.parametrize("vocab_size", [SIZE - 60, SIZE, SIZE + 100])
def test_ids_that_the_model_or_the_tokenizer_lacks_are_never_allowed(vocab_size):
    vocabulary = Vocabulary(JSON, vocab_size)
    found = allowed(vocabulary.compile(Constraint("regex", "(?s:.+)")).cursor(), vocabulary)
    assert found and max(found) < min(vocab_size, SIZE)
    assert vocabulary.num_words * 32 >= vocab_size


def test_the_models_own_end_is_no_text():
    cursor = VOCABULARY.compile(Constraint("regex", "(?s:.*)")).cursor()
    assert TOKENIZER.token_to_id("<|end|>") not in allowed(cursor) and cursor.may_end
