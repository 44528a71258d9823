"""Read a .gguf file: its tensors, mapped, and its metadata as a config.json would have them.

The `gguf` package expands quantized tensors. Names and conventions are those of llama.cpp's convert_hf_to_gguf.py.
"""

import math
import mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, dequantize
from gguf import GGMLQuantizationType as GGMLType

from baton.engine.core.model_errors import ModelError
from baton.gguf import FLAG, INTEGER, INTEGER_OR_EACH, NUMBER, TEXT, GGUFError, GGUFHeader, Kind, TensorInfo
from baton.model_files import why_not_itself

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
EMBEDDING, OUTPUT, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
# Keys of rope.scaling: yarn's, with their names in a config.json, and multipliers of llama.cpp.
OF_YARN = {
    "original_context_length": ("original_max_position_embeddings", INTEGER),
    "yarn_beta_fast": ("beta_fast", NUMBER),
    "yarn_beta_slow": ("beta_slow", NUMBER),
}
MULTIPLIERS = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")
# The dtype of a file is the type of its embedding, or bf16 if that is quantized.
FLOATS = {GGMLType.F32: np.float32, GGMLType.F16: np.float16}
DTYPES = {GGMLType.F32: "float32", GGMLType.F16: "float16"}


class GGUFTensor(NamedTuple):
    """A tensor of a .gguf file as it is stored."""

    shape: tuple[int, ...]  # rows first
    tensor_type: GGMLType
    data: np.ndarray  # [rows, bytes or floats], mapped


class GGUFFile:
    """An open file: `tensors` by name, `metadata(key, kind)` as Python values, and `end_ids(vocab_size)`."""

    def __init__(self, path: Path):
        """Map a file. Raises ModelError if it is not a whole GGUF file."""
        self.path = path
        if not path.is_file():
            raise ModelError(f"{path}: {why_not_itself(path) or 'no such file'}")
        try:
            header = GGUFHeader(path)
            self.metadata, self.end_ids = header.get, header.end_ids
            # Copy on write: torch makes tensors only of writable memory, and nothing is written.
            self._data = np.memmap(path, mode="c")
            self.tensors = {name: _mapped(self._data, name, info) for name, info in header.tensors.items()}
        except GGUFError as error:
            raise ModelError(str(error)) from None
        except (ValueError, KeyError) as error:
            raise ModelError(f"{path}: truncated or not a GGUF file ({error})") from None

    def release(self) -> None:
        """Give back the memory of pages that were read; a page is read again when it is used."""
        self._data._mmap.madvise(mmap.MADV_DONTNEED)  # pyright: ignore[reportAttributeAccessIssue]

    def expanded(self, name: str, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return rows of a tensor in fp32, [rows, ...]. Raises ModelError for a type that gguf cannot expand."""
        tensor = self.tensors[name]
        try:
            return dequantize(tensor.data[rows], tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ModelError(f"{self.path}: tensor {name} is {kind}, which gguf cannot expand") from None


def _mapped(data: np.memmap, name: str, info: TensorInfo) -> GGUFTensor:
    """Return a tensor as a view of the file's `data`. Raises ValueError if it ends beyond the file."""
    kind = GGMLType(info.type_id)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    columns = info.shape[-1] if info.shape else 1
    if columns % block:
        raise ValueError(f"tensor {name}: blocks of {block} do not divide {columns} columns")
    row_bytes = columns // block * block_bytes
    num_bytes = math.prod(info.shape[:-1]) * row_bytes
    if info.offset + num_bytes > data.size:
        raise ValueError(f"tensor {name} ends beyond the file")
    stored = data[info.offset : info.offset + num_bytes].view(FLOATS.get(kind, np.uint8))
    return GGUFTensor(info.shape, kind, stored.reshape(*info.shape[:-1], -1))


def config_of(file: GGUFFile) -> dict:
    """Return a config.json with what a GGUF file's metadata say.

    Raises ValueError or KeyError, as reading a config.json does, and GGUFError for a value of the wrong kind.
    """
    arch = file.metadata("general.architecture", TEXT)
    if arch not in ARCHITECTURES:
        raise ValueError(f"architecture {arch!r} is not supported, one of {', '.join(ARCHITECTURES)}")
    if (num_parts := file.metadata("split.count", INTEGER, 1)) > 1:
        raise ValueError(f"one of {num_parts} parts of a model; join them with llama-gguf-split --merge")
    for name in (EMBEDDING, "output_norm.weight"):
        if name not in file.tensors:
            raise ValueError(f"tensor {name} is missing")

    def of(key: str, kind: Kind = INTEGER, default=None):
        return file.metadata(f"{arch}.{key}", kind, default)

    if not of("attention.causal", FLAG, True):
        raise ValueError("attention.causal false is not supported")
    heads, length = _one(arch, "attention.head_count", of), of("attention.key_length")
    hidden_size = of("embedding_length")
    if not heads or hidden_size is None:
        raise ValueError(f"{arch}.attention.head_count or {arch}.embedding_length is missing or 0")
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _one(arch, "feed_forward_length", of),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _one(arch, "attention.head_count_kv", of, heads),
        "head_dim": length or hidden_size // heads,
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon", NUMBER, 1e-5),
        "max_position_embeddings": of("context_length"),
        "tie_word_embeddings": OUTPUT not in file.tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": arch == "llama" and "blk.0.ffn_gate.bias" in file.tensors,
        "dtype": DTYPES.get(file.tensors[EMBEDDING].tensor_type, "bfloat16"),
        "eos_token_id": sorted(file.end_ids(file.tensors[EMBEDDING].shape[0])),
        "rope_parameters": _rope(file, of),
    }
    if window := of("attention.sliding_window"):
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window} if arch == "llama" else {}
    if (rotary := of("rope.dimension_count", default=config["head_dim"])) != config["head_dim"]:
        raise ValueError(f"rope.dimension_count {rotary} other than head_dim {config['head_dim']} is not supported")
    return config


def _one(arch: str, key: str, of, default=None) -> int | None:
    """Return a count. The file may give it for each layer; raises ValueError if layers differ."""
    value = of(key, INTEGER_OR_EACH, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ValueError(f"{arch}.{key} differs between layers, which is not supported")
        value = value[0]
    return value


def _rope(file: GGUFFile, of) -> dict:
    """Return rope_parameters. Llama 3's scaling is a tensor of divisors of the frequencies: longrope with equal
    factors."""
    parameters = {"rope_theta": of("rope.freq_base", NUMBER, 10_000.0), "rope_type": "default"}
    scaling = _scaling(of)
    if ROPE_FACTORS in file.tensors:
        if scaling:
            raise ValueError(f"rope.scaling beside tensor {ROPE_FACTORS} is not supported")
        factors = file.expanded(ROPE_FACTORS).tolist()
        same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return parameters | {"rope_type": "longrope", **same}
    if LONG_FACTORS in file.tensors:
        raise ValueError(f"{LONG_FACTORS}, frequencies by length, is not supported")
    return parameters | scaling


def _scaling(of) -> dict:
    """Return the rope parameters that differ from plain rope.

    As in llama.cpp, a factor without a type is linear, and older files call it `scale_linear`.
    """
    for key in MULTIPLIERS:
        if (value := of(f"rope.scaling.{key}", NUMBER, 1.0)) != 1:
            raise ValueError(f"rope.scaling.{key} {value:g} is not supported, only 1")
    factor = of("rope.scaling.factor", NUMBER) or of("rope.scale_linear", NUMBER) or 1.0
    kind = of("rope.scaling.type", TEXT, "none" if factor == 1 else "linear")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type {kind!r} is not supported, one of none, linear, yarn")
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        given = {ours: of(f"rope.scaling.{key}", known) for key, (ours, known) in OF_YARN.items()}
        scaling |= {ours: value for ours, value in given.items() if value}
    return scaling
