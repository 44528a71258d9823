"""Schemas that nobody thought of: every finished answer of the demo model is valid under jsonschema, and the same split
or whole, speculated or not, preempted."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.constraints.constraint import BadConstraint, Constraint
from baton.constraints.grammar import Vocabulary
from baton.engine.core.request import FinishReason, Request
from tests.support.engine.handover import check_handed_over, hand_over
from tests.support.engine.serving import check_same, serve
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.draft_models import load_draftable

MODEL = Path(__file__).resolve().parents[2] / "demo" / "target"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
NAMES = st.sampled_from(["a", "b", "name", "größe"])
SCALARS = st.sampled_from([1, "two", None, True, 2.5, '\\"', "ü"])


def typed(kind: str, **bounds: st.SearchStrategy) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=bounds)


LEAVES = st.one_of(
    typed("string", minLength=st.integers(0, 3), maxLength=st.integers(2, 9)),
    typed("string", pattern=st.sampled_from(["^[a-f]{2,5}$", "x+y?", "^(in|out)-[0-9]+$", "[^a-z]"])),
    typed("string", format=st.sampled_from(["date", "time", "uuid", "ipv4", "date-time"])),
    typed("integer", minimum=st.integers(-9, 3), maximum=st.integers(0, 99)),
    typed("number", exclusiveMinimum=st.integers(-3, 3), maximum=st.sampled_from([0.5, 7, 12.25])),
    typed("boolean"),
    typed("null"),
    st.fixed_dictionaries({"enum": st.lists(SCALARS, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"const": SCALARS}),
)


def containers(inner: st.SearchStrategy) -> st.SearchStrategy[dict]:
    names = st.fixed_dictionaries(
        {
            "properties": st.dictionaries(NAMES, inner, min_size=1),
            "required": st.lists(NAMES, unique=True, max_size=3),
            "additionalProperties": st.sampled_from([False, {"type": "boolean"}]),
        }
    ).map(lambda part: {"type": "object", **part})
    items = st.fixed_dictionaries({"minItems": st.integers(0, 2), "maxItems": st.integers(1, 3), "items": inner})
    return st.one_of(
        names,
        items.map(lambda part: {"type": "array", **part}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
    )


SCHEMAS = st.recursive(LEAVES, containers, max_leaves=6)


def corpus(count: int) -> list[dict]:
    """Return as many schemas, always the same, that can be kept."""
    vocabulary = Vocabulary((MODEL / "tokenizer.json").read_bytes(), TOKENIZER.get_vocab_size())
    found: dict[str, dict] = {}

    @settings(
        max_examples=4 * count, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(SCHEMAS)
    def collect(schema):
        text = json.dumps(schema)
        if text not in found and len(found) < count:
            try:
                vocabulary.compile(Constraint("json_schema", text))
            except BadConstraint as error:
                assert "\n" not in str(error)
            else:
                found[text] = schema

    collect()
    return list(found.values())


def asking(schemas: list[dict]) -> list[Request]:
    prompts = ['{"name": ', "def main():\n    return ", "The following JSON:\n"]
    requests = []
    for index, schema in enumerate(schemas):
        sampling = [dict(), dict(temperature=1.0, seed=index), dict(temperature=0.8, top_p=0.9, seed=index)][index % 3]
        prompt_ids = TOKENIZER.encode(prompts[index % len(prompts)]).ids
        request = engine_request(f"s{index}", prompt_ids, 160, stop_token_ids=frozenset([0]), **sampling)
        requests.append(replace(request, constraint=Constraint("json_schema", json.dumps(schema))))
    return requests


def check_corpus(count: int) -> None:
    schemas = corpus(count)
    assert len(schemas) == count
    requests = asking(schemas)
    plain, _ = serve(load_draftable(MODEL), requests)
    num_whole = 0
    for schema, request in zip(schemas, requests, strict=True):
        tokens, reason = plain[request.key].answer()[0]
        if reason is FinishReason.STOP:
            num_whole += 1
            answer = json.loads(TOKENIZER.decode(tokens))
            jsonschema.Draft202012Validator(schema).validate(answer)
    assert num_whole > 0.7 * count  # the others are cut off, in strings for the most part
    check_same(serve(load_draftable(MODEL, speculator="ngram", num_draft_tokens=5), requests)[0], plain, plain)
    check_same(serve(load_draftable(MODEL, num_blocks=30), requests)[0], plain, plain)
    firsts, rest = hand_over(
        load_draftable(MODEL), load_draftable(MODEL, speculator="ngram", num_draft_tokens=3), requests
    )
    for request in requests:
        check_handed_over(firsts, rest, request, plain[request.key])


def test_a_small_part_of_the_corpus():
    check_corpus(15)


@pytest.mark.long
def test_three_hundred_schemas():
    check_corpus(300)
