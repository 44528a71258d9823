"""A model of random weights with layers ten times as large as the shipped model's, and its tokenizer."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

TOKENIZER = Path(__file__).resolve().parents[2] / "demo" / "target"
LARGE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16384, "tie_word_embeddings": True,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


def write_large(folder: Path) -> Path:
    """Write a model folder of random weights in the shape of LARGE."""
    sizes = {key: LARGE[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")}
    hidden, inner, vocab, layers = sizes.values()
    heads, kv = 1024, 256
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.empty(size).normal_(0, 0.02, generator=generator).bfloat16()

    tensors = {"model.embed_tokens.weight": drawn(vocab, hidden), "model.norm.weight": torch.ones(hidden).bfloat16()}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = torch.ones(hidden).bfloat16()
        for module, size in {
            "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():  # fmt: skip
            tensors[f"{name}{module}.weight"] = drawn(*size)
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    (folder / "config.json").write_text(json.dumps(LARGE))
    save_file(tensors, folder / "model.safetensors")
    return folder
