"""Train a model for the int4 weights with which it will be served (quantization-aware training): every product of its
layers uses rounded weights. The float weights behind them learn from the error (a straight-through estimator, arXiv
1308.3432), and so do the scales (LSQ, arXiv 1902.08153).

Training begins with the integers and scales of `baton quantize --scheme int4-gptq --group 32`; the folder holds the
trained ones. Embedding, head and norms are not rounded, and learn too."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils import parametrize

from baton.engine.core.device import product_dtype
from baton.engine.weights.formats.registry import open_source
from baton.engine.weights.forms import IntWeight
from baton.quantization.core.block import Block, LayerWeights, Stage
from baton.quantization.core.grid import Grid
from baton.quantization.quantize import plan, quantize
from baton.quantization.schemes import Form, Scheme, Settings
from baton.training.data.batches import Batches
from baton.training.data.files import save_text
from baton.training.model.export import export, load
from baton.training.model.llama import Llama
from baton.training.model.trainer import Trainer, TrainingPlan, distillation_loss

BITS, GROUP = 4, 32
NUM_SAMPLES, SAMPLE_TOKENS = 64, 256  # for the calibration of GPTQ
NEAR = 0.49  # of a step: the largest initial distance of a weight from its integer, so that it rounds to it
FIGURES = "training.json"  # beside the weights: the result of train_rounded


class Rounded(nn.Module):
    """A weight [out, in] as it is served, with the gradient of an unrounded weight, and trainable scales."""

    first: Tensor  # scales [out, in // GROUP]

    def __init__(self, scales: Tensor):
        super().__init__()
        self.register_buffer("first", scales)
        # flat, since vectors and matrices have different optimizers
        self.gain = nn.Parameter(torch.ones(scales.numel()))

    def grid(self) -> Grid:
        """Return the grid whose scales are rounded as the folder will hold them."""
        scales = self.first * self.gain.view_as(self.first)
        return Grid(BITS, GROUP, scales + (scales.bfloat16().float() - scales).detach())

    def forward(self, weight: Tensor) -> Tensor:
        """Return the rounded weight, in its dtype."""
        scales, half = self.grid().scales.unsqueeze(2), 2 ** (BITS - 1)
        clipped = (weight.unflatten(1, (-1, GROUP)) / scales).clamp(-half, half - 1)
        return ((clipped + (clipped.round() - clipped).detach()) * scales).flatten(1)


def train_rounded(
    target: Path, tokenizer: Tokenizer, batches: Batches, training: TrainingPlan, work: Path, out: Path
) -> dict:
    """Train the model in `target` to imitate itself with rounded weights, and write it to `out` as int4; return its
    figures. An interrupted run continues from what is in `work`. `out` must not exist."""
    model, teacher = load(target).train(), load(target).to(product_dtype())
    windows, _ = batches.draw(0, NUM_SAMPLES * SAMPLE_TOKENS, SAMPLE_TOKENS)
    round_weights(model, target, list(windows), work / "gptq")
    figures = Trainer(model, distillation_loss(model, teacher), batches, training, work / "qat.safetensors").run("qat")
    made = work / "made"
    shutil.rmtree(made, ignore_errors=True)
    export_rounded(model, tokenizer, work / "float", made)
    save_text(made / FIGURES, json.dumps(figures, indent=2) + "\n")
    made.replace(out)
    return figures


def round_weights(model: Llama, target: Path, samples: list[Tensor], folder: Path) -> None:
    """Let the model of `target` multiply by rounded weights from now on, initially those of GPTQ, which `folder` keeps.
    `samples`: token ids [tokens]."""
    if not folder.exists():
        quantize(plan(target, "int4-gptq", GROUP), folder, samples)
    config = model.config
    source = open_source(folder, "auto", torch.bfloat16, config.num_heads, config.num_kv_heads)
    for name, module in _linears(model).items():
        form = source.linear(name, *module.weight.shape)
        assert isinstance(form, IntWeight)
        q, scales = form.integers().float().unflatten(1, (-1, GROUP)), form.scales.unsqueeze(2)
        weight = module.weight.data.unflatten(1, (-1, GROUP))
        module.weight.data = weight.clamp((q - NEAR) * scales, (q + NEAR) * scales).flatten(1)
        parametrize.register_parametrization(module, "weight", Rounded(form.scales))


def export_rounded(model: Llama, tokenizer: Tokenizer, work: Path, folder: Path) -> None:
    """Write a model on which `round_weights` was called as an int4 folder, which must not exist. The model keeps only
    its rounded weights. `work` is for the float folder in between."""
    forms: dict[str, Form] = {}
    for name, module in _linears(model).items():
        learned = module.get_submodule("parametrizations.weight")
        rounded, weight = learned.get_submodule("0"), learned.get_parameter("original")
        assert isinstance(rounded, Rounded)
        with torch.no_grad():
            grid = rounded.grid()
            forms[name] = grid.form(grid.round(weight))
        parametrize.remove_parametrizations(module, "weight")
    export(model, tokenizer, work)

    def trained(block: LayerWeights, stage: Stage, settings: Settings) -> dict[str, Form]:
        assert isinstance(block, Block)
        return {name: forms[f"model.layers.{block.index}.{name}"] for name in stage.names}

    scheme = Scheme("int4-qat", trained, grouped=True)
    quantize(replace(plan(work, "int4-rtn", GROUP), scheme=scheme), folder)


def _linears(model: Llama) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
