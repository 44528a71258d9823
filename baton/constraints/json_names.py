"""Names of properties that llguidance would confuse. It compares names as they are written, and lets a name that the
schema does not list be written with any escape: `"\\u0061"` would count as another name than `"a"`, so its value would
be held to another schema."""

import json
import re
from collections.abc import Mapping
from typing import Any

from baton.constraints.json_numbers import values_in
from baton.constraints.json_patterns import asks_for_controls

_ANY_NAME = "^(?s:.*)$"
# A schema with one of these keeps its names as they are: the library accepts no overlapping patterns, counts properties
# only where there are no patterns, and would not find the target of a reference.
_AS_THEY_ARE = re.compile(r'"(?:patternProperties|minProperties|maxProperties)": |"\$ref": "[^"]*/additionalProperties')
# References to properties of an object within the root, and of the root: they would lead nowhere, or to false, where
# listed names replace the properties.
_INTO_INNER = re.compile(r'"\$ref": "#/[^"]+/(?:additionalP|p)roperties["/]')
_INTO_ROOT = re.compile(r'"\$ref": "#/(?:additionalP|p)roperties["/]')
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
ESCAPES_WITHOUT_U = 'nrbtf\\"'  # each name has one spelling with these
_NEED_U = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_NOT_WRITTEN = (
    r"has a control character, which needs \u, and no text has that where names of others keep to a schema: leave it out, "
    "or give additionalProperties false everywhere"
)
_COUNTED_TWICE = (
    "would count a name twice that is written twice: give at most one more than there are names in required, "
    "or additionalProperties false"
)


def may_rewrite_names(root: Any) -> bool:
    """Return whether `plain_names` may be used in this schema."""
    return not _AS_THEY_ARE.search(json.dumps(root))


def may_list_names(root: Any) -> bool:
    """Return whether objects of this schema may have the names that their `propertyNames` list as properties: no
    reference leads to a property of theirs."""
    written = json.dumps(root)
    has_root_names = isinstance(root, dict) and "propertyNames" in root
    return not _INTO_INNER.search(written) and not (has_root_names and _INTO_ROOT.search(written))


def plain_names(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords that leave names outside `properties` free, but forbid unneeded escapes in them."""
    if not schema.get("properties") or not _is_open(schema):
        return {}
    return {"patternProperties": {_ANY_NAME: True}, "additionalProperties": False}


def mixes_names(schema: Mapping[str, Any], are_rewritten: bool) -> bool:
    """Return whether a property could be written under a spelling that this schema (without its subschemas) does not
    list, although it is a listed name. `are_rewritten`: as by `plain_names`."""
    names = [*_names(schema.get("properties")), *_names(schema.get("required"))]
    if not names and not schema.get("patternProperties"):
        return False
    is_open_to_all = schema.get("additionalProperties") is not False and not (are_rewritten and _is_open(schema))
    return is_open_to_all or any(map(_CONTROLS.search, names))


def is_plain(name: str) -> bool:
    """Return whether a name has no character that JSON writes in more than one way."""
    return not _CONTROLS.search(name)


def check_counts(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the problem with a bound on the number of properties, as (path, reason), or None."""
    least, required = schema.get("minProperties"), schema.get("required")
    if not isinstance(least, int) or (
        schema.get("additionalProperties") is False and not schema.get("patternProperties")
    ):
        return None
    return ("/minProperties", _COUNTED_TWICE) if least > len(set(_names(required))) + 1 else None


def check_texts(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the text of a const, enum or pattern that needs `\\u` to be written, as (path, reason), or None."""
    if isinstance(pattern := schema.get("pattern"), str) and asks_for_controls(pattern):
        return "/pattern", _NOT_WRITTEN
    for keyword in ("const", "enum"):
        for path, value in values_in(f"/{keyword}", schema.get(keyword)):
            if isinstance(value, str) and _NEED_U.search(value):
                return path, _NOT_WRITTEN
    return None


def _is_open(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties", True) in (True, {})


def _names(found: Any) -> list[str]:
    """Return the names in a value of `properties` or `required`, which may have the wrong shape."""
    return [name for name in found if isinstance(name, str)] if isinstance(found, dict | list) else []
