"""One step of attention, and what stands in for the kernels of GPUs."""
