"""Linears as compressed-tensors writes them, in each of its layouts."""

import torch
from compressed_tensors.compressors import IntQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor, NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from tests.support.model_folders import quantized_folders

COMPRESSORS = {
    "pack-quantized": PackedQuantizationCompressor,
    "int-quantized": IntQuantizationCompressor,
    "float-quantized": FloatQuantizationCompressor,
    "naive-quantized": NaiveQuantizationCompressor,
}


def write_compressed(folder, layout: str, weights: dict, activations: dict | None = None, skip=(), **config):
    """Write every linear but those in `skip`; returns what they mean."""
    args = QuantizationArgs(**weights)
    inputs = QuantizationArgs(**activations) if activations else None
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    compressor = COMPRESSORS[layout]

    def write(weight):
        state = {"weight": weight} | scales_of(weight, args)
        stored = compressor.compress(state, scheme)
        if activations and not activations.get("dynamic"):
            stored["input_scale"] = torch.tensor([0.02])
        meaning = compressor.decompress(dict(stored), scheme)["weight"]
        return stored, meaning

    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": layout}
    config = dict(quant_method="compressed-tensors", format=layout, config_groups={"group_0": group}) | config
    return quantized_folders.rewrite(folder, config | dict(ignore=["lm_head", *config.get("ignore", ())]), write, skip)


def scales_of(weight, args) -> dict:
    """Return scale and zero point over the smallest and largest value of each group, row, block or all."""
    rows, columns = weight.shape
    if args.strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        parts = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width)).permute(0, 2, 1, 3).flatten(2)
    elif args.strategy == "tensor":
        parts = weight.reshape(1, -1)
    else:
        parts = weight.unflatten(1, (-1, args.group_size or columns))
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    scale = scale.reshape(-1) if args.strategy == "tensor" else scale
    return {"weight_scale": scale, "weight_zero_point": zero.reshape(scale.shape)}


INT4 = dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
