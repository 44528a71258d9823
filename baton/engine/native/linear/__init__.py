"""C++ kernels of linear layers."""
