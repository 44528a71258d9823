"""Constraints as data: what a look at them refuses, and what compiling does."""

import json
from functools import partial

import pytest

from baton.constraints import grammar
from baton.constraints.constraint import (
    MAX_BYTES,
    MAX_CHOICES,
    BadConstraint,
    Constraint,
    constraint_of,
    write_constraint,
)
from baton.constraints.grammar import Vocabulary
from baton.v1 import inference_pb2 as pb
from tests.constraints.good_constraints import GOOD
from tests.support.gateway.vocabularies import byte_vocabulary

VOCABULARY = Vocabulary(byte_vocabulary(), 270)
# What is wrong -> a word of the message.
BAD = [
    ("json_schema", "", "is empty"),
    ("json_schema", "{", "is not JSON"),
    ("json_schema", '{"minimum": NaN}', "is not JSON"),
    ("json_schema", "[1]", "not a schema"),
    ("json_schema", '{"properties": {"x": {"minimun": 3}}}', "/properties/x/minimun: is no keyword"),
    ("json_schema", '{"x-guidance": {"lenient": true}, "uniqueItems": true}', "/x-guidance: is no keyword"),
    ("json_schema", '{"properties": {"x": {"enum": "abc"}}}', "/properties/x/enum: must be a list"),
    ("json_schema", '{"items": [{}, {"anyOf": [{"typo": 1}]}]}', "/items/1/anyOf/0/typo"),
    (
        "json_schema",
        '{"properties": {"a\\n": {"uniqueItems": true}}}',
        r"/properties/a\n/uniqueItems: is not supported",
    ),
    ("json_schema", '{"anyOf": [{"not": {"type": "string"}}]}', "/anyOf/0/not: is not supported"),
    ("json_schema", '{"oneOf": [{"type": "integer"}, {"const": 1}]}', "oneOf of schemas that may overlap"),
    ("json_schema", '{"type": "string", "format": 7}', "format"),
    ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "/pattern: look-around is not supported"),
    ("json_schema", '{"items": {"pattern": "[(]a(?<!b)", "format": "rhyme"}}', "/items/pattern: look-around"),
    *(
        (
            "json_schema",
            json.dumps({"items": {"propertyNames": names, **more}}),
            "/items/propertyNames: is not supported",
        )
        for names, more in (
            ({"maxLength": 5}, {}),
            ({"pattern": "^a"}, {}),
            ({"type": "integer"}, {}),
            ({"enum": ["a", 1]}, {}),
            ({"enum": ["a", "\n"]}, {}),
            ({"enum": ["a"], "minLength": 2}, {}),
            ({"$ref": "#/$defs/none"}, {}),
            (False, {}),
            ({"enum": ["a"]}, {"patternProperties": {"b": {}}}),
        )
    ),
    ("json_schema", '{"$ref": "http://example.com/schema"}', "example.com"),
    ("json_schema", '{"$ref": "#/$defs/a"}', "does not exist"),
    *(
        (
            "json_schema",
            json.dumps(
                {"properties": {"n": {"$ref": "#/$defs/a"}}, "$defs": {"a": schema, "b": {"$ref": "#/$defs/a"}}}
            ),
            "/$defs/a: no text keeps to it",
        )
        for schema in (
            {"$ref": "#/$defs/a"},
            {"allOf": [{"type": "object"}, {"$ref": "#/$defs/b"}]},
            {"type": "object", "properties": {"n": {"$ref": "#/$defs/b"}}, "required": ["m", "n"]},
            {"anyOf": [{"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/b"}}, {"$ref": "#/$defs/b"}]},
            {"type": "array", "minItems": 2, "prefixItems": [{}, {"$ref": "#/$defs/b"}]},
        )
    ),
    (
        "json_schema",
        '{"type": "object", "properties": {"~/ü": {"$ref": "#/properties/~0~1%C3%BC"}}}',
        "no text keeps to it",
    ),
    ("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}', "no text keeps to it"),
    ("json_schema", '{"enum": []}', "nsatisfiable"),
    ("json_schema", "false", "schema is false"),
    ("json_schema", '{"enum": [1, 9007199254740993]}', "/enum/1: whole numbers beyond 2**53"),
    ("json_schema", '{"items": {"const": {"a": [9007199254740993]}}}', "/items/const/a/0: whole numbers"),
    ("json_schema", '{"type": "integer", "const": 1e300}', "/const: whole numbers"),
    ("json_schema", '{"type": "integer", "minimum": 9007199254740993}', "/minimum: whole numbers"),
    ("json_schema", '{"type": "number", "minimum": -4611686018427387906}', "/minimum: whole numbers"),
    ("json_schema", '{"type": "integer", "maximum": 9007199254740995}', "/maximum: whole numbers"),
    ("json_schema", '{"type": "integer", "exclusiveMinimum": 9007199254740992}', "/exclusiveMinimum: whole numbers"),
    ("json_schema", '{"minimum": 1e400}', "is not JSON"),
    ("json_schema", '{"enum": [1, 13.5, -14.846324501625219]}', "/enum/2: this number would be -14.84632450162522"),
    (
        "json_schema",
        '{"items": {"const": {"a": 9.643303714084073e-09}}}',
        "/items/const/a: this number would be 9.6433037",
    ),
    (
        "json_schema",
        '{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}',
        "/exclusiveMinimum: would not keep out",
    ),
    (
        "json_schema",
        '{"minimum": 5, "exclusiveMinimum": true, "maximum": 5.5}',
        "/exclusiveMinimum: would not keep out",
    ),
    ("json_schema", '{"minimum": -1.5, "exclusiveMaximum": -1}', "/exclusiveMaximum: would not keep out"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "nsatisfiable"),
    (
        "json_schema",
        '{"items": {"prefixItems": [{}], "items": [{}]}}',
        "/items/prefixItems: stands beside a list of items",
    ),
    ("json_schema", json.dumps({"anyOf": [{"$ref": f"#/anyOf/{'1' * 5000}"}]}), "Failed to parse array index"),
    ("json_schema", '{"type": "object", "minProperties": 2}', "/minProperties: would count a name twice"),
    ("json_schema", '{"items": {"required": ["a", "a"], "minProperties": 3}}', "/items/minProperties: would count"),
    (
        "json_schema",
        '{"patternProperties": {"^a": {}}, "additionalProperties": false, "minProperties": 2}',
        "/minProperties: would count",
    ),
    (
        "json_schema",
        '{"properties": {"a": {"enum": ["b", "\\u001b"]}}, "additionalProperties": {"type": "string"}}',
        "/properties/a/enum/1: has a control character",
    ),
    *(
        (
            "json_schema",
            json.dumps({"required": ["a"], "additionalProperties": {"pattern": pattern}}),
            "/additionalProperties/pattern: has a control character",
        )
        for pattern in ("^\v", r"a\v", r"\x1B\[", r"\\\u001f", "\x7f$")
    ),
    ("json_schema", '{"properties": {"\\n\\ud800ü": {"typo": 1}}}', r"/properties/\n\ud800ü/typo: is no keyword"),
    ("json_schema", '{"a":' * 10_000 + "1" + "}" * 10_000, "10000 deep"),
    ("json_schema", " " * (1 << 20), "1048576 bytes"),
    ("regex", "", "is empty"),
    ("regex", "(a", "unclosed group"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", "x{0}", "no text"),
    ("regex", "a*+b", "possessive repetition"),
    ("regex", r"[*+]\\{2}+", "possessive repetition"),
    ("regex", "(" * 5000 + "a" + ")" * 5000, "5000 deep"),
    ("choice", "[]", "is empty"),
    ("choice", json.dumps([str(n) for n in range(MAX_CHOICES + 1)]), f"at most {MAX_CHOICES}"),
    ("choice", '["a", ""]', "texts[1]: is empty"),
    ("grammar", " ", "Empty grammar"),
    ("json_schema", " ", "is not JSON"),
    ("grammar", 'start: start "a"', "no text of this vocabulary"),
    ("grammar", "start: nothing", "unknown name"),
    ("grammar", 'begin: "a"', "start"),
    ("grammar", 'start: "a', "lexer error"),
    ("grammar", 'start: "a"\n%json {"type": "object"}', "line 2: %json is not supported"),
    ("grammar", '%llguidance {"no_forcing": true}\nstart: "a"', "line 1: %llguidance is not supported"),
]


@pytest.mark.parametrize("constraint", GOOD, ids=str)
def test_good_ones_compile_and_travel(constraint):
    VOCABULARY.compile(constraint)
    message = pb.Constraint()
    write_constraint(message, constraint)
    assert constraint_of(message) == constraint


@pytest.mark.parametrize("kind, text, words", BAD, ids=[f"{kind} {text[:40]}" for kind, text, _ in BAD])
def test_bad_ones_say_why_in_one_line(kind, text, words):
    with pytest.raises(BadConstraint) as caught:
        VOCABULARY.compile(Constraint(kind, text))
    message = str(caught.value)
    assert words in message and "\n" not in message and len(message) < 500


def test_an_empty_message_names_no_kind():
    with pytest.raises(BadConstraint, match="one of json_schema, json_object, regex, choice, grammar is needed"):
        constraint_of(pb.Constraint())


def test_json_object_is_true_or_unset():
    with pytest.raises(BadConstraint, match="must be true"):
        constraint_of(pb.Constraint(json_object=False))


def test_the_largest_text_is_taken_whole():
    text = json.dumps({"description": "x" * (MAX_BYTES - 20)})
    assert len(text) <= MAX_BYTES
    VOCABULARY.compile(Constraint("json_schema", text))


def test_a_vocabulary_that_cannot_say_it():
    """One without the digits."""
    vocabulary = Vocabulary(byte_vocabulary(without="0123456789"), 270)
    vocabulary.compile(Constraint("regex", "[a-z]+"))
    with pytest.raises(BadConstraint, match="no text of this vocabulary"):
        vocabulary.compile(Constraint("regex", "[0-9]+"))


def test_what_is_too_complex_is_not_said_to_have_no_text(monkeypatch):
    monkeypatch.setattr(grammar, "LLParserLimits", partial(grammar.LLParserLimits, step_max_items=1))
    with pytest.raises(BadConstraint, match="Too many items"):
        VOCABULARY.compile(Constraint("json_object", ""))


def test_a_tokenizer_without_bytes_is_refused_in_one_line():
    with pytest.raises(ValueError, match="no grammars over this tokenizer"):
        Vocabulary(b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}', 1)


def test_a_token_of_an_id_beyond_all_vocabularies():
    """The library would write gigabytes of places that no token has: of a worker's start it took 2.8 GB in 45 s, and
    was not done."""
    content = json.loads(byte_vocabulary())
    content["model"]["vocab"]["far"] = 2**31
    with pytest.raises(ValueError, match="a token has id 2147483648, at most 1048575 is believed"):
        Vocabulary(json.dumps(content).encode(), 270)
