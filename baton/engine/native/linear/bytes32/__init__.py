"""Linear kernels in vectors of 32 bytes: AVX2, AVX-512 without VNNI and BF16, NEON."""
