"""Heads at work: answers equal plain decoding whatever they guess, and folders that do not fit are refused at start."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.sampling_params import SamplingParams
from baton.training.data.tokenizer import load_tokenizer
from tests.support import bare_engine
from tests.support.model_folders.learned_model import TEXT, make_heads, make_learned_model
from tests.support.models import make_model

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
        bare_engine.bare_request(
            f"{index}", token_ids[index : index + 5 + 17 * index], max_tokens=40 + 3 * index, **sampling
        )
        for index, sampling in enumerate(fields)
    ]


@pytest.mark.parametrize("num_draft_tokens", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_plain_decoding(kind, num_draft_tokens, model, heads):
    plain = bare_engine.serve_alone(bare_engine.load_engine(model), requests(model))
    options = dict(speculator=kind, draft_model=heads[kind], num_draft_tokens=num_draft_tokens)
    engine = bare_engine.load_engine(model, **options)
    for _ in range(2):  # again with what was kept of the first round
        assert bare_engine.serve_alone(engine, requests(model)) == plain
        engine.check_integrity()
    counts = engine.speculator.counts[kind]
    if num_draft_tokens is not None:
        assert counts.num_drafts > 20
        assert counts.accepted[0] > 0.3 * counts.proposed[0], counts


@pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_the_first_of_two_ranks(kind, model, heads):
    """They ask all ranks for rows of the embedding and of the head."""
    plain, options = (
        bare_engine.serve_alone(bare_engine.load_engine(model), requests(model)),
        dict(speculator=kind, num_draft_tokens=4),
    )
    engine = bare_engine.load_engine(model, draft_model=heads[kind], tensor_parallel=2, threads=1, **options)
    try:
        assert bare_engine.serve_alone(engine, requests(model)) == plain
    finally:
        engine.ranks.close()
    counts = engine.speculator.counts[kind]
    assert counts.accepted[0] > 0.3 * counts.proposed[0], counts


def test_hidden_states_are_followed_while_another_proposes(model, heads, monkeypatch):
    """Prompt lookup has its turns; what the layer has seen by then is not forgotten."""
    engine = bare_engine.load_engine(model, speculator="auto", draft_model=heads["eagle"], num_draft_tokens=2)
    eagle, closed = engine.speculator.proposers["eagle"], []
    close = eagle.close
    monkeypatch.setattr(eagle, "close", lambda draftee: (closed.append(draftee), close(draftee)))
    token_ids = load_tokenizer(model).encode(TEXT).ids
    request = bare_engine.bare_request("a", token_ids[:40], max_tokens=150, temperature=1.0, seed=3)
    bare_engine.serve_alone(engine, [request])
    engine.step()
    assert len(closed) == 1
    assert all(engine.speculator.counts[name].num_drafts > 0 for name in ("ngram", "eagle"))


@pytest.mark.parametrize("kind", KINDS)
def test_more_sequences_than_slots_never_wait_for_each_other(kind, model, heads):
    options = dict(speculator=kind, draft_model=heads[kind], num_draft_tokens=2, max_num_seqs=3)
    single = [request for request in requests(model) if request.sampling.n == 1]
    plain = bare_engine.serve_alone(bare_engine.load_engine(model, max_num_seqs=3), single)
    assert bare_engine.serve_alone(bare_engine.load_engine(model, **options), single) == plain


def test_eagle_goes_on_beyond_its_window(model, heads, monkeypatch):
    """Its context moves down in its slot, and rows that were never asked for are dropped."""
    monkeypatch.setattr("baton.engine.speculation.proposers.feature_proposer.WINDOW", 8)
    token_ids = load_tokenizer(model).encode(TEXT).ids
    request = bare_engine.bare_request("a", token_ids[:10], max_tokens=200)
    engine = bare_engine.load_engine(model, speculator="eagle", draft_model=heads["eagle"], num_draft_tokens=3)
    eagle, moved = engine.speculator.proposers["eagle"], []
    move = eagle._move_down
    eagle._move_down = lambda context: (moved.append(context.num_rows), move(context))
    assert bare_engine.serve_alone(engine, [request]) == bare_engine.serve_alone(
        bare_engine.load_engine(model), [request]
    )
    assert moved and min(moved) > 8
    counts = engine.speculator.counts["eagle"]
    assert counts.accepted[0] > 0.3 * counts.proposed[0], counts


@pytest.mark.skipif(native.library() is None, reason=native.unavailable())
@pytest.mark.parametrize("kind", ["medusa", "eagle", "draft"])
def test_one_native_call_guesses_what_the_passes_do_one_by_one(kind, model, heads, tmp_path):
    """Sequences of all ages in one batch, in fp32, where both add up to the same tokens."""
    if kind == "draft":
        torch.manual_seed(1)
        folder = Path(shutil.copytree(model, tmp_path / "draft"))
        weights = load_file(folder / "model.safetensors")
        noisy = {name: tensor + 0.02 * tensor.std() * torch.randn_like(tensor) for name, tensor in weights.items()}
        save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    else:
        folder = heads[kind]
    options = dict(dtype="fp32", speculator=kind, draft_model=folder, num_draft_tokens=5)
    greedy = [replace(request, sampling=SamplingParams(n=request.sampling.n)) for request in requests(model)]
    seen = []
    for is_native in (True, False):
        engine = bare_engine.load_engine(model, **options)
        proposer, drafts = engine.speculator.proposers[kind], []
        call = "_native" if kind == "medusa" else "_passes"
        assert getattr(proposer, call) is not None
        if not is_native:
            setattr(proposer, call, None)
        propose = proposer.propose

        def watched(asks, propose=propose, drafts=drafts):
            found = propose(asks)
            drafts.append([(ask.draftee.request.key, ask.num_tokens, draft) for ask, draft in zip(asks, found)])
            return found

        proposer.propose = watched
        seen.append((bare_engine.serve_alone(engine, greedy), drafts))
    assert seen[0] == seen[1]
    assert sum(len(draft) for step in seen[0][1] for _, _, draft in step) > 200


@pytest.mark.parametrize("kind", KINDS)
def test_up_to_the_end_of_the_context(kind, model, heads):
    """One sequence has two places left when others want many tokens."""
    token_ids = load_tokenizer(model).encode(TEXT).ids
    prompts = [
        bare_engine.bare_request(str(length), token_ids[:length], max_tokens=128 - length)
        for length in (90, 100, 111, 126)
    ]
    options = dict(max_model_len=128, speculator=kind, draft_model=heads[kind], num_draft_tokens=16)
    assert bare_engine.serve_alone(bare_engine.load_engine(model, **options), prompts) == bare_engine.serve_alone(
        bare_engine.load_engine(model, max_model_len=128), prompts
    )


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_said(kind, model, heads):
    engine = bare_engine.load_engine(model, speculator=kind, draft_model=heads[kind])
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
    from tests.support.model_folders.learned_model import SHAPE

    other = make_model(tmp_path / "other", SHAPE, seed=5)
    for kind in KINDS:
        with pytest.raises(ValueError, match="trained for another model .*baton train-draft"):
            Engine.load(EngineConfig(other, speculator=kind, draft_model=heads[kind]))
