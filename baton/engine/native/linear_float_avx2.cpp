// Floating-point weights without AVX-512: bf16 and e4m3 are widened to fp32 (exactly), products are added by fma. One sum
// per output that takes the inputs in order, as linear_float.cpp adds fp32 (the same bits).
#include "common.h"

#ifndef BATON_VNNI_BF16
#include "linear_avx2.h"

namespace baton {
namespace {

inline __m256 even_bf16(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd_bf16(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000))));
}
inline __m256i load32(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// Of fp16 whose bits are those of an e4m3, 7 places further left (its exponent comes out 8 too small).
inline __m256 wide_e4m3(__m128i halves) { return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0f)); }
inline __m256i half_e4m3(__m256i sign, __m256i magnitude) {
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f << 7));
  return _mm256_or_si256(_mm256_or_si256(sign, magnitude), _mm256_and_si256(nan, _mm256_set1_epi16(0x7fff)));
}

// A slice holds fp32 [inputs][16].
template <int64_t KIND>
struct Floats {
  static constexpr int64_t SLICE_BYTES = 4 * SLICE;
  static int64_t bytes(int64_t inputs) { return inputs * PANEL * (KIND == W_F32 ? 4 : KIND == W_BF16 ? 2 : 1); }

  static void unpack(const uint8_t* from, int64_t inputs, char* to, int64_t slice_bytes) {
    constexpr int64_t TURN = KIND == W_F32 ? 1 : 2;
    for (int64_t k = 0; k < inputs; k += TURN, from += bytes(TURN), to += TURN * SLICE_BYTES) {
      for (int s = 0; s < 4; ++s) {
        float* even = reinterpret_cast<float*>(to + s * slice_bytes);
        if constexpr (KIND == W_E4M3) {
          const __m256i pairs = load32(from + 32 * s);  // 16 outputs
          const __m256i sign = _mm256_set1_epi16(int16_t(0x8000)), magnitude = _mm256_set1_epi16(0x7f << 7);
          const __m256i first = half_e4m3(_mm256_and_si256(_mm256_slli_epi16(pairs, 8), sign),
                                          _mm256_and_si256(_mm256_slli_epi16(pairs, 7), magnitude));
          const __m256i second = half_e4m3(_mm256_and_si256(pairs, sign),
                                           _mm256_and_si256(_mm256_srli_epi16(pairs, 1), magnitude));
          _mm256_store_ps(even, wide_e4m3(_mm256_castsi256_si128(first)));
          _mm256_store_ps(even + 8, wide_e4m3(_mm256_extracti128_si256(first, 1)));
          _mm256_store_ps(even + 16, wide_e4m3(_mm256_castsi256_si128(second)));
          _mm256_store_ps(even + 24, wide_e4m3(_mm256_extracti128_si256(second, 1)));
        } else {
          const __m256i low = load32(from + 64 * s), high = load32(from + 64 * s + 32);
          if constexpr (KIND == W_F32) {
            _mm256_store_ps(even, _mm256_castsi256_ps(low)), _mm256_store_ps(even + 8, _mm256_castsi256_ps(high));
          } else {
            _mm256_store_ps(even, even_bf16(low)), _mm256_store_ps(even + 8, even_bf16(high));
            _mm256_store_ps(even + 16, odd_bf16(low)), _mm256_store_ps(even + 24, odd_bf16(high));
          }
        }
      }
    }
  }

  template <int NUM_ROWS>
  __attribute__((noinline)) static void tile(const Slice& slice, int64_t row, float* sums, Ahead& shared) {
    constexpr bool GROUPED = KIND == W_E4M3;
    const Linear& linear = slice.linear;
    const int64_t stride = slice.rows.stride / 4;
    const float* x = reinterpret_cast<const float*>(slice.rows.values + row * slice.rows.stride) + slice.k0;
    const float* w = reinterpret_cast<const float*>(slice.values);
    Ahead ahead = shared;
    for (int64_t k = slice.k0, end; k < slice.k1; k = end) {
      end = std::min(slice.k1, (k / linear.group + 1) * linear.group);
      const bool goes_on = k % linear.group != 0;
      __m256 acc[NUM_ROWS][2];
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
          acc[m][v] = goes_on ? _mm256_loadu_ps(sums + m * PANEL + 8 * v) : _mm256_setzero_ps();
      auto multiply = [&](int64_t i) __attribute__((always_inline)) {
        const __m256 w0 = _mm256_load_ps(w + SLICE * i), w1 = _mm256_load_ps(w + SLICE * i + 8);
#pragma GCC unroll 8
        for (int m = 0; m < NUM_ROWS; ++m) {
          const __m256 b = _mm256_broadcast_ss(x + m * stride + i);
          acc[m][0] = _mm256_fmadd_ps(w0, b, acc[m][0]), acc[m][1] = _mm256_fmadd_ps(w1, b, acc[m][1]);
        }
      };
      const int64_t num_inputs = end - k;
      int64_t i = 0;
      for (; i + 2 <= num_inputs; i += 2) ahead.fetch(), multiply(i), multiply(i + 1);
      if (i < num_inputs) multiply(i);
      x += num_inputs, w += SLICE * num_inputs;
      if constexpr (GROUPED) {
        if (end % linear.group == 0) {
          const int64_t g = k / linear.group;
          const int64_t scale = (slice.panel * linear.num_scales() + g / linear.groups_per_scale) * PANEL + slice.first;
          for (int v = 0; v < 2; ++v) {
            const __m256 s = load8_scales(linear.scales, linear.scale_kind, scale + 8 * v);
#pragma GCC unroll 8
            for (int m = 0; m < NUM_ROWS; ++m) {
              const __m256 sx = _mm256_broadcast_ss(slice.rows.scales + (row + m) * linear.num_groups() + g);
              const __m256 before = g ? _mm256_loadu_ps(sums + m * PANEL + 8 * v) : _mm256_setzero_ps();
              acc[m][v] = _mm256_fmadd_ps(_mm256_mul_ps(acc[m][v], sx), s, before);
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) _mm256_storeu_ps(sums + m * PANEL + 8 * v, acc[m][v]);
    }
    shared = ahead;
  }
};

// One row streams the panel as it comes from memory.
template <int64_t KIND>
void one_row(const Linear& linear, int64_t panel, const Rows& rows, void* y) {
  constexpr int64_t TURN = KIND == W_F32 ? 1 : 2;
  const uint8_t* w = linear.values + panel * Floats<KIND>::bytes(linear.padded_in);
  const float* x = reinterpret_cast<const float*>(rows.values);
  __m256 sums[8];
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) sums[v] = _mm256_setzero_ps();
  for (int64_t k = 0; k < linear.padded_in; k += TURN, w += 256) {
    for (int line = 0; line < 4; ++line) __builtin_prefetch(w + OWN_AHEAD + 64 * line);
    const __m256 even = _mm256_broadcast_ss(x + k);
    [[maybe_unused]] __m256 odd;
    if constexpr (KIND == W_BF16) odd = _mm256_broadcast_ss(x + k + 1);
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      const __m256i weights = load32(w + 32 * v);
      if constexpr (KIND == W_F32) {
        sums[v] = _mm256_fmadd_ps(_mm256_castsi256_ps(weights), even, sums[v]);
      } else {
        sums[v] = _mm256_fmadd_ps(even_bf16(weights), even, sums[v]);
        sums[v] = _mm256_fmadd_ps(odd_bf16(weights), odd, sums[v]);
      }
    }
  }
  float last[PANEL];
  for (int v = 0; v < 8; ++v) _mm256_storeu_ps(last + 8 * v, sums[v]);
  finish_row(linear, panel, rows, 0, last, y);
}

}  // namespace

void float_panel(const Linear& linear, int64_t panel, int64_t next, const Rows& rows, void* y,
                 std::vector<char>& memory) {
  if (linear.kind == W_E4M3) return in_chunks<Floats<W_E4M3>>(linear, panel, next, rows, y, memory);
  const bool is_bf16 = linear.kind == W_BF16;
  if (rows.num_rows == 1) return is_bf16 ? one_row<W_BF16>(linear, panel, rows, y) : one_row<W_F32>(linear, panel, rows, y);
  if (is_bf16) in_chunks<Floats<W_BF16>>(linear, panel, next, rows, y, memory);
  else in_chunks<Floats<W_F32>>(linear, panel, next, rows, y, memory);
}

}  // namespace baton

#endif
