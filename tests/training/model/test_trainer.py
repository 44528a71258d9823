"""The trainer learns, follows its plan, and resumes as if it had never stopped."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.engine.core import cpu
from baton.training.data.batches import Batches
from baton.training.data.corpus import Corpus, Document
from baton.training.data.files import save_atomically
from baton.training.data.tokenizer import train_tokenizer
from baton.training.model.llama import Llama, ModelConfig
from baton.training.model.mixture import Mixture, MixtureConfig, mixture_loss
from baton.training.model.trainer import Trainer, TrainingPlan, distillation_loss, next_token_loss
from tests.training.products import Products

CONFIG = ModelConfig(280, 32, 64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, max_length=64)
PLAN = TrainingPlan(
    minutes=1e6, max_tokens=20 * 256, batch_tokens=256, lengths=((0.0, 32), (0.5, 64)), checkpoint_seconds=1e6
)
TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(200))


@pytest.fixture(scope="module")
def batches():
    corpus = Corpus((Document("a.py", TEXT),), (Document("test/b.py", TEXT.replace("x", "y")),), ())
    return Batches(train_tokenizer([TEXT], CONFIG.vocab_size), corpus)


def trainer(batches, checkpoint, plan=PLAN, make_loss=next_token_loss):
    torch.manual_seed(0)
    model = Llama(CONFIG)
    return Trainer(model, make_loss(model), batches, plan, checkpoint)


def test_windows_grow_and_targets_follow_inputs(batches):
    inputs, targets = batches.draw(0, 256, 32)
    assert inputs.shape == targets.shape == (8, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(batches.draw(512, 256, 32)[0], batches.draw(512, 256, 32)[0])
    with pytest.raises(ValueError, match="a window needs 100001"):
        batches.draw(0, 256, 100_000)


def test_windows_cover_the_text_evenly(batches, monkeypatch):
    monkeypatch.setattr(batches, "_library", np.arange(2000, dtype=np.uint16))  # a token names its position
    monkeypatch.setattr(batches, "_tests", np.array([], dtype=np.uint16))
    inputs, _ = batches.draw(0, 4000, 32)
    assert len(inputs.unique()) > 0.95 * 2000  # independent draws would reach 86 %


def test_learning_rate_rises_holds_and_ends_at_zero():
    plan = replace(PLAN, warmup=0.1, decay_from=0.5)
    factors = [round(plan.lr_factor(progress), 3) for progress in (0.0, 0.05, 0.1, 0.5, 0.75, 1.0, 1.2)]
    assert factors == [0.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert [plan.length_at(progress) for progress in (0.0, 0.49, 0.5, 1.0)] == [32, 32, 64, 64]


def test_training_lowers_the_loss(batches, tmp_path):
    run = trainer(batches, tmp_path / "a.pt")
    before = run.loss(*batches.draw(0, 256, 32)).item()
    figures = run.run("test")
    assert figures["num_steps"] == 20 and figures["num_tokens"] == PLAN.max_tokens
    assert run.loss(*batches.draw(0, 256, 32)).item() < before - 0.5


def test_time_alone_ends_a_run(batches, tmp_path):
    plan = replace(PLAN, minutes=0.01, max_tokens=10**12)
    assert trainer(batches, tmp_path / "a.pt", plan).run("test")["minutes"] < 0.2


def test_a_resumed_run_ends_with_the_same_weights(batches, tmp_path):
    whole = trainer(batches, tmp_path / "whole.pt")
    whole.run("whole")
    first = trainer(batches, tmp_path / "halves.pt")
    for _ in range(7):
        first._step()
    first._save()
    second = trainer(batches, tmp_path / "halves.pt")
    assert second.num_steps == 7
    second.run("second")
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_of_another_shape_is_refused(batches, tmp_path):
    trainer(batches, tmp_path / "a.pt")._save()
    model = Llama(replace(CONFIG, hidden_size=16))
    with pytest.raises(ValueError, match="another shape"):
        Trainer(model, next_token_loss(model), batches, PLAN, tmp_path / "a.pt")


def test_distillation_is_least_where_both_agree(batches):
    torch.manual_seed(1)
    teacher, other = Llama(CONFIG), Llama(CONFIG)
    drawn = batches.draw(0, 256, 32)
    assert distillation_loss(teacher, teacher)(*drawn) < distillation_loss(other, teacher)(*drawn)


@pytest.mark.parametrize("has_bf16, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_matrices_are_multiplied_in_what_the_processor_multiplies(batches, tmp_path, monkeypatch, has_bf16, dtype):
    """Where torch emulates bf16, a step of the demo's target took 20 times as long as in fp32."""
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: has_bf16)
    with Products() as products:
        trainer(batches, tmp_path / "a.pt")._step()
    assert products.dtypes == {dtype}
    model, teacher = Llama(CONFIG), Llama(CONFIG)
    mixture = Mixture(MixtureConfig(280, 32, 32, 1, 2, 1, 16, max_length=64, num_experts=2))
    for loss in (next_token_loss(model), distillation_loss(model, teacher), mixture_loss(mixture)):
        with Products() as products:
            loss(*batches.draw(0, 256, 32)).backward()
        assert products.dtypes == {dtype}


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_atomically(path, fail)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
