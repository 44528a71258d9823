"""Constraints that are served."""

import json

from baton.constraints.constraint import (
    Constraint,
)

GOOD = [
    Constraint("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})),
    Constraint("json_schema", "true"),
    Constraint("json_schema", '{"type": "array", "uniqueItems": false, "items": {"uniqueItems": false}}'),
    Constraint("json_schema", '{"type": "integer", "minimum": 9007199254740992, "maximum": 9223372036854775807}'),
    Constraint("json_schema", '{"enum": [9007199254740992, 1000000000000000000, 1e16, 0.1, true]}'),
    Constraint("json_schema", '{"enum": [3.141592653589793, -1e-9, 13.40495399999, 5e-324, 0.0, 4503599627370497.5]}'),
    Constraint("json_schema", '{"type": "number", "minimum": -14.846324501625219}'),
    Constraint("json_schema", '{"type": "number", "minimum": 0.2, "exclusiveMinimum": 0, "maximum": 0.5}'),
    Constraint("json_schema", '{"type": "object", "minProperties": 2, "required": ["a"]}'),
    Constraint("json_schema", '{"properties": {"a": {}, "b": {}}, "additionalProperties": false, "minProperties": 1}'),
    Constraint("json_schema", '{"properties": {"a": {"const": "\\u001b"}}, "additionalProperties": false}'),
    *(
        Constraint("json_schema", json.dumps({"required": ["a"], "additionalProperties": {"pattern": pattern}}))
        for pattern in (r"^[^\x00-\x1f]+$", r"\\v", r"\n\t\x41", "[\x1fa]")
    ),
    *(
        Constraint("json_schema", json.dumps({"$defs": {"a": schema}, "$ref": "#/$defs/a"}))
        for schema in (
            {"type": ["object", "null"], "properties": {"n": {"$ref": "#/$defs/a"}}, "required": ["n"]},
            {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}},
            {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}, "required": ["n"]},
            {"type": "array", "items": {"$ref": "#/$defs/a"}},
            {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
        )
    ),
    Constraint("json_schema", '{"type": "string", "pattern": "^[(?=]{2}\\\\(?=$"}'),
    Constraint("json_object", ""),
    Constraint("regex", "^[0-9]+$"),
    Constraint("choice", json.dumps(["yes", 'no "really"\n', "größe", "a\x7f\x9f ({"])),
    Constraint("grammar", 'start: greeting " " NAME\ngreeting: "hello" | "bye"\nNAME: /[a-z]+/'),
    Constraint("grammar", "%import common.INT\nstart: INT"),
    Constraint("grammar", '%llguidance {}\n\nstart: a\na[capture, max_tokens=6]: A\nA: "x"'),  # as guidance writes it
    Constraint("grammar", "%import\tcommon.INT\nstart: INT\n%ignore/ /"),
]
