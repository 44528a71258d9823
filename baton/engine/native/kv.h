// The layout of KV in a pool, and its rows as they are stored: the bytes that kv/stored_forms.py describes, read and written.

#pragma once

#include <type_traits>

#include "vector.h"

namespace baton {

// Stored forms, as kv/native.py numbers them.
enum Form : int64_t { FORM_FP32, FORM_BF16, FORM_FP16, FORM_E4M3, FORM_E5M2, FORM_INT8, FORM_INT4 };

constexpr bool has_scales(int64_t form) { return form == FORM_INT8 || form == FORM_INT4; }  // one a row, in fp16
constexpr bool has_zeros(int64_t form) { return form == FORM_INT4; }                        // beside each scale
constexpr bool fits_bf16(int64_t form) { return form != FORM_FP32 && form != FORM_FP16; }   // without rounding

// use(form), the form known to the compiler.
template <class Use>
inline auto with_form(int64_t form, Use use) {
  switch (form) {
    case FORM_FP32: return use(std::integral_constant<int64_t, FORM_FP32>());
    case FORM_BF16: return use(std::integral_constant<int64_t, FORM_BF16>());
    case FORM_FP16: return use(std::integral_constant<int64_t, FORM_FP16>());
    case FORM_E4M3: return use(std::integral_constant<int64_t, FORM_E4M3>());
    case FORM_E5M2: return use(std::integral_constant<int64_t, FORM_E5M2>());
    case FORM_INT8: return use(std::integral_constant<int64_t, FORM_INT8>());
    default: return use(std::integral_constant<int64_t, FORM_INT4>());
  }
}

// ---- the pool ----

// As Python fills it: int64 each.
struct Pool {
  uint8_t* bytes;
  int64_t block_bytes, block_size, num_layers, num_kv_heads, head_dim, form, row_bytes, scale_bytes;
  int64_t num_kinds;  // 2: keys and values; 1: latent rows, of which both are made
  int64_t first_head, heads_of_block;  // the num_kv_heads from first_head on are a rank's, of those that a block holds

  int64_t row(int64_t layer, int64_t kind, int64_t head) const {  // of a block; kind: 0 keys, 1 values
    return ((layer * num_kinds + kind % num_kinds) * heads_of_block + first_head + head) * block_size;
  }
  int64_t slot(const int64_t* block_ids, int64_t position) const {
    return block_ids[position / block_size] * block_size + position % block_size;
  }
  uint8_t* values(int64_t block_id, int64_t row) const { return bytes + block_id * block_bytes + row * row_bytes; }
  uint16_t* scales(int64_t block_id, int64_t row) const {
    const int64_t rows = num_layers * num_kinds * heads_of_block * block_size;
    return (uint16_t*)(bytes + block_id * block_bytes + rows * row_bytes + row * scale_bytes);
  }
};

// ---- reading ----

#ifndef BATON_AVX512
// Elements [index, index + 8) of a stored row of one or half a byte each, without its scale.
template <int64_t F>
inline __m256 stored8(const uint8_t* row, int64_t index) {
  if constexpr (F == FORM_INT4) {
    const __m128i both = _mm_cvtsi32_si128(word_at(row + index / 2)), low = _mm_set1_epi8(15);
    const __m128i bytes = _mm_unpacklo_epi8(_mm_and_si128(both, low), _mm_and_si128(_mm_srli_epi16(both, 4), low));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  } else {
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)(row + index));
    if constexpr (F == FORM_INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    const __m128i upper = _mm_unpacklo_epi8(_mm_setzero_si128(), bytes);  // of 16 bits
    if constexpr (F == FORM_E5M2) return _mm256_cvtph_ps(upper);
    // e4m3 as fp16 with an exponent that is 8 too small.
    const __m128i magnitude = _mm_srli_epi16(_mm_and_si128(upper, _mm_set1_epi16(0x7f00)), 1);
    const __m128i half = _mm_or_si128(_mm_and_si128(upper, _mm_set1_epi16(int16_t(0x8000))), magnitude);
    const __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f << 7));
    const __m128i number = _mm_blendv_epi8(half, _mm_set1_epi16(0x7e00), is_nan);
    return _mm256_mul_ps(_mm256_cvtph_ps(number), _mm256_set1_ps(256));
  }
}
#endif

// Elements [index, index + 16) of a stored row without its scale.
template <int64_t F>
inline V16 stored16(const uint8_t* row, int64_t index) {
  if constexpr (F == FORM_FP32) return read16(FP32, row, index);
  if constexpr (F == FORM_BF16) return read16(BF16, row, index);
  if constexpr (F == FORM_FP16) return read16(FP16, row, index);
#ifdef BATON_AVX512
  if constexpr (F == FORM_INT4) {
    const __m128i packed = _mm_loadl_epi64((const __m128i*)(row + index / 2));
    const __m128i low = _mm_and_si128(packed, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(packed, 4), _mm_set1_epi8(15));
    return (V16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)));
  } else {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)(row + index));
    if constexpr (F == FORM_INT8) return (V16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    const __m256i wide = _mm256_cvtepu8_epi16(bytes);
    if constexpr (F == FORM_E5M2) return (V16)_mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
    // e4m3 as fp16 with an exponent that is 8 too small.
    const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    const __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));
    const __m512 x = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256));
    const __m512i wider = _mm512_cvtepu16_epi32(magnitude);
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(wider, _mm512_set1_epi32(0x7f));
    return (V16)_mm512_mask_mov_ps(x, nan, _mm512_set1_ps(NAN));
  }
#else
  return joined8(stored8<F>(row, index), stored8<F>(row, index + 8));
#endif
}

// ---- writing ----

// x rounded half to even to `mantissa` bits, subnormal below 2^least, saturated: what a cast to an 8 bit float stores.
inline uint8_t to_fp8(float x, int mantissa, int bias, float largest) {
  if (std::isnan(x)) return 0x7f;
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fmin(std::fabs(x), largest);
  const int least = 1 - bias;  // exponent of the smallest normal number
  int exponent = int(to_bits(magnitude) >> 23) - 127;
  exponent = exponent < least ? least : exponent;
  // In units of the last place: an integer once rounded; a carry into the next exponent comes out right by itself.
  const float units = std::nearbyint(magnitude * from_bits(uint32_t(127 + mantissa - exponent) << 23));
  return uint8_t(sign | (((exponent - least) << mantissa) + int(units)));
}

inline float scale_fp16(float x, uint16_t* stored) {
  *stored = to_fp16(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x);
  return from_fp16(*stored);
}

// int8: zero is 0 and q in [-127, 127]; int4: q in [0, 15].
inline void store_scaled(int64_t form, const float* x, int64_t size, uint8_t* row, uint16_t* scales) {
  V16 lows = load16(x), highs = lows;
  for (int64_t i = 16; i < size; i += 16) lows = min16(lows, load16(x + i)), highs = max16(highs, load16(x + i));
  const float low = -max_of16(-lows), high = max_of16(highs);
  const bool is_int8 = form == FORM_INT8;
  const float scale = scale_fp16(is_int8 ? (high > -low ? high : -low) / 127 : (high - low) / 15, scales);
  const float zero = is_int8 ? 0 : scale_fp16(low, scales + 1);
  const float least = is_int8 ? -127 : 0, most = is_int8 ? 127 : 15;
  for (int64_t i = 0; i < size; i += 16) {
    V16 q{};
    if (scale != 0) q = min16(max16((load16(x + i) - zero) / scale, all16(least)), all16(most));
    q = (q + ROUNDER) - ROUNDER;
    if (is_int8)
      for (int j = 0; j < 16; j++) row[i + j] = uint8_t(int8_t(q[j]));
    else
      for (int j = 0; j < 8; j++) row[i / 2 + j] = uint8_t(int(q[2 * j]) | int(q[2 * j + 1]) << 4);
  }
}

// One token of one head, x [size], a multiple of 16, to its place.
inline void store_row(int64_t form, const float* x, int64_t size, uint8_t* row, uint16_t* scales) {
  if (has_scales(form)) return store_scaled(form, x, size, row, scales);
  if (form <= FORM_FP16) return write_row(form, x, size, row, 0);
  for (int64_t i = 0; i < size; i++)
    row[i] = form == FORM_E4M3 ? to_fp8(x[i], 3, 7, 448) : to_fp8(x[i], 2, 15, 57344);
}

}  // namespace baton
