"""Linear kernels in vectors of 64 bytes, with the products of VNNI and BF16, and with the tiles of AMX."""
