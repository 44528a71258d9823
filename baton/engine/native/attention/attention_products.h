// The products of attention: a tile of up to 6 rows times a span of 64 positions. Every sum takes its terms in order.
#pragma once

#include "../vector.h"

namespace baton {
namespace {

constexpr int SPAN = 64;

// rows [64][words] of 32 bits -> [words][64].
inline void transpose(const uint32_t* rows, int64_t words, uint32_t* to) {
#ifdef BATON_AVX512
  for (int64_t column = 0; column < words; column += 16) {
    const __mmask16 mask = words - column >= 16 ? 0xffff : (1 << (words - column)) - 1;
    for (int j = 0; j < SPAN; j += 16) {
      __m512i a[16], b[16];
      for (int i = 0; i < 16; i++) a[i] = _mm512_maskz_loadu_epi32(mask, rows + (j + i) * words + column);
      for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
      }
      for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
      }
      for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
      }
      for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
        a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
      }
      for (int i = 0; i < 16 && column + i < words; i++) _mm512_store_si512(to + (column + i) * SPAN + j, a[i]);
    }
  }
#else
  using W4 = uint32_t __attribute__((vector_size(16)));
  for (int64_t column = 0; column < words; column += 4)  // head_dim is a multiple of 16
    for (int j = 0; j < SPAN; j += 4) {
      W4 a[4], b[4];
      for (int i = 0; i < 4; i++) std::memcpy(&a[i], rows + (j + i) * words + column, sizeof a[i]);
      for (int i = 0; i < 2; i++) {
        b[2 * i] = __builtin_shuffle(a[i], a[i + 2], W4{0, 4, 1, 5});
        b[2 * i + 1] = __builtin_shuffle(a[i], a[i + 2], W4{2, 6, 3, 7});
      }
      for (int i = 0; i < 2; i++) {
        a[2 * i] = __builtin_shuffle(b[i], b[i + 2], W4{0, 4, 1, 5});
        a[2 * i + 1] = __builtin_shuffle(b[i], b[i + 2], W4{2, 6, 3, 7});
      }
      for (int i = 0; i < 4; i++) std::memcpy(to + (column + i) * SPAN + j, &a[i], sizeof a[i]);
    }
#endif
}

#ifdef BATON_VNNI_BF16
inline __m512 dot2(__m512 sum, int32_t pair, const uint32_t* pairs) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(pairs));
}
#endif

// q [R][size] times keys [size / (1 | 2)][64] -> scores [R][64].
#ifdef BATON_AVX512
template <int R>
inline void score(const float* q, int64_t size, const uint32_t* keys, float* scores) {
  V16 sums[R][4] = {};
  for (int64_t d = 0; d < size; d++)
    for (int r = 0; r < R; r++)
      for (int i = 0; i < 4; i++)
        sums[r][i] = fma16(all16(q[r * size + d]), load16((const float*)keys + d * SPAN + i * 16), sums[r][i]);
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 4; i++) store16(scores + r * SPAN + i * 16, sums[r][i]);
}
#else
// 16 columns at a time: 12 sums in 16 registers.
template <int R>
inline void score(const float* q, int64_t size, const uint32_t* keys, float* scores) {
  for (int column = 0; column < SPAN; column += 16) {
    __m256 sums[R][2] = {};
    for (int64_t d = 0; d < size; d++) {
      const float* key = (const float*)keys + d * SPAN + column;
      const __m256 low = _mm256_loadu_ps(key), high = _mm256_loadu_ps(key + 8);
      for (int r = 0; r < R; r++) {
        const __m256 x = _mm256_broadcast_ss(q + r * size + d);
        sums[r][0] = _mm256_fmadd_ps(x, low, sums[r][0]), sums[r][1] = _mm256_fmadd_ps(x, high, sums[r][1]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int i = 0; i < 2; i++) _mm256_storeu_ps(scores + r * SPAN + column + 8 * i, sums[r][i]);
  }
}
#endif

// weights [R][64] times C vectors of values [64 / (1 | 2)][size], added to what is there times `kept`.
#ifdef BATON_AVX512
template <int R, int C>
inline void mix(const float* weights, const uint32_t* values, int64_t size, const float* kept, float* to) {
  V16 sums[R][C];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < C; i++) sums[r][i] = load16(to + r * size + i * 16) * kept[r];
  for (int j = 0; j < SPAN; j++)
    for (int r = 0; r < R; r++)
      for (int i = 0; i < C; i++) {
        const V16 value = load16((const float*)values + j * size + i * 16);
        sums[r][i] = fma16(all16(weights[r * SPAN + j]), value, sums[r][i]);
      }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < C; i++) store16(to + r * size + i * 16, sums[r][i]);
}
#else
template <int R, int C>
inline void mix(const float* weights, const uint32_t* values, int64_t size, const float* kept, float* to) {
  for (int column = 0; column < 16 * C; column += 16) {
    __m256 sums[R][2];
    for (int r = 0; r < R; r++)
      for (int i = 0; i < 2; i++)
        sums[r][i] = _mm256_mul_ps(_mm256_loadu_ps(to + r * size + column + 8 * i), _mm256_set1_ps(kept[r]));
    for (int j = 0; j < SPAN; j++) {
      const float* value = (const float*)values + j * size + column;
      const __m256 low = _mm256_loadu_ps(value), high = _mm256_loadu_ps(value + 8);
      for (int r = 0; r < R; r++) {
        const __m256 x = _mm256_broadcast_ss(weights + r * SPAN + j);
        sums[r][0] = _mm256_fmadd_ps(x, low, sums[r][0]), sums[r][1] = _mm256_fmadd_ps(x, high, sums[r][1]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int i = 0; i < 2; i++) _mm256_storeu_ps(to + r * size + column + 8 * i, sums[r][i]);
  }
}
#endif

#ifdef BATON_VNNI_BF16
template <int R>
inline void score(const uint16_t* q, int64_t size, const uint32_t* keys, float* scores) {
  __m512 sums[R][4] = {};
  for (int64_t d = 0; d < size / 2; d++)
    for (int r = 0; r < R; r++) {
      const int32_t pair = word_at(q + r * size + d * 2);
      for (int i = 0; i < 4; i++) sums[r][i] = dot2(sums[r][i], pair, keys + d * SPAN + i * 16);
    }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 4; i++) _mm512_storeu_ps(scores + r * SPAN + i * 16, sums[r][i]);
}

template <int R, int C>
inline void mix(const uint16_t* weights, const uint32_t* values, int64_t size, const float* kept, float* to) {
  __m512 sums[R][C];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < C; i++) sums[r][i] = (__m512)(load16(to + r * size + i * 16) * kept[r]);
  for (int j = 0; j < SPAN / 2; j++)
    for (int r = 0; r < R; r++) {
      const int32_t pair = word_at(weights + r * SPAN + j * 2);
      for (int i = 0; i < C; i++) sums[r][i] = dot2(sums[r][i], pair, values + j * size + i * 16);
    }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < C; i++) _mm512_storeu_ps(to + r * size + i * 16, sums[r][i]);
}
#endif

}  // namespace
}  // namespace baton
