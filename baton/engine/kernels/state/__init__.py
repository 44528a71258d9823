"""Triton kernels of layers with a state: the short convolution, the recurrences token by token, gates and norms behind
them."""
