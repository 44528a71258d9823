// What the kernels with AVX-512 VNNI and BF16 share.
#pragma once

#include "../linear.h"

namespace baton {

// Whether a panel's kernel adds the leaves by itself, and not one call a leaf.
inline bool adds_leaves(const Linear&) { return false; }

inline __m512i four_of(const void* from) { return _mm512_set1_epi32(word_at(from)); }  // bytes, in all lanes

inline __m512 load_scales(const void* scales, int64_t kind, int64_t index) {
  if (kind == S_FP32) return _mm512_loadu_ps(static_cast<const float*>(scales) + index);
  const uint16_t* halves = static_cast<const uint16_t*>(scales) + index;
  if (kind == S_BF16) return load16_bf16(halves);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}

// Adds outliers and bias to the 64 sums of a row and writes those outputs that exist.
inline void finish_row(const Linear& linear, int64_t panel, const Rows& rows, int64_t row, const float* from, void* y) {
  __m512 sums[4];
  for (int v = 0; v < 4; ++v) sums[v] = _mm512_loadu_ps(from + 16 * v);
  for (int64_t i = 0; i < linear.num_outliers; ++i) {
    __m512 x = _mm512_set1_ps(rows.outliers[row * rows.num_outliers + i]);
    const uint16_t* column = linear.outlier_values + (panel * linear.num_outliers + i) * PANEL;
    for (int v = 0; v < 4; ++v) sums[v] = _mm512_fmadd_ps(x, load16_bf16(column + 16 * v), sums[v]);
  }
  for (int v = 0; v < 4; ++v) {
    int64_t output = panel * PANEL + 16 * v, left = linear.num_out - output;
    if (left <= 0) return;
    __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
    if (linear.bias) sums[v] = _mm512_add_ps(sums[v], _mm512_loadu_ps(linear.bias + output));
    int64_t at = row * linear.num_out + output;
    if (linear.y_kind == ADDED_SUMS) sums[v] = _mm512_add_ps(sums[v], _mm512_loadu_ps(static_cast<float*>(y) + at));
    if (linear.y_kind == X_BF16) store16_bf16(static_cast<uint16_t*>(y) + at, sums[v], mask);
    else _mm512_mask_storeu_ps(static_cast<float*>(y) + at, mask, sums[v]);
  }
}

#ifdef BATON_AMX
constexpr int64_t MIN_TILE_ROWS = 16;  // of integers, where fewer wait for memory

// All rows of one panel by tiles (linear_tiles.cpp); integers in 8 bits, as linear.h draws U8.
void int_tiles(const Linear& linear, const uint8_t* values, int64_t panel, const Rows& rows, void* y);
void bf16_tiles(const Linear& linear, const uint8_t* values, int64_t panel, const Rows& rows, void* y);
#endif

}  // namespace baton
