"""A constraint as data, and its grammar in llguidance's language. Constraints that an inspection of the text can refuse
are refused here."""

import json
import re
from typing import NamedTuple

from llguidance import LLMatcher

from baton.constraints.json_patterns import repeats_for_good, rewrite_classes
from baton.constraints.json_schema import check_schema, check_support, rewrite_schema
from baton.lines import one_line

MAX_BYTES = 128 << 10  # of one constraint: one of this size takes up to 2 s to compile
MAX_CHOICES = 4096
MAX_TOKEN_IDS = 1 << 20  # of a vocabulary: ids without a token take room in it too
MAX_DEPTH = 64  # of nested brackets
_PAIRS = {")": "(", "]": "[", "}": "{"}
_DIRECTIVES = ("%import", "%ignore", "%declare")
_NO_OPTIONS = "%llguidance {}"  # how guidance begins each grammar


class BadConstraint(ValueError):
    """A constraint that cannot be enforced. `path`: the part of it that is wrong, "" for the whole; `reason`: the end
    of a sentence whose subject is that part."""

    def __init__(self, path: str, reason: str):
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason


class Constraint(NamedTuple):
    """A constraint on an answer."""

    kind: str  # the name of the field in the contract: json_schema, json_object, regex, choice, grammar
    text: str  # json_object: empty; choice: a JSON array of the texts


def constraint_of(message) -> Constraint:
    """Return the constraint in a baton.v1.Constraint message. Raises BadConstraint."""
    kind = message.WhichOneof("kind")
    if kind is None:
        kinds = ", ".join(field.name for field in message.DESCRIPTOR.fields)
        raise BadConstraint("", f"one of {kinds} is needed")
    value = getattr(message, kind)
    if kind == "json_object":
        if not value:
            raise BadConstraint(kind, "must be true, or unset")
        return Constraint(kind, "")
    return Constraint(kind, json.dumps(list(value.texts)) if kind == "choice" else value)


def write_constraint(message, constraint: Constraint) -> None:
    """Write a constraint into a baton.v1.Constraint message, the inverse of `constraint_of`."""
    kind, text = constraint
    if kind == "choice":
        message.choice.texts.extend(json.loads(text))
    else:
        setattr(message, kind, True if kind == "json_object" else text)


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar of a constraint in llguidance's language. Raises BadConstraint."""
    kind, text = constraint
    check_size(text)
    if kind == "choice":
        return LLMatcher.grammar_from_lark(_choices(json.loads(text)))
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema(rewrite_schema({"type": "object"}))
    if not text:
        raise BadConstraint("", "is empty")
    _check_depth(text)
    if kind == "json_schema":
        return _schema_grammar(text)
    if kind == "regex":
        if repeats_for_good(text):
            raise BadConstraint("", "possessive repetition (*+, ++, ?+, {n}+) is not supported: leave out the last +")
        return LLMatcher.grammar_from_regex(rewrite_classes(text))
    _check_directives(text)
    return LLMatcher.grammar_from_lark(text)


def check_size(text: str, where: str = "") -> None:
    """Check the size of a constraint. `where` names its language in the error, if it is not the sender's. Raises
    BadConstraint."""
    if (num_bytes := len(text.encode())) > MAX_BYTES:
        raise BadConstraint("", f"has {num_bytes} bytes{where}, at most {MAX_BYTES} are allowed")


def _choices(texts: list[str]) -> str:
    if not texts:
        raise BadConstraint("", "is empty: name one text at least")
    if len(texts) > MAX_CHOICES:
        raise BadConstraint("", f"has {len(texts)} texts, at most {MAX_CHOICES} are allowed")
    for index, text in enumerate(texts):
        if not text:
            raise BadConstraint(f"texts[{index}]", "is empty")
    # All texts are one lexeme: as a rule each, 2,000 texts would be 2,000 rows of the parser.
    return "start: TEXT\nTEXT: " + " | ".join(map(quoted, texts))


def quoted(text: str) -> str:
    """Return an expression of a grammar that matches just this text. Brackets in it are escaped, because `_check_depth`
    counts those in texts too, and the object that a tool's call opens in one text is closed in another. Characters that
    Lark does not allow are escaped as well."""
    return re.sub(r"[][(){}\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _schema_grammar(text: str) -> str:
    try:
        schema = json.loads(text)
        if problem := check_schema(schema) or check_support(schema):
            raise BadConstraint(*problem)
        if isinstance(schema, bool):
            if not schema:
                raise BadConstraint("", "no text keeps to it: the schema is false")
            schema = {}
        return LLMatcher.grammar_from_json_schema(json.dumps(rewrite_schema(schema), allow_nan=False))
    except BadConstraint:
        raise
    except (ValueError, RecursionError) as error:
        raise BadConstraint("", f"is not JSON: {one_line(error, 200)}") from None


def _check_depth(text: str) -> None:
    """Check the depth of brackets, including those in strings: no person nests deeper. Raises BadConstraint."""
    depth = most = 0
    for character in text:
        if character in "([{":
            depth += 1
            most = max(most, depth)
        elif character in _PAIRS:
            depth = max(0, depth - 1)
    if most > MAX_DEPTH:
        raise BadConstraint("", f"has brackets {most} deep, at most {MAX_DEPTH} are allowed")


def _check_directives(text: str) -> None:
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"\s*(%\w*)", line)
        if found and found[1] not in _DIRECTIVES and line.strip() != _NO_OPTIONS:
            raise BadConstraint(f"line {number}", f"{found[1][:40]} is not supported, only {', '.join(_DIRECTIVES)}")
