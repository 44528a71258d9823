"""Triton kernels of layers with a state: the short convolution, the recurrences token by token, and the gates and norms
after them."""
