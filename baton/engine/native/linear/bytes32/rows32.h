// What linear_rows.cpp does with the floats of a row, 8 at a time, in the layouts of linear32.h. The same values as
// rows64.h gives, bit for bit.
#pragma once

#include "linear32.h"

namespace baton {
namespace {

// 8 values, or zeros behind the last.
__m256 load8(const float* from, int64_t left) {
  if (left >= 8) return _mm256_loadu_ps(from);
  float values[8] = {};
  std::copy_n(from, left, values);
  return _mm256_loadu_ps(values);
}
void store8(float* to, __m256 values, int64_t left) {
  if (left >= 8) return _mm256_storeu_ps(to, values);
  float last[8];
  _mm256_storeu_ps(last, values);
  std::copy_n(last, left, to);
}

// fp32 [padded_in] of one row of x, zeros behind it.
void load_row(const Linear& linear, const void* x, int64_t row, float* to) {
  const int64_t n = linear.num_in;
  if (linear.x_kind == X_FP32) {
    std::memcpy(to, static_cast<const float*>(x) + row * n, 4 * n);
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(x) + row * n;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, load8_bf16(from + i));
    for (; i < n; ++i) to[i] = from_bf16(from[i]);
  }
  std::fill(to + n, to + linear.padded_in, 0.0f);
}

// Largest magnitude by its bits, so that a NaN is the largest of all and comes out as the scale.
float largest(const float* x, int64_t n) {
  __m256i top = _mm256_setzero_si256();
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int64_t i = 0; i < n; i += 8)
    top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(load8(x + i, n - i)), magnitude));
  uint32_t lanes[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), top);
  return from_bits(*std::max_element(lanes, lanes + 8));
}

// To bf16 and back.
void round_bf16(const float* x, int64_t n, char* row) {
  const __m256i upper = _mm256_set1_epi32(int32_t(0xffff0000));
  for (int64_t i = 0; i < n; i += 8) {
    const __m256i rounded = _mm256_and_si256(round8_bf16(load8(x + i, n - i)), upper);
    store8(reinterpret_cast<float*>(row) + i, _mm256_castsi256_ps(rounded), n - i);
  }
}

// Round to nearest even of x * inverse, of the group that begins there; returns the sum of the integers.
int32_t quantize_int8(const Linear& linear, const float* x, int64_t begin, float inverse, char* row) {
  const int64_t n = linear.group;
  const __m256 factor = _mm256_set1_ps(inverse);
  __m256i sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < n; i += 8) {  // groups are multiples of 4
    const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(load8(x + begin + i, n - i), factor));
    sum = _mm256_add_epi32(sum, q);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    const __m128i bytes = _mm_packs_epi16(words, words);
#ifndef BATON_DOT
    if (linear.kind == U8) {
      const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
      const __m128i mixed = _mm_shuffle_epi8(_mm_cvtepi8_epi16(bytes), order);
      int16_t* to = reinterpret_cast<int16_t*>(row) + begin + i;
      if (n - i >= 8) _mm_storeu_si128(reinterpret_cast<__m128i*>(to), mixed);
      else _mm_storel_epi64(reinterpret_cast<__m128i*>(to), mixed);
      continue;
    }
#endif
    int8_t* to = reinterpret_cast<int8_t*>(row) + begin + i;
    if (n - i >= 8) _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
    else _mm_storeu_si32(to, bytes);
  }
  int32_t lanes[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sum);
  uint32_t total = 0;  // of a row with a NaN it passes 2^31
  for (int32_t lane : lanes) total += uint32_t(lane);
  return int32_t(total);
}

// x / scale rounded to e4m3 (nearest even, saturating; infinity is no number).
void round_e4m3(const float* x, int64_t begin, int64_t n, float inverse, char* row) {
  const __m256i least = _mm256_set1_epi32(127 - 6), bias = _mm256_set1_epi32(127);
  const __m256i three = _mm256_set1_epi32(3), exponent_bits = _mm256_set1_epi32(0xff);
  for (int64_t i = 0; i < n; i += 8) {
    __m256 v = _mm256_mul_ps(load8(x + begin + i, n - i), _mm256_set1_ps(inverse));
    v = _mm256_add_ps(v, _mm256_sub_ps(v, v));
    __m256i exponent = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(v), 23), exponent_bits);
    exponent = _mm256_sub_epi32(_mm256_max_epi32(exponent, least), three);  // of an eighth, biased
    const __m256i inverted = _mm256_sub_epi32(_mm256_add_epi32(bias, bias), exponent);
    const __m256 eighth = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    const __m256 eighths = _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(inverted, 23)));
    v = _mm256_mul_ps(_mm256_round_ps(eighths, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), eighth);
    v = _mm256_max_ps(_mm256_set1_ps(-448.0f), _mm256_min_ps(_mm256_set1_ps(448.0f), v));
    store8(reinterpret_cast<float*>(row) + begin + i, v, n - i);
  }
}

}  // namespace
}  // namespace baton
