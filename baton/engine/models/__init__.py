"""A decoder of any family: from a folder to layers, run by torch, or fused for CPU and GPU."""
