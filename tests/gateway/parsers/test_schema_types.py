"""Types that a schema names, however it refers to itself."""

from typing import Any

import pytest

from gateway.parsers.schema_types import types_of

ROOT = {
    "properties": {},
    "$defs": {"small": {"type": "integer"}, "a": {"b": {"enum": ["x", None]}}, "a/b~": {"type": "boolean"}},
}


class Counted(dict):
    """An object whose fields are counted as they are asked for."""

    num_asked = 0

    def get(self, *args: Any) -> Any:
        self.num_asked += 1
        return super().get(*args)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"$ref": "#/$defs/small"}, {"oneOf": [{"const": True}, {}]}]}, {"integer", "boolean"}),
        ({"$ref": "#/$defs/a/b"}, {"string", "null"}),
        ({"$ref": "#/$defs/none"}, set()),
        ({"$ref": "#"}, {"object"}),
        ({"$ref": "#/%24defs/a~1b~0"}, {"boolean"}),
        ({"enum": [1, 1.5, [], {}]}, {"integer", "number", "array", "object"}),
        ({"enum": 5, "type": "string", "anyOf": {}}, {"string"}),
        ({"anyOf": [{"$ref": "#/$defs/small"}] * 100}, {"integer"}),
        ({"allOf": [{"$ref": "#/$defs/small"}], "description": "of many"}, {"integer"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"items": {}, "type": "string"}, {"string"}),
        ([], set()),
    ],
)
def test_types_are_those_named_there_and_by_what_it_refers_to(schema, types):
    assert types_of(schema, ROOT) == types


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_a_schema_of_many_references_to_itself_is_looked_at_for_a_while_only(keyword):
    itself = {"$ref": "#/$defs/a"}
    root = Counted({"$defs": {"a": {keyword: [itself] * 20, "type": "integer"}}})
    assert types_of(itself, root) == {"integer"}
    assert root.num_asked < 1000
