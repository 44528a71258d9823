"""Schemas that cannot be kept to as they are: what is left of each is kept to, and one that can be comes back as it
was."""

import json

import pytest

from baton.constraints.constraint import BadConstraint, Constraint
from baton.constraints.grammar import Vocabulary
from baton.constraints.json_schema import rewrite_schema
from baton.constraints.loosening import loosened
from tests.constraints.good_constraints import GOOD
from tests.support.gateway.vocabularies import byte_vocabulary

VOCABULARY = Vocabulary(byte_vocabulary(), 270)
STRING, LOOKING = {"type": "string"}, "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"
LOOSENED = [
    ({"anyOf": [{"type": "number"}, STRING | {"pattern": LOOKING}]}, {"anyOf": [{"type": "number"}, STRING]}),
    (STRING | {"pattern": r"\bx"}, STRING),
    (STRING | {"pattern": r"^(?<a>x)\\b$"}, None),
    ({"items": [STRING | {"pattern": "(?=x)"}, {"type": "float"}]}, {"items": [STRING, {}]}),
    ({"type": ["string", "any"]}, {}),
    ({"type": [], "required": True, "enum": [], "properties": []}, {}),
    ({"properties": {"a": "a text", "b": True, "c": False}}, {"properties": {"a": True, "b": True, "c": False}}),
    ({"enum": [9007199254740993], "minimum": 9007199254740993, "maximum": 7}, {"maximum": 7}),
    (
        {"patternProperties": {"^(?!a)": {}}, "additionalProperties": False, "minProperties": 1},
        {"minProperties": 1},
    ),
    ({"properties": {"a": {"$ref": "#/$defs/a"}, "b": {"$ref": "#/x/0"}}, "x": [{}]}, {"properties": {"a": {}, "b": {"$ref": "#/x/0"}}, "x": [{}]}),
    ({"properties": {"a": {"$ref": "#/$defs/a~1%62"}}, "$defs": {"a/b": {"$ref": 3}}}, {"properties": {"a": {"$ref": "#/$defs/a~1%62"}}, "$defs": {"a/b": {}}}),
    (STRING | {"minProperties": 3, "required": ["a"]}, STRING | {"required": ["a"]}),
    ({"items": {"minProperties": 2, "additionalProperties": {}}}, {"items": {"additionalProperties": {}}}),
    ({"minProperties": 3, "properties": {"a": {}}, "additionalProperties": False}, None),
    *(
        ({"properties": {"a": STRING | bound}, "additionalProperties": STRING}, {"properties": {"a": STRING}, "additionalProperties": STRING})
        for bound in ({"const": "\x01"}, {"enum": ["b", "\x1b"]}, {"pattern": r"^\x01"}, {"enum": ["\x01"], "const": "\x01"})
    ),
    ({"properties": {"a": {"const": "\x01"}}}, None),
    ({"a word that nobody knows": {"pattern": LOOKING}}, None),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), LOOSENED)
def test_what_cannot_be_kept_to_is_left_out_where_it_stands(schema, expected):
    loose = loosened(schema)
    assert loose == (schema if expected is None else expected)
    VOCABULARY.compile(Constraint("grammar", f"start: %json {json.dumps(rewrite_schema(loose, is_strict=False))}"))


def test_what_can_be_kept_to_comes_back_as_it_was():
    for text in (each.text for each in GOOD if each.kind == "json_schema"):
        if isinstance(schema := json.loads(text), dict):
            assert loosened(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    ],
)
def test_one_that_needs_itself_has_nothing_to_keep_to(schema):
    with pytest.raises(BadConstraint, match="leads back to it"):
        loosened(schema)
