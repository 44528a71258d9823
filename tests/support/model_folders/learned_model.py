"""A small model that knows one text by heart, and heads that have learned to guess it: made in seconds."""

from dataclasses import replace
from pathlib import Path

import torch

from baton.engine.models.registry import read_spec
from baton.training.data.batches import Batches
from baton.training.data.corpus import Corpus, Document
from baton.training.data.tokenizer import load_tokenizer, train_tokenizer
from baton.training.heads.heads import LENGTH, default_plan, export_heads, heads_loss, new_heads
from baton.training.heads.target import FrozenTarget
from baton.training.model.export import export
from baton.training.model.llama import Llama, ModelConfig
from baton.training.model.trainer import Trainer, TrainingPlan, next_token_loss

TEXT = "".join(f"def add_{i % 7}(x, y):\n    total = x + y + {i % 7}\n    return total\n\n\n" for i in range(400))
DOCUMENTS = (Document("a.py", TEXT),)
SHAPE = ModelConfig(300, 64, 128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_length=512)


def make_learned_model(folder: Path, shape: ModelConfig = SHAPE) -> Path:
    """Write a model that continues with TEXT, not always surely."""
    torch.manual_seed(0)
    tokenizer, model = train_tokenizer([TEXT], shape.vocab_size), Llama(shape)
    plan = TrainingPlan(
        minutes=1e6, max_tokens=40 * 1024, batch_tokens=1024, lengths=((0.0, 64),), checkpoint_seconds=1e6
    )
    batches = Batches(tokenizer, Corpus(DOCUMENTS, (), ()))
    Trainer(model, next_token_loss(model), batches, plan, folder / "checkpoint.safetensors").run("model")
    (folder / "checkpoint.safetensors").unlink()
    export(model, tokenizer, folder)
    return folder


def make_trainer(kind: str, model: Path, checkpoint: Path, num_steps: int = 30) -> tuple[Trainer, FrozenTarget]:
    """Return a trainer of heads on TEXT that stops after that many steps."""
    spec = read_spec(model)
    batches = Batches(load_tokenizer(model), Corpus(DOCUMENTS, (), ()))
    plan = default_plan(spec.vocab_size, 1e6, batches.num_tokens)
    plan = replace(plan, max_tokens=num_steps * plan.batch_tokens, checkpoint_seconds=1e6)
    target = FrozenTarget(model, LENGTH, plan.batch_tokens)
    heads = new_heads(target, kind)
    return Trainer(heads, heads_loss(heads, target), batches, plan, checkpoint), target


def make_heads(folder: Path, kind: str, model: Path) -> Path:
    """Write heads of a kind for a model of `make_learned_model`."""
    trainer, target = make_trainer(kind, model, folder / "checkpoint.safetensors")
    trainer.run(kind)
    (folder / "checkpoint.safetensors").unlink()
    export_heads(trainer.model, kind, target, folder)
    return folder
