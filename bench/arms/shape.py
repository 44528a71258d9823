"""The model of bench/cpu.py: Llama-3.2-1B with a vocabulary of 32k and an output head of its own. Nothing but numbers:
its peers read them where torch is not installed."""

NUM_LAYERS = 16
HIDDEN_SIZE = 2048
FFN_SIZE = 8192
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 64
VOCAB_SIZE = 32768
ROPE_THETA = 500000.0
