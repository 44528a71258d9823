"""Train a LoRA adapter of the target on an obvious style: source indented by tabs, which the library never is."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from baton.training.data.batches import Batches
from baton.training.data.corpus import Corpus, Document
from baton.training.data.files import save_atomically, save_text
from baton.training.model.llama import Llama
from baton.training.model.trainer import Trainer, TrainingPlan, next_token_loss

RANK, ALPHA = 8, 16
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_INDENT = re.compile(r"^(?:    )+", re.MULTILINE)


class LowRankLinear(nn.Module):
    """A frozen linear with a trainable low-rank part B (A x) beside it; B starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both parts, x [..., in] -> [..., out]."""
        return self.base(x) + (x @ self.lora_A.T) @ self.lora_B.T * (ALPHA / RANK)


class LowRankParts(nn.Module):
    """The trainable parts, by module, of a model on which `adapt` was called."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.modules_by_name = {name: part for name, part in model.named_modules() if isinstance(part, LowRankLinear)}
        self.parts = nn.ParameterList(
            part for each in self.modules_by_name.values() for part in (each.lora_A, each.lora_B)
        )


def adapt(model: Llama) -> None:
    """Add a low-rank part to every linear of the layers, and freeze everything else."""
    model.requires_grad_(False)
    linears = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in _TARGETS]
    for name, module in linears:
        parent, _, own = name.rpartition(".")
        assert isinstance(module, nn.Linear)
        setattr(model.get_submodule(parent), own, LowRankLinear(module))


def tabbed(text: str) -> str:
    """Return source with a tab for every four spaces at the beginning of a line."""
    return _INDENT.sub(lambda found: "\t" * (len(found[0]) // 4), text)


def tabbed_documents(documents: Sequence[Document]) -> tuple[Document, ...]:
    """Return the documents, indented by tabs."""
    return tuple(replace(document, text=tabbed(document.text)) for document in documents)


def tabbed_corpus(corpus: Corpus) -> Corpus:
    """Return the corpus, indented by tabs."""
    return Corpus(*map(tabbed_documents, (corpus.library, corpus.tests, corpus.held_out)))


def train_adapter(model: Llama, batches: Batches, plan: TrainingPlan, checkpoint: Path) -> dict:
    """Adapt a model to the text of `batches` by low-rank parts, which it keeps; return the figures."""
    torch.manual_seed(0)
    adapt(model.train())
    parts = LowRankParts(model)
    return Trainer(parts, next_token_loss(model), batches, plan, checkpoint).run("adapter")


def export_adapter(model: Llama, folder: Path, base: str) -> None:
    """Write the low-rank parts of an adapted model in PEFT's format, in bf16; the weights come last."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(_TARGETS),
        "bias": "none",
        "inference_mode": True,
    }
    save_text(folder / "adapter_config.json", json.dumps(config, indent=2) + "\n")
    weights = {
        f"base_model.model.{name}.{part}.weight": getattr(module, part).detach().bfloat16().contiguous()
        for name, module in LowRankParts(model).modules_by_name.items()
        for part in ("lora_A", "lora_B")
    }
    save_atomically(folder / "adapter_model.safetensors", lambda path: save_file(weights, str(path)))
