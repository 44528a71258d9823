"""C++ kernels of whole layers: all of a step or of a draft in one call, experts included."""
