"""C++ kernels that draw tokens from logits."""
