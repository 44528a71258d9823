// What all native code shares: instruction sets, bf16, and memory that a thread keeps.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <omp.h>

#ifdef __aarch64__
#include "avx2_on_neon.h"
#define BATON_DOT         // products of four int8 in one instruction, in vectors of 32 bytes
#define BATON_SIGNED_DOT  // whose weights are signed
#ifdef __ARM_FEATURE_MATMUL_INT8
#define BATON_MATMUL  // and of two rows of eight by two
#endif
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define BATON_BF16_FMA  // fma of bf16 that is widened on the way
#endif
#else
#include <immintrin.h>
#if defined(__AVX512VNNI__) && !defined(__AVX512BF16__)
#define BATON_DOT
#endif
#endif

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define BATON_AVX512  // vectors of 64 bytes; otherwise of 32 (AVX2, FMA and F16C, or NEON: tier.py knows no less)
#endif
#if defined(BATON_AVX512) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define BATON_VNNI_BF16  // products of four int8 and of bf16 pairs
#endif
#if defined(BATON_VNNI_BF16) && (defined(__AMX_INT8__) && defined(__AMX_BF16__) || defined(BATON_EMULATED_TILES))
#define BATON_AMX  // products of tiles of int8 and of bf16
#endif

namespace baton {

constexpr int64_t LINE = 64;  // bytes of a cache line

// x, or the next multiple of `unit`.
inline int64_t rounded_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Four bytes as they lie in memory, wherever they begin.
inline int32_t word_at(const void* from) {
  int32_t word;
  std::memcpy(&word, from, 4);
  return word;
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float from_bf16(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }

// Round to nearest even; a NaN stays one.
inline uint16_t to_bf16(float value) {
  const uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline std::atomic<int64_t> scratch_bytes{0};  // of all threads

// A kernel's memory, which its thread keeps as long as it lives: OpenMP ends those that a smaller team leaves over.
struct Scratch {
  std::unique_ptr<char[]> bytes;
  int64_t size = 0;

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { free(); }

  void free() {
    bytes.reset();
    scratch_bytes -= size, size = 0;
  }
};

// Memory of the calling thread that only grows, aligned to a cache line. What was there is lost where it does.
inline char* scratch(Scratch& memory, int64_t num_bytes) {
  if (memory.size < num_bytes + LINE) {
    memory.free();
    const int64_t size = rounded_up(num_bytes + LINE, 4096);
    memory.bytes.reset(new char[size]);
    scratch_bytes += memory.size = size;
  }
  return reinterpret_cast<char*>(rounded_up(reinterpret_cast<intptr_t>(memory.bytes.get()), LINE));
}

#ifdef BATON_AVX512
inline __m512 load16_bf16(const uint16_t* from, __mmask16 mask = 0xffff) {
  __m256i bits = _mm256_maskz_loadu_epi16(mask, from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// As to_bf16, in integers: vcvtneps2bf16 would turn subnormals to zero.
inline void store16_bf16(uint16_t* to, __m512 values, __mmask16 mask = 0xffff) {
  __m512i bits = _mm512_castps_si512(values);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif

// 8 at a time, on every tier.
inline __m256 load8_bf16(const uint16_t* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// Rounded as to_bf16 does, still in the upper halves of 32 bits.
inline __m256i round8_bf16(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values), nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
}

inline void store8_bf16(uint16_t* to, __m256 values) {
  const __m256i bits = _mm256_srli_epi32(round8_bf16(values), 16);
  const __m128i low = _mm256_castsi256_si128(bits), high = _mm256_extracti128_si256(bits, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low, high));
}

}  // namespace baton
