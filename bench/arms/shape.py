"""The models of bench/cpu.py, with a vocabulary of 32k and a separate output head. Only numbers: peers read them where
torch is not installed."""

from dataclasses import dataclass

VOCAB_SIZE = 32768
ROPE_THETA = 500000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `ffn_size` is that of one expert if there are experts."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0
    num_chosen: int = 0


LLAMA = Shape(16, 2048, 8192, num_heads=32, num_kv_heads=8, head_dim=64)  # Llama-3.2-1B's
# Like Qwen3-MoE: 1.9 B parameters, of which a token uses 0.4 B.
MIXTURE = Shape(16, 2048, 256, num_heads=16, num_kv_heads=4, head_dim=128, num_experts=64, num_chosen=8)
