"""Small .gguf files by the `gguf` package's own writer, names and quantization, as convert_hf_to_gguf.py makes them."""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GGMLType
from gguf import quants

ARCHITECTURES = {
    "Llama": gguf.MODEL_ARCH.LLAMA,
    "Mistral": gguf.MODEL_ARCH.LLAMA,
    "Qwen2": gguf.MODEL_ARCH.QWEN2,
    "Qwen3": gguf.MODEL_ARCH.QWEN3,
}
# Offsets of the fp16 scales in a block, for types that the package cannot quantize to: other bytes are drawn.
SCALES = {GGMLType.Q4_K: ((0, 2), 144), GGMLType.Q6_K: ((208,), 210)}


def encode(values: np.ndarray, kind: GGMLType, seed: int = 0) -> np.ndarray:
    """Return stored rows of a float matrix; for types without an encoder, drawn bytes with small scales."""
    if kind not in SCALES:
        return quants.quantize(values, kind)
    offsets, size = SCALES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (values.shape[0], values.shape[1] // 256, size), dtype=np.uint8)
    for offset in offsets:
        scale = np.full(raw.shape[:2], 2e-4 if kind == GGMLType.Q6_K else 1e-3, np.float16)
        raw[:, :, offset : offset + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(values.shape[0], -1)


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """LlamaModel.permute of the converter: pairs that are rotated together become neighbours."""
    heads = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, model, kind_of=lambda name: GGMLType.Q8_0, describe=lambda writer: None):
    """Write a transformers model and give it the weights that the file then means. kind_of(GGUF name) -> type of a
    matrix; describe(writer) adds more metadata."""
    config = model.config
    arch = ARCHITECTURES[type(model).__name__.removesuffix("ForCausalLM")]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    write_metadata(writer, config, arch)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            values = parameter.float().numpy()
            if values.ndim == 1:
                stored, kind = values, GGMLType.F32
            else:
                kind = kind_of(name)
                stored = encode(values, kind, seed=len(name))
                parameter.copy_(torch.from_numpy(quants.dequantize(stored, kind)))
            if arch == gguf.MODEL_ARCH.LLAMA and ("attn_q." in name or "attn_k." in name):
                heads = config.num_attention_heads if "attn_q." in name else config.num_key_value_heads
                stored = permute(stored, heads)
            writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=kind)
        if config.rope_parameters["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    describe(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer, config, arch) -> None:
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_eos_token_id(config.eos_token_id)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            for name in ("beta_fast", "beta_slow"):
                if rope.get(name) is not None:
                    writer.add_float32(f"{gguf.MODEL_ARCH_NAMES[arch]}.rope.scaling.yarn_{name}", rope[name])
    if arch == gguf.MODEL_ARCH.LLAMA and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def llama3_divisors(config) -> np.ndarray:
    """generate_extra_tensors of the converter."""
    rope, dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    divisors = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)
