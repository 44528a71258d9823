"""GGUF: rows of blocks, each with its scales. Q8_0, Q4_0, Q4_K and Q6_K stay quantized, other types are expanded.

Layouts are those of ggml-common.h; `gguf.quants` is the reference. Q4_0 and Q4_K store unsigned values of half a block
in the low nibbles and of the next half in the high ones; Q6_K stores 4 low and 2 high bits separately.
"""

from collections.abc import Callable, Hashable

import torch
from gguf import GGMLQuantizationType as GGMLType
from torch import Tensor

from baton.engine.core.gguf_file import EMBEDDING, OUTPUT, GGUFFile
from baton.engine.core.model_errors import ModelError
from baton.engine.weights.formats.base import EMBED, HEAD, WeightSource
from baton.engine.weights.forms import DenseWeight, IntWeight, Weight, pack_int4
from baton.engine.weights.tensors import check_finite
from baton.gguf import TEXT

LAYER, BLOCK = "model.layers.", "blk."
PLAIN = {GGMLType.F32, GGMLType.F16, GGMLType.BF16}
MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {"model.norm.weight": "output_norm.weight", f"{HEAD}.weight": OUTPUT, f"{EMBED}.weight": EMBEDDING}


class GGUFFormat(WeightSource):
    """Read a .gguf file."""

    name = "gguf"

    def __init__(self, file: GGUFFile, dtype: torch.dtype, num_heads: int, num_kv_heads: int):
        super().__init__()
        self._file, self._dtype = file, dtype
        # llama.cpp rotates neighbours, and only its converter for llama permutes the rows of q and k accordingly.
        permuted = file.metadata("general.architecture", TEXT) == "llama"
        self._heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if permuted else {}
        self._read_bytes = 0
        self._unread = {name: None for name in file.tensors if name.startswith(BLOCK)}

    @property
    def file_bytes(self) -> int:
        return self._file.path.stat().st_size

    @property
    def read_bytes(self) -> int:
        return self._read_bytes

    def kind(self, module: str) -> Hashable:
        tensor = self._file.tensors.get(_stored_name(f"{module}.weight"))
        return tensor and (tensor.tensor_type, tensor.shape)

    def linear(self, module: str, out_features: int, in_features: int) -> Weight:
        """Return the weight [out_features, in_features]. Raises ModelError if it is missing, has another shape, or has
        scales that are not finite."""
        name = self._name(f"{module}.weight", (out_features, in_features))
        tensor, rows = self._file.tensors[name], self._rows(name, out_features)
        if (read := READERS.get(tensor.tensor_type)) is None:
            if tensor.tensor_type not in PLAIN:
                self.note(f"{tensor.tensor_type.name} expanded to dense")
            return DenseWeight(self._expanded(name, rows).to(self._dtype))
        weight = read(torch.from_numpy(tensor.data if rows is None else tensor.data[rows.numpy()]))
        if not all(torch.isfinite(values).all() for values in (weight.scales, weight.offsets) if values is not None):
            raise ModelError(f"{self._file.path}: tensor {name} holds scales that are NaN or infinite")
        return weight

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor [*shape] in the compute dtype. Raises ModelError if it is missing or has another shape."""
        return self._stored(name, shape).to(self._dtype)

    def exact(self, name: str, *shape: int) -> Tensor:
        return self._stored(name, shape).float()

    def check_all_read(self, prefix: str, extra: tuple[str, ...] = ()) -> None:
        elsewhere = tuple(name.replace(LAYER, BLOCK) for name in extra)
        left = [name for name in self._unread if not name.startswith(elsewhere)]
        if left:
            raise ModelError(
                f"{self._file.path}: tensor {left[0]} has no place in the model that the metadata describe"
            )

    def release(self) -> None:
        self._file.release()

    def embedding(self, vocab_size: int, hidden_size: int) -> Callable[[Tensor], Tensor]:
        """Return the embedding: int64 [T] -> [T, hidden_size] in the compute dtype; a quantized table is expanded row
        by row."""
        if self._file.tensors[EMBEDDING].tensor_type in PLAIN:
            return super().embedding(vocab_size, hidden_size)
        self._name(f"{EMBED}.weight", (vocab_size, hidden_size))
        self.note(f"embedding {self._file.tensors[EMBEDDING].tensor_type.name}, rows expanded as they are looked up")
        return MappedEmbedding(self._file, self._dtype)

    def tied_head(self, embedding: Callable[[Tensor], Tensor], vocab_size: int, hidden_size: int) -> Weight:
        """Return the head [vocab_size, hidden_size]: the quantized table itself if the embedding expands it row
        by row."""
        if isinstance(embedding, MappedEmbedding):
            return self.linear(EMBED, vocab_size, hidden_size)
        return super().tied_head(embedding, vocab_size, hidden_size)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self._name(name, shape)
        return self._expanded(stored, self._rows(stored, shape[0]))

    def _expanded(self, name: str, rows: Tensor | None) -> Tensor:
        tensor = self._file.tensors[name]
        if tensor.tensor_type in (GGMLType.F32, GGMLType.F16):
            values = torch.from_numpy(tensor.data)
        elif tensor.tensor_type == GGMLType.BF16:
            values = torch.from_numpy(tensor.data).view(torch.bfloat16)
        else:
            values = torch.from_numpy(self._file.expanded(name))
        check_finite(values, self._file.path, name)
        return values if rows is None else values[rows]

    def _name(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the file's name of a tensor, after checking that it has this shape."""
        stored = _stored_name(name)
        if stored not in self._file.tensors:
            raise ModelError(f"{self._file.path}: tensor {stored} is missing")
        if (found := self._file.tensors[stored].shape) != shape:
            wanted = f"the metadata ask for {list(shape)}"
            raise ModelError(f"{self._file.path}: tensor {stored} has shape {list(found)}, {wanted}")
        self._unread.pop(stored, None)
        self._read_bytes += self._file.tensors[stored].data.nbytes
        return stored

    def _rows(self, name: str, num_rows: int) -> Tensor | None:
        """Return the stored row of each row of the model; None if they are the same."""
        num_heads = self._heads.get(name.split(".")[2]) if name.startswith(BLOCK) else None
        if num_heads is None:
            return None
        return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


class MappedEmbedding:
    """Look up rows of a quantized table, expanding them from the mapped file, so that no copy of the table is held."""

    def __init__(self, file: GGUFFile, dtype: torch.dtype):
        self._file, self._dtype = file, dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows of int64 [T] -> [T, hidden_size]."""
        return torch.from_numpy(self._file.expanded(EMBEDDING, token_ids.numpy())).to(self._dtype)


def _stored_name(name: str) -> str:
    """Return the name of a tensor in a file."""
    if (stored := WHOLE.get(name)) is not None:
        return stored
    layer, _, rest = name.removeprefix(LAYER).partition(".")
    module, _, last = rest.rpartition(".")
    return f"{BLOCK}{layer}.{MODULES[module]}.{last}"


def _half(blocks: Tensor, begin: int) -> Tensor:
    """Return the fp16 at a byte offset of every block, as fp32 [rows, blocks, 1]."""
    return blocks[:, :, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(octets: Tensor) -> Tensor:
    """Split uint8 [..., n] -> [..., 2, n]: low halves, then high ones."""
    return torch.stack((octets & 15, octets >> 4), dim=-2)


def _q8_0(data: Tensor) -> IntWeight:
    """Decode blocks of 34 bytes: d fp16, 32 int8."""
    blocks = data.unflatten(1, (-1, 34))
    return IntWeight(8, blocks[:, :, 2:].flatten(1).view(torch.int8), _half(blocks, 0).flatten(1), 32)


def _q4_0(data: Tensor) -> IntWeight:
    """Decode blocks of 18 bytes: d fp16, 16 bytes; w = d * (u - 8)."""
    blocks = data.unflatten(1, (-1, 18))
    q = _nibbles(blocks[:, :, 2:]).flatten(1).to(torch.int8) - 8
    return IntWeight(4, pack_int4(q), _half(blocks, 0).flatten(1), 32)


def _q4_k(data: Tensor) -> IntWeight:
    """Decode blocks of 144 bytes: d, dmin fp16, 8 scales and minima of 6 bits in 12 bytes, 128 bytes; w = d * sc * u -
    dmin * m."""
    blocks = data.unflatten(1, (-1, 144))
    low, mid, high = blocks[:, :, 4:16].unflatten(2, (3, 4)).unbind(2)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=2).float() * _half(blocks, 0)
    minima = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), dim=2).float() * _half(blocks, 2)
    q = _nibbles(blocks[:, :, 16:].unflatten(2, (4, 32))).flatten(1).to(torch.int8) - 8
    return IntWeight(4, pack_int4(q), scales.flatten(1), 32, (8 * scales - minima).flatten(1))


def _q6_k(data: Tensor) -> IntWeight:
    """Decode blocks of 210 bytes: 128 of low halves, 64 of high quarters, 16 int8 scales, d fp16; w = d * sc * (u -
    32)."""
    blocks = data.unflatten(1, (-1, 210))
    low = _nibbles(blocks[:, :, :128].unflatten(2, (2, 64))).flatten(3)  # [rows, blocks, 2, 128]
    quarters = blocks[:, :, 128:192].unflatten(2, (2, 32))
    high = torch.stack([(quarters >> shift) & 3 for shift in (0, 2, 4, 6)], dim=3).flatten(3)
    q = (low | (high << 4)).flatten(1).to(torch.int8) - 32
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return IntWeight(8, q, scales.flatten(1), 16)


READERS: dict[GGMLType, Callable[[Tensor], IntWeight]] = {
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q6_K: _q6_k,
}
