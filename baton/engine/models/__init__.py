"""Decoder models: the Llama family, its layers fused for CPU and GPU, and loading them."""
