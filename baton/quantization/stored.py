"""Write quantized weights in compressed-tensors' layout with its quantization_config, which transformers and vLLM read
too. int8 with bf16 columns, which no other project stores, has a layout of our own."""

import torch
from torch import Tensor

from baton.engine.weights.forms import Fp8Weight, IntWeight

OWN_METHOD = "baton"  # quant_method of forms for which compressed-tensors has no layout


def tensors_of(module: str, form: IntWeight | Fp8Weight, dtype: torch.dtype, packed: bool) -> dict[str, Tensor]:
    """Return names and tensors of one linear [out, in]. `dtype` is that of scales; `packed`: weight-only integers are
    stored in int32 words."""
    scales = {f"{module}.weight_scale": form.scales.to(dtype)}
    if isinstance(form, Fp8Weight):
        if form.input_scale is not None:
            scales[f"{module}.input_scale"] = torch.tensor([form.input_scale], dtype=dtype)
        return {f"{module}.weight": form.values} | scales
    if packed:
        return {f"{module}.weight_packed": _words(form)} | scales | {f"{module}.weight_shape": torch.tensor(form.shape)}
    return {f"{module}.weight": form.values} | scales | _outliers(module, form)


def config_of(scheme: str, form: IntWeight | Fp8Weight, packed: bool, group: int | None) -> dict:
    """Return the quantization_config of a model whose linears, except the output head, all have forms like this one,
    with a scale for each `group` inputs, or one per row."""
    if scheme == "int8-outlier":
        return {"quant_method": OWN_METHOD, "scheme": scheme, "ignore": ["lm_head"]}
    number = "float" if isinstance(form, Fp8Weight) else "int"
    bits = form.bits if isinstance(form, IntWeight) else 8
    weights = {"num_bits": bits, "type": number, "symmetric": True, "strategy": "channel", "dynamic": False}
    if group is not None:
        weights |= {"strategy": "group", "group_size": group}
    layout = "pack-quantized" if packed else f"{number}-quantized"
    linears = {"targets": ["Linear"], "weights": weights, "input_activations": _activations(form, number)}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": linears | {"format": layout}},
        "ignore": ["lm_head"],
    }


def _activations(form: IntWeight | Fp8Weight, number: str) -> dict | None:
    if form.activations == "none":
        return None
    dynamic = form.activations == "dynamic"
    strategy = "token" if dynamic else "tensor"
    return {"num_bits": 8, "type": number, "symmetric": True, "strategy": strategy, "dynamic": dynamic}


def _words(form: IntWeight) -> Tensor:
    """Return int32 [out, ceil(in * bits / 32)], low bits first and biased by half the range; 4-bit values keep the
    form's order."""
    octets = form.values if form.bits == 4 else form.values.view(torch.uint8) ^ 128
    return torch.nn.functional.pad(octets, (0, -octets.shape[1] % 4)).view(torch.int32)


def _outliers(module: str, form: IntWeight) -> dict[str, Tensor]:
    if form.outliers is None:
        return {}
    columns, values = form.outliers.columns, form.outliers.values
    # Cloned, since the linears of a stage share their columns, and safetensors refuses shared memory.
    return {f"{module}.outlier_columns": columns.clone(), f"{module}.outlier_weight": values}
