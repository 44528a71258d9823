"""Linear kernels in vectors of 64 bytes, with the products of VNNI and BF16."""
