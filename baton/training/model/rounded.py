"""Train a model for the int4 weights that it will be served with: every product of its layers is by rounded weights, and
the float weights behind them learn from the error (a straight-through estimator, arXiv 1308.3432).

The integers are those of `baton quantize --scheme int4-rtn --group 32`, scales as stored, so that the folder it writes
holds the values that were trained. Embedding, head and norms are not rounded, and learn too. Training begins with the
integers of GPTQ: after 130,000 tokens it had lost 0.34 % of bits per byte, from plain rounding on 0.46 %.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils import parametrize

from baton.engine.weights.formats.registry import open_source
from baton.engine.weights.forms import IntWeight
from baton.quantization.core.grid import dequantize, fit
from baton.quantization.quantize import plan, quantize
from baton.training.data.batches import Batches
from baton.training.data.files import save_text
from baton.training.model.export import export, load
from baton.training.model.llama import Llama
from baton.training.model.trainer import Trainer, TrainingPlan, distillation_loss

SCHEME, BITS, GROUP = "int4-rtn", 4, 32
NUM_SAMPLES, SAMPLE_TOKENS = 64, 256  # that GPTQ is calibrated on
FIGURES = "training.json"  # beside the weights: what train_rounded returned


class Rounded(nn.Module):
    """A weight [out, in] as it is served, with the gradient of one that is not rounded."""

    def forward(self, weight: Tensor) -> Tensor:
        """Return the rounded weight, in its dtype."""
        with torch.no_grad():
            stored = weight.bfloat16().float()  # which is what `export` writes and `quantize` reads
            rounded = dequantize(fit(stored, BITS, GROUP, torch.bfloat16), stored)
        return weight + (rounded - weight).detach()


def train_rounded(
    target: Path, tokenizer: Tokenizer, batches: Batches, training: TrainingPlan, work: Path, out: Path
) -> dict:
    """Train the model in `target` to do with rounded weights what it does, and write it to `out`, int4; returns its
    figures. A run that was interrupted goes on from what is in `work`. `out` does not exist."""
    model, teacher = load(target).train(), load(target).bfloat16()
    windows, _ = batches.draw(0, NUM_SAMPLES * SAMPLE_TOKENS, SAMPLE_TOKENS)
    begin_with_gptq(model, target, list(windows), work / "gptq")
    round_weights(model)
    figures = Trainer(model, distillation_loss(model, teacher), batches, training, work / "qat.safetensors").run("qat")
    made = work / "made"
    shutil.rmtree(made, ignore_errors=True)
    export_rounded(model, tokenizer, work / "float", made)
    save_text(made / FIGURES, json.dumps(figures, indent=2) + "\n")
    made.replace(out)
    return figures


def begin_with_gptq(model: Llama, target: Path, samples: list[Tensor], folder: Path) -> None:
    """Give the model the weights of GPTQ's integers for `target`, which `folder` keeps. `samples`: token ids [tokens]."""
    if not folder.exists():
        quantize(plan(target, "int4-gptq", GROUP), folder, samples)
    config = model.config
    source = open_source(folder, "auto", torch.bfloat16, config.num_heads, config.num_kv_heads)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            form = source.linear(name, *module.weight.shape)
            assert isinstance(form, IntWeight)
            q = form.integers().float().clamp(-7, 7)  # -8 would stretch the span that plain rounding finds
            module.weight.data = (q.unflatten(1, (-1, GROUP)) * form.scales.unsqueeze(2)).flatten(1)


def round_weights(model: Llama) -> None:
    """Have the model multiply by rounded weights from now on."""
    for module in _linears(model):
        parametrize.register_parametrization(module, "weight", Rounded())


def export_rounded(model: Llama, tokenizer: Tokenizer, work: Path, folder: Path) -> None:
    """Write a model that `round_weights` was called on as an int4 folder, which does not exist; the model is left with
    its float weights. `work`: for the float folder in between."""
    for module in _linears(model):
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
    export(model, tokenizer, work)
    quantize(plan(work, SCHEME, GROUP), folder)


def _linears(model: Llama) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]
