"""Heads learn what the target would say, resume exactly, and what they were trained with is what serves them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.core import cpu
from baton.engine.core.config import EngineConfig, resolve
from baton.engine.core.request import Key, Request
from baton.engine.speculation.proposers import eagle, medusa
from baton.engine.speculation.proposers.proposer import Advance, Draftee, DraftRequest
from baton.sampling_params import SamplingParams
from baton.training.data.corpus import Document
from baton.training.heads.heads import agreement, export_heads, train_heads
from tests.support.model_folders.learned_model import DOCUMENTS, make_learned_model, make_trainer
from tests.training.products import Products

KINDS = ("medusa", "eagle")
MODULES = {"medusa": medusa, "eagle": eagle}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_learned_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_finds_the_targets_tokens(kind, model, tmp_path):
    trainer, target = make_trainer(kind, model, tmp_path / "a.safetensors")
    text = trainer.batches.draw(0, 1024, 256)
    before, untrained = trainer.loss(*text).item(), agreement(trainer.model, target, *text)
    trainer.run(kind)
    assert trainer.loss(*text).item() < before - 1.0
    trained = agreement(trainer.model, target, *text)
    assert min(trained) > 0.5 and min(trained) > max(untrained) + 0.2, (untrained, trained)


@pytest.mark.parametrize("has_bf16, dtype", [(True, torch.bfloat16), (False, torch.float32)])
@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_multiplied_in_what_the_processor_multiplies(kind, model, tmp_path, monkeypatch, has_bf16, dtype):
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: has_bf16)
    trainer, _ = make_trainer(kind, model, tmp_path / "a.safetensors")
    text = trainer.batches.draw(0, 512, 256)
    with Products() as products:
        trainer.loss(*text).backward()
    assert dtype in products.dtypes and (has_bf16 or products.dtypes == {dtype})  # attention of a draft is in fp32


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_with_the_same_weights(kind, model, tmp_path):
    whole, _ = make_trainer(kind, model, tmp_path / "whole.safetensors", num_steps=6)
    whole.run("whole")
    first, _ = make_trainer(kind, model, tmp_path / "halves.safetensors", num_steps=6)
    for _ in range(2):
        first._step()
    first._save()
    second, _ = make_trainer(kind, model, tmp_path / "halves.safetensors", num_steps=6)
    assert second.num_steps == 2
    second.run("second")
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_is_what_proposes(kind, model, tmp_path):
    """One long decode run: rows from its first step on, as a window whose context begins there."""
    trainer, target = make_trainer(kind, model, tmp_path / "a.safetensors", num_steps=12)
    trainer.run(kind)
    export_heads(trainer.model, kind, target, tmp_path / "heads")
    with torch.no_grad():
        same, total = compare(trainer, target, kind, tmp_path / "heads")
    assert same / total > 0.97, f"{same} of {total}"  # bf16 may part near ties


def compare(trainer, target, kind, folder):
    """Tokens that the module at every place and a proposer, fed step by step, name alike; and how many there are."""
    config = resolve(EngineConfig(target.spec.folder, max_num_seqs=2, max_num_batched_tokens=128), target.model.spec)
    proposer = MODULES[kind].load(folder, target.model, config)
    token_ids = trainer.batches.draw(0, 256, 64)[0][:1]
    hidden = []
    target.model.norm, norm = (lambda rows: hidden.append(rows) or norm(rows)), target.model.norm
    try:
        features = target.features(token_ids)
    finally:
        target.model.norm = norm
    guesses = list(trainer.model.guesses(target, features, torch.cat((token_ids, token_ids[:, :1]), dim=1)))

    record = token_ids[0].tolist()
    request = Request(Key("a"), tuple(record[:1]), 1, SamplingParams(), max_tokens=500)
    draftee = Draftee(request, 0, record[:2])
    proposer.open(draftee)
    same = total = 0
    for place in range(guesses[0].shape[1] - 1):
        del draftee.token_ids[place + 1 :]
        draftee.token_ids += record[place + 1 : place + 2]
        proposer.advance([Advance(draftee, 0, 0, place)], hidden[0])
        (draft,) = proposer.propose([DraftRequest(draftee, 2)])
        assert len(draft) == 2
        # Later guesses of the module read the text, those of the proposer its own first one.
        upto = 2 if kind == "medusa" or draft[0] == record[place + 2] else 1
        expected = [int(guess[0, place].argmax()) for guess in guesses[:upto]]
        same += sum(ours == theirs for ours, theirs in zip(draft, expected))
        total += upto
    proposer.close(draftee)
    return same, total


def test_a_run_writes_a_folder_and_leaves_no_state(model, tmp_path, monkeypatch):
    monkeypatch.setattr("baton.training.heads.heads.MAX_EPOCHS", 1)
    figures = train_heads("medusa", model, DOCUMENTS, tmp_path / "heads", minutes=0.05)
    assert len(figures["agreement"]) == 4
    assert sorted(path.name for path in (tmp_path / "heads").iterdir()) == [
        "config.json",
        "model.safetensors",
        "training.json",
    ]
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert config["speculator"] == "medusa" and config["vocab_size"] == 300 and config["num_heads"] == 4
    assert json.loads((tmp_path / "heads" / "training.json").read_text()) == figures


def test_a_text_that_is_too_short_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match=r"the training text has \d+ tokens, at least 4096 are needed"):
        train_heads("eagle", model, [Document("a.py", "x = 1\n")], tmp_path / "heads", minutes=1)
    assert not (tmp_path / "heads").exists()


def test_weights_of_another_shape_are_no_checkpoint(model, tmp_path):
    trainer, _ = make_trainer("medusa", model, tmp_path / "a.safetensors")
    trainer._save()
    weights = load_file(tmp_path / "a.safetensors")
    cut = {name: tensor[..., :1].clone() for name, tensor in weights.items()}
    save_file(cut, tmp_path / "b.safetensors", {"counters": "[0, 0, 0, 0]"})
    with pytest.raises(ValueError, match="another shape"):
        make_trainer("medusa", model, tmp_path / "b.safetensors")
