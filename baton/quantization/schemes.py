"""The schemes: what each does to a layer, in two passes over its stages. The first pass folds scales into float
weights. The second rounds every linear to its form, and calibrates later linears on the outputs of the rounded ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.weights.forms import Fp8Weight, IntWeight
from baton.engine.weights.round import FP8_MAX
from baton.quantization.core.block import Block, LayerWeights, Stage
from baton.quantization.core.grid import fit
from baton.quantization.methods import awq, gptq, outliers, smoothquant

Form = IntWeight | Fp8Weight


@dataclass(frozen=True)
class Settings:
    """Settings of rounding other than the weights."""

    group: int | None  # inputs per scale; None: the scheme has one scale per row
    dtype: torch.dtype  # of the folder's own tensors, in which scales and norms are stored


@dataclass(frozen=True)
class Scheme:
    """A scheme. `round` returns the forms of one stage; `stage.inputs` are empty lists unless `calibrated`."""

    name: str
    round: Callable[[LayerWeights, Stage, Settings], dict[str, Form]]
    fold: Callable[[Block, Stage, Settings], None] | None = None
    calibrated: bool = False
    grouped: bool = False


def _int8(block: LayerWeights, stage: Stage, settings: Settings) -> dict[str, Form]:
    rounded = {name: _rounded(block.weights[name], 8, None, settings) for name in stage.names}
    return {name: replace(form, activations="dynamic") for name, form in rounded.items()}


def _int8_weight_only(block: LayerWeights, stage: Stage, settings: Settings) -> dict[str, Form]:
    return {name: _rounded(block.weights[name], 8, settings.group, settings) for name in stage.names}


def _int4(block: LayerWeights, stage: Stage, settings: Settings) -> dict[str, Form]:
    return {name: _rounded(block.weights[name], 4, settings.group, settings) for name in stage.names}


def _int4_awq(block: LayerWeights, stage: Stage, settings: Settings) -> dict[str, Form]:
    importance = stage.second_moment().diagonal()
    return {name: _rounded(block.weights[name], 4, settings.group, settings, importance) for name in stage.names}


def _int4_gptq(block: LayerWeights, stage: Stage, settings: Settings) -> dict[str, Form]:
    moment = stage.second_moment()
    forms = {}
    for name in stage.names:
        weight = block.weights[name]
        grid = fit(weight, 4, settings.group or weight.shape[1], settings.dtype, moment.diagonal())
        forms[name] = grid.form(gptq.round_compensated(weight, moment, grid))
    return forms


def _int8_outlier(block: LayerWeights, stage: Stage, settings: Settings) -> dict[str, Form]:
    columns, forms = outliers.find(stage), {}
    for name in stage.names:
        rest, kept = outliers.split(block.weights[name], columns)
        forms[name] = replace(_rounded(rest, 8, None, settings), activations="dynamic", outliers=kept)
    return forms


def _fp8(block: LayerWeights, stage: Stage, settings: Settings) -> dict[str, Form]:
    return {name: _float8(block.weights[name], settings.dtype, "dynamic") for name in stage.names}


def _fp8_static(block: LayerWeights, stage: Stage, settings: Settings) -> dict[str, Form]:
    largest = (stage.largest().max() / FP8_MAX).to(settings.dtype).item() or 1.0
    return {name: _float8(block.weights[name], settings.dtype, "static", largest) for name in stage.names}


def _rounded(
    weight: Tensor, bits: int, group: int | None, settings: Settings, importance: Tensor | None = None
) -> IntWeight:
    grid = fit(weight, bits, group or weight.shape[1], settings.dtype, importance)
    return grid.form(grid.round(weight))


def _float8(weight: Tensor, dtype: torch.dtype, activations: str, input_scale: float | None = None) -> Fp8Weight:
    scales = (weight.abs().amax(dim=1, keepdim=True) / FP8_MAX).to(dtype).float()
    scales = torch.where(scales == 0, 1.0, scales)
    values = (weight / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Fp8Weight(values, scales, (1, weight.shape[1]), activations, input_scale)


def _fold_awq(block: Block, stage: Stage, settings: Settings) -> None:
    assert settings.group is not None, "AWQ is grouped"
    awq.scale_inputs(block, stage, 4, settings.group, settings.dtype)


def _fold_smooth(block: Block, stage: Stage, settings: Settings) -> None:
    smoothquant.smooth_inputs(block, stage, settings.dtype)


_ALL = (
    Scheme("int8", _int8),
    Scheme("int8-weight-only", _int8_weight_only),
    Scheme("int8-outlier", _int8_outlier, calibrated=True),
    Scheme("smoothquant-w8a8", _int8, fold=_fold_smooth, calibrated=True),
    Scheme("int4-rtn", _int4, grouped=True),
    Scheme("int4-awq", _int4_awq, fold=_fold_awq, calibrated=True, grouped=True),
    Scheme("int4-gptq", _int4_gptq, calibrated=True, grouped=True),
    Scheme("fp8", _fp8),
    Scheme("fp8-static", _fp8_static, calibrated=True),
)
SCHEMES = {scheme.name: scheme for scheme in _ALL}
