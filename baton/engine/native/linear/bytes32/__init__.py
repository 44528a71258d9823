"""Linear kernels in vectors of 32 bytes: AVX2, AVX-512 without BF16, NEON."""
