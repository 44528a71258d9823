"""C++ kernels of attention over paged KV."""
