"""Folders of models of any size that take no room: their safetensors files say what they hold, and hold holes."""

import json
import struct
from math import prod
from pathlib import Path

import torch

from baton.engine.weights.tensors import INDEX

GROUP = 128
LAYERS_PER_FILE = 8
_BYTES = {"BF16": 2, "F32": 4, "I32": 4, "I8": 1}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype as safetensors says it, shape


def write_int4_llama(config: dict, folder: Path) -> list[Path]:
    """Write a folder of a Llama of this config.json, its layers in int4 by groups of 128 with zero points, its head in
    int8 by rows, as compressed-tensors stores them. Return its safetensors files."""
    schemes = {"head": {"targets": ["lm_head"], "weights": _INT8}, "layers": {"targets": ["Linear"], "weights": _INT4}}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": schemes}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    vocab_size, hidden_size = config["vocab_size"], config["hidden_size"]
    ends: Tensors = {
        "model.embed_tokens.weight": ("BF16", (vocab_size, hidden_size)),
        "model.norm.weight": ("BF16", (hidden_size,)),
        "lm_head.weight": ("I8", (vocab_size, hidden_size)),
        "lm_head.weight_scale": ("F32", (vocab_size, 1)),
    }
    files = [ends]
    for first in range(0, config["num_hidden_layers"], LAYERS_PER_FILE):
        layers = range(first, min(first + LAYERS_PER_FILE, config["num_hidden_layers"]))
        files.append({name: value for layer in layers for name, value in _layer(config, layer).items()})
    written, weight_map = [], {}
    for number, tensors in enumerate(files):
        path = folder / f"model-{number:05}.safetensors"
        _write(path, tensors)
        written.append(path)
        weight_map |= dict.fromkeys(tensors, path.name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return written


def _layer(config: dict, index: int) -> Tensors:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    prefix, found = f"model.layers.{index}.", Tensors()
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found[f"{prefix}{norm}.weight"] = ("BF16", (hidden,))
    for module, (out, inputs) in {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }.items():  # fmt: skip
        found[f"{prefix}{module}.weight_packed"] = ("I32", (out, inputs // 8))
        found[f"{prefix}{module}.weight_scale"] = ("BF16", (out, inputs // GROUP))
        found[f"{prefix}{module}.weight_zero_point"] = ("I32", (out // 8, inputs // GROUP))
    return found


def _write(path: Path, tensors: Tensors) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def read_on_meta(monkeypatch) -> None:
    """Let a model be loaded without a value of its files: tensors are mapped as ever, and go on as meta tensors. Where
    values are looked at they are taken to be finite, and scales to need four bytes."""
    from baton.engine.layers.linear import panels
    from baton.engine.weights.formats.base import Format
    from baton.engine.weights.tensors import Weights

    read = Weights.read
    monkeypatch.setattr(Weights, "read", lambda *arguments: read(*arguments).to("meta"))
    floats = (torch.float32, torch.bfloat16)
    monkeypatch.setattr(Format, "scales", lambda self, name, shape: self.tensors.read(name, shape, floats).float())
    monkeypatch.setattr(panels, "_in_huge_pages", lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))
    monkeypatch.setattr(torch, "equal", lambda one, other: one.shape == other.shape and not one.is_meta)
