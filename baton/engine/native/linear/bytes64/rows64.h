// What linear_rows.cpp does with the floats of a row, 16 at a time.
#pragma once

#include "../linear.h"

namespace baton {
namespace {

__mmask16 mask_of(int64_t left) { return left >= 16 ? 0xffff : (1u << left) - 1; }

// fp32 [padded_in] of one row of x, zeros behind it.
void load_row(const Linear& linear, const void* x, int64_t row, float* to) {
  const int64_t n = linear.num_in;
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 mask = mask_of(n - i);
    __m512 values = linear.x_kind == X_BF16 ? load16_bf16(static_cast<const uint16_t*>(x) + row * n + i, mask)
                                          : _mm512_maskz_loadu_ps(mask, static_cast<const float*>(x) + row * n + i);
    _mm512_mask_storeu_ps(to + i, mask, values);
  }
  std::fill(to + n, to + linear.padded_in, 0.0f);
}

// Largest magnitude by its bits, so that a NaN is the largest of all and comes out as the scale.
float largest(const float* x, int64_t n) {
  __m512i top = _mm512_setzero_si512();
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int64_t i = 0; i < n; i += 16) {
    __m512 values = _mm512_maskz_loadu_ps(mask_of(n - i), x + i);
    top = _mm512_max_epu32(top, _mm512_and_si512(_mm512_castps_si512(values), magnitude));
  }
  return from_bits(_mm512_reduce_max_epu32(top));
}

void round_bf16(const float* x, int64_t n, char* row) {
  uint16_t* to = reinterpret_cast<uint16_t*>(row);
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 mask = mask_of(n - i);
    store16_bf16(to + i, _mm512_maskz_loadu_ps(mask, x + i), mask);
  }
}

// Round to nearest even of x * inverse, of the group that begins there; returns the sum of the integers.
int32_t quantize_int8(const Linear& linear, const float* x, int64_t begin, float inverse, char* row) {
  const int64_t n = linear.group;
  int8_t* to = reinterpret_cast<int8_t*>(row) + begin;
  x += begin;
  __m512i sum = _mm512_setzero_si512();
  const __m512 factor = _mm512_set1_ps(inverse);
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 mask = mask_of(n - i);
    __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), factor));
    sum = _mm512_mask_add_epi32(sum, mask, sum, q);
    _mm_mask_storeu_epi8(to + i, mask, _mm512_cvtsepi32_epi8(q));
  }
  return _mm512_reduce_add_epi32(sum);
}

// x / scale rounded to e4m3 (nearest even, saturating), as bf16: its 4 significant bits fit.
void round_e4m3(const float* x, int64_t begin, int64_t n, float inverse, char* row) {
  uint16_t* to = reinterpret_cast<uint16_t*>(row) + begin;
  x += begin;
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 mask = mask_of(n - i);
    __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), _mm512_set1_ps(inverse));
    __m512 exponent = _mm512_max_ps(_mm512_getexp_ps(v), _mm512_set1_ps(-6.0f));
    __m512 eighths = _mm512_scalef_ps(v, _mm512_sub_ps(_mm512_set1_ps(3.0f), exponent));
    v = _mm512_scalef_ps(_mm512_roundscale_ps(eighths, 0), _mm512_sub_ps(exponent, _mm512_set1_ps(3.0f)));
    v = _mm512_max_ps(_mm512_set1_ps(-448.0f), _mm512_min_ps(_mm512_set1_ps(448.0f), v));
    store16_bf16(to + i, v, mask);
  }
}

}  // namespace
}  // namespace baton
