"""Schemas and answers that nobody thought of: what the masks let through to its end is valid under jsonschema, and
there is always an end."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.constraints.constraint import BadConstraint, Constraint
from baton.constraints.grammar import Grammar, Vocabulary
from tests.support.gateway.small_tokenizers import sentencepiece
from tests.support.gateway.vocabularies import byte_vocabulary

NAMES = ["a", "b", "x1", "größe", 'q"', "b\\", "\n", "\x1f", "\x7f", "😀", ""]
PATTERNS = ["^x", "^a", "^[ab]+", "b", r"^(?:x1|\n)", "[0-9]", "^ö", "[^a[]"]
LEAVES = [
    {"const": 1}, {"const": "1"}, {"enum": ["a", None, 2.5]}, {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "number", "exclusiveMinimum": -0.5, "maximum": 7.25}, {"type": "string", "maxLength": 1},
    {"type": ["string", "null"], "minLength": 1}, {"type": "string", "pattern": "^[^[a]{2}"}, {"type": "boolean"},
    {"type": "integer", "multipleOf": 3}, {"$ref": "#/$defs/x"}, {}, True, False,
]  # fmt: skip
MAX_TOKENS = 200


class Model:
    """A vocabulary, and the tokens that are likely to bring an answer to its end."""

    def __init__(self, source: bytes):
        self.tokenizer = Tokenizer.from_buffer(source)
        self.vocabulary = Vocabulary(source, self.tokenizer.get_vocab_size())
        self.closing = [self.tokenizer.token_to_id(text) for text in '"}],:']

    def ids_of(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


MODELS = {
    "bytes": Model(byte_vocabulary()),
    "sentencepiece": Model(sentencepiece("never", strips_space=False, added=tuple('{}",:\\-0123456789'))),
}


def random_schema(draws: random.Random, depth: int) -> Any:
    if depth == 0 or draws.random() < 0.4:
        return draws.choice(LEAVES)
    kind = draws.random()
    if kind < 0.6:
        schema = random_object(draws, depth - 1)
    elif kind < 0.8:
        schema = random_array(draws, depth - 1)
    else:
        keyword = draws.choice(["anyOf", "allOf", "oneOf"])
        schema = {keyword: [random_schema(draws, depth - 1) for _ in range(draws.randint(1, 3))]}
    if draws.random() < 0.3:
        schema |= random_object(draws, depth - 1)
    keywords = list(schema.items())
    draws.shuffle(keywords)
    return dict(keywords)


def random_object(draws: random.Random, depth: int) -> dict[str, Any]:
    def by_name(names: list[str], most: int) -> dict[str, Any]:
        return {name: random_schema(draws, depth) for name in draws.sample(names, draws.randint(0, most))}

    schema = {
        "type": "object",
        "properties": by_name(NAMES, 3),
        "additionalProperties": draws.choice([True, False, random_schema(draws, depth)]),
        "patternProperties": by_name(PATTERNS, 2),
        "required": draws.sample(NAMES, draws.randint(0, 2)),
        "minProperties": draws.randint(0, 3),
        "maxProperties": draws.randint(1, 4),
    }
    chances = {"minProperties": 0.15, "maxProperties": 0.15, "patternProperties": 0.3, "required": 0.4}
    return {keyword: value for keyword, value in schema.items() if draws.random() < chances.get(keyword, 0.7)}


def random_array(draws: random.Random, depth: int) -> dict[str, Any]:
    schema = {
        "type": "array",
        "prefixItems": [random_schema(draws, depth) for _ in range(draws.randint(1, 2))],
        "items": random_schema(draws, depth),
        "minItems": draws.randint(0, 2),
        "maxItems": draws.randint(1, 3),
    }
    return {keyword: value for keyword, value in schema.items() if draws.random() < 0.6}


def likely_texts(draws: random.Random, schema: Any) -> list[str]:
    """Return what an answer may go on with, or should not: the schema's own words too, and all of them with escapes."""
    texts = [
        "null",
        "12",
        "-0.0",
        "7.25",
        "1e5",
        "{}",
        "[]",
        ",",
        ":",
        "}",
        "]",
        '"a"',
        '"\\u0061"',
        '"x"',
        '"\\n"',
        "9]",
    ]
    waiting = [schema]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict | list):
            waiting += found.values() if isinstance(found, dict) else found
            waiting += found if isinstance(found, dict) else ()
        elif isinstance(found, str):
            hidden = "".join(f"\\u{ord(letter):04X}" if draws.random() < 0.5 else letter for letter in found)
            texts += [json.dumps(found), json.dumps(found, ensure_ascii=False), f'"{hidden}"']
    return texts


def random_answer(draws: random.Random, model: Model, grammar: Grammar, texts: list[str]) -> str | None:
    """Return an answer that the masks let through, None for one that becomes too long."""
    cursor, mask, token_ids = grammar.cursor(), model.vocabulary.new_masks(1)[0], list[int]()
    while len(token_ids) < MAX_TOKENS:
        assert cursor.fill(mask), (cursor.problem, model.tokenizer.decode(token_ids))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed or cursor.may_end
        if cursor.may_end and (not allowed or draws.random() < 0.4):
            return model.tokenizer.decode(token_ids)
        closing = [token_id for token_id in model.closing if token_id in allowed]
        following = [draws.choice(closing if closing and draws.random() < 0.6 else allowed)]
        for text in draws.sample(texts, 4):
            if draws.random() < 0.6 and cursor.num_valid(ids := model.ids_of(text)) == len(ids):
                following = ids
        token_ids += following
        cursor.read(token_ids)
    return None


def check_schemas(name: str, seeds: range) -> None:
    model, num_kept, num_whole = MODELS[name], 0, 0
    for seed in seeds:
        draws = random.Random(seed)
        schema = random_object(draws, 2) | {"$defs": {"x": random_object(draws, 1)}}
        try:
            grammar = model.vocabulary.compile(Constraint("json_schema", json.dumps(schema)))
        except BadConstraint as error:
            assert "\n" not in str(error)
            continue
        num_kept += 1
        validator = jsonschema.Draft202012Validator(schema)
        texts = likely_texts(draws, schema)
        for answer in (random_answer(draws, model, grammar, texts) for _ in range(4)):
            if answer is not None:
                num_whole += 1
                assert not [*validator.iter_errors(json.loads(answer))], (seed, answer, json.dumps(schema))
    assert num_kept > len(seeds) / 4 and num_whole > 3 * num_kept


@pytest.mark.parametrize("name", MODELS)
def test_each_token_has_an_id_of_its_own(name):
    """A special one with the id of a digit would end an answer where that is forced."""
    vocabulary = MODELS[name].tokenizer.get_vocab()
    assert len(set(vocabulary.values())) == len(vocabulary)


@pytest.mark.parametrize("name", MODELS)
def test_some_random_schemas_are_kept_to(name):
    check_schemas(name, range(150))


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_ten_thousand_schemas(name):
    check_schemas(name, range(1000, 6000))
