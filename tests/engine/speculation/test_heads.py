"""Heads at work: answers equal plain decoding whatever they guess, and folders that do not fit are refused at start."""

import json
import shutil

import pytest

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.models.spec import ModelError
from tests import bare
from tests.heads import TEXT, make_heads, make_learned_model
from tests.models import make_model
from baton.training.tokenizer import load_tokenizer

KINDS = ("medusa", "eagle")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_learned_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def heads(model, tmp_path_factory):
    return {kind: make_heads(tmp_path_factory.mktemp(kind), kind, model) for kind in KINDS}


def requests(model):
    """Greedy and seeded, of all sampling fields, short and long prompts."""
    token_ids = load_tokenizer(model).encode(TEXT).ids
    fields = (
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.7, "seed": 8, "top_p": 0.9, "top_k": 20},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 1.5, "seed": 9, "n": 3},
        {"temperature": 1.0, "seed": 10, "min_p": 0.05, "logprobs": 2},
    )
    return [
        bare.make_request(f"{index}", token_ids[index : index + 5 + 17 * index], max_tokens=40 + 3 * index, **sampling)
        for index, sampling in enumerate(fields)
    ]


@pytest.mark.parametrize("num_draft_tokens", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_plain_decoding(kind, num_draft_tokens, model, heads):
    plain = bare.run(bare.load_engine(model), requests(model))
    options = dict(speculator=kind, draft_model=heads[kind], num_draft_tokens=num_draft_tokens)
    engine = bare.load_engine(model, **options)
    for _ in range(2):  # again with what is kept of those that went before
        assert bare.run(engine, requests(model)) == plain
        engine.check_integrity()
    counts = engine.speculator.counts[kind]
    if num_draft_tokens is not None:
        assert counts.num_drafts > 20
        assert counts.accepted[0] > 0.3 * counts.proposed[0], counts


@pytest.mark.parametrize("kind", KINDS)
def test_more_sequences_than_slots_never_wait_for_each_other(kind, model, heads):
    options = dict(speculator=kind, draft_model=heads[kind], num_draft_tokens=2, max_num_seqs=3)
    single = [request for request in requests(model) if request.sampling.n == 1]
    plain = bare.run(bare.load_engine(model, max_num_seqs=3), single)
    assert bare.run(bare.load_engine(model, **options), single) == plain


def test_eagle_goes_on_beyond_its_window(model, heads, monkeypatch):
    """Its context moves down in its slot, and rows that were never asked for are dropped."""
    monkeypatch.setattr("baton.engine.speculation.eagle.WINDOW", 24)
    token_ids = load_tokenizer(model).encode(TEXT).ids
    request = bare.make_request("a", token_ids[:10], max_tokens=200)
    engine = bare.load_engine(model, speculator="eagle", draft_model=heads["eagle"], num_draft_tokens=3)
    assert bare.run(engine, [request]) == bare.run(bare.load_engine(model), [request])
    counts = engine.speculator.counts["eagle"]
    assert counts.accepted[0] > 0.3 * counts.proposed[0], counts


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_said(kind, model, heads):
    engine = bare.load_engine(model, speculator=kind, draft_model=heads[kind])
    assert engine.speculator.num_bytes > 10_000


def changed(folder, tmp_path, **values):
    """A copy of the folder with other values in its config; None takes a key out."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text()) | values
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return copy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 301}, "vocab_size 301, the target .* has 300"),
        ({"hidden_size": 32}, "hidden_size 32, the target .* has 64"),
        ({"vocab_size": None}, "vocab_size None"),
        ({"num_heads": 17}, "tensor|at most 16"),
        ({"num_heads": 5}, "skip.4.weight is missing"),
        ({"num_heads": 0}, "num_heads is 0, not a positive integer"),
        ({"speculator": "hydra"}, "speculator 'hydra'"),
        ({"speculator": "eagle"}, "speculator medusa: .* holds what eagle needs|holds eagle weights"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_in_one_line(values, message, model, heads, tmp_path):
    folder = changed(heads["medusa"], tmp_path, **values)
    with pytest.raises((ValueError, ModelError), match=message) as refusal:
        Engine.load(EngineConfig(model, speculator="medusa", draft_model=folder))
    assert "\n" not in str(refusal.value)


def test_heads_of_another_model_of_the_same_shape_are_refused(heads, tmp_path):
    from tests.heads import SHAPE

    other = make_model(tmp_path / "other", SHAPE, seed=5)
    for kind in KINDS:
        with pytest.raises(ValueError, match="trained for another model .*baton train-draft"):
            Engine.load(EngineConfig(other, speculator=kind, draft_model=heads[kind]))
