"""Small models in the formats that people publish, packed as their publishers' own code packs, one value at a time.

Every writer takes a dense folder, rewrites it in place and returns what its modules mean: {module: fp32 [out, in]}.
"""

import json
import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.model_folders.families import make_folder

SIZES = dict(hidden_size=64, intermediate_size=128, vocab_size=256)
LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj")


def dense_folder(folder: Path, family: str = "llama3", dtype: torch.dtype = torch.float32, **changes):
    """Write the model that the writers below quantize; sizes that groups of 32 divide."""
    return make_folder(folder, family, dtype, **(SIZES | changes))


def modules(tensors: dict[str, Tensor]) -> list[str]:
    return sorted(name.removesuffix(".weight") for name in tensors if LINEAR.fullmatch(name.removesuffix(".weight")))


def rewrite(folder: Path, config: dict, write, skip: tuple[str, ...] = (), head: bool = False) -> dict[str, Tensor]:
    """Replace every linear but those in `skip` by what write(weight) -> (tensors by suffix, meaning) gives."""
    path = folder / "model.safetensors"
    tensors, meanings = load_file(path), {}
    for module in modules(tensors) + (["lm_head"] if head else []):
        if module not in skip:
            parts, meanings[module] = write(tensors.pop(f"{module}.weight").float())
            tensors.update({f"{module}.{suffix}": value.contiguous() for suffix, value in parts.items()})
    save_file(tensors, path)
    change_config(folder, quantization_config=config)
    return meanings


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change) -> None:
    """Rewrite the tensors: change(tensors) edits the dict in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def with_meanings(model, meanings: dict[str, Tensor]):
    """Return the dense transformers model with the weights that a quantized folder means."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if name in meanings:
                module.weight.copy_(meanings[name])
    return model


def rounded(weight: Tensor, bits: int, group_of: np.ndarray, sym: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return u [out, in] in 0 .. 2 ** bits - 1, zeros [out, groups], fp16 scales [out, groups], groups by input."""
    w, top = weight.numpy(), 2**bits - 1
    num_groups = int(group_of.max()) + 1
    zeros = np.full((w.shape[0], num_groups), 2 ** (bits - 1))
    scales = np.zeros((w.shape[0], num_groups), np.float16)
    u = np.zeros(w.shape, np.int64)
    for group in range(num_groups):
        part = w[:, group_of == group]
        if sym:
            scales[:, group] = np.abs(part).max(axis=1) / (2 ** (bits - 1) - 1)
        else:
            scales[:, group] = (part.max(axis=1) - part.min(axis=1)) / top
            zeros[:, group] = np.clip(np.round(-part.min(axis=1) / scales[:, group].astype(np.float32)), 1, top)
        u[:, group_of == group] = np.clip(
            np.round(part / scales[:, group, None].astype(np.float32)) + zeros[:, group, None], 0, top
        )
    return u, zeros, scales


def meaning(u: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: np.ndarray) -> Tensor:
    return torch.from_numpy(((u - zeros[:, group_of]) * scales.astype(np.float32)[:, group_of]).astype(np.float32))


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Return unsigned values [n, m] packed along the first axis into int32 [n * bits / 32, m], low bits first."""
    per_word = 32 // bits
    packed = np.zeros((values.shape[0] // per_word, values.shape[1]), np.uint32)
    for row in range(values.shape[0]):
        packed[row // per_word] |= values[row].astype(np.uint32) << np.uint32(bits * (row % per_word))
    return packed.view(np.int32)


def write_gptq(
    folder: Path, bits=4, group=32, sym=True, act_order=False, version="gptq", skip=(), head=False, **config
) -> dict[str, Tensor]:
    """Write as AutoGPTQ's qlinear pack: version 1 subtracts one from the zero points before it packs them."""

    def write(weight: Tensor):
        in_features = weight.shape[1]
        size = in_features if group == -1 else group
        group_of = np.arange(in_features) // size
        if act_order:
            group_of = group_of[np.random.default_rng(in_features).permutation(in_features)]
        u, zeros, scales = rounded(weight, bits, group_of, sym)
        stored = (zeros - 1) % 2**bits if version == "gptq" else zeros
        return {
            "qweight": torch.from_numpy(words(u.T, bits)),
            "qzeros": torch.from_numpy(words(stored, bits).T.copy()),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }, meaning(u, zeros, scales, group_of)

    config |= dict(quant_method="gptq", bits=bits, group_size=group, sym=sym, desc_act=act_order)
    return rewrite(folder, config | dict(checkpoint_format=version), write, skip, head)


def write_awq(folder: Path, group=32, sym=False, skip=(), **config) -> dict[str, Tensor]:
    """Write as AutoAWQ's WQLinear_GEMM.from_linear: eight outputs a word in the order 0 2 4 6 1 3 5 7."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(values: np.ndarray) -> Tensor:
        packed = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
        for column in range(packed.shape[1]):
            for place in range(8):
                packed[:, column] |= values[:, column * 8 + order[place]].astype(np.uint32) << np.uint32(place * 4)
        return torch.from_numpy(packed.view(np.int32))

    def write(weight: Tensor):
        group_of = np.arange(weight.shape[1]) // group
        u, zeros, scales = rounded(weight, 4, group_of, sym)
        parts = {"qweight": pack(u.T), "qzeros": pack(zeros.T), "scales": torch.from_numpy(scales.T.copy())}
        return parts, meaning(u, zeros, scales, group_of)

    config |= dict(quant_method="awq", bits=4, group_size=group, version="gemm", zero_point=True)
    return rewrite(folder, config, write, skip)


def write_fp8(folder: Path, spread="block", block=(128, 128), static=False, skip=(), **config) -> dict[str, Tensor]:
    """Write fp8. spread: tensor, row or block; DeepSeek's name of the scale for blocks, AutoFP8's for the others."""

    def write(weight: Tensor):
        rows, columns = weight.shape
        size = {"tensor": (rows, columns), "row": (1, columns), "block": block}[spread]
        values, spread_out = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), torch.zeros(rows, columns)
        scales = torch.zeros(-(-rows // size[0]), -(-columns // size[1]))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = np.s_[i * size[0] : (i + 1) * size[0], j * size[1] : (j + 1) * size[1]]
                scales[i, j] = weight[part].abs().max() / 448
                values[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
                spread_out[part] = scales[i, j]
        parts = {"weight": values}
        parts["weight_scale_inv" if spread == "block" else "weight_scale"] = (
            scales[0, 0] if spread == "tensor" else scales
        )
        if static:
            parts["input_scale"] = torch.tensor(0.02)
        return parts, values.float() * spread_out

    config |= dict(quant_method="fp8", activation_scheme="static" if static else "dynamic")
    config |= dict(weight_block_size=list(block)) if spread == "block" else {}
    return rewrite(folder, config, write, skip)
