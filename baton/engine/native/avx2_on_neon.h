// The words of AVX2, FMA and F16C that the kernels of 32 byte vectors use, on NEON: the same operations in the same
// order, so that the tier for 64 bit Arm computes the bits of x86-64-v3 from the same files.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

using __m128i = uint8x16_t;
struct __m256 {
  float32x4_t half[2];
};
struct __m256i {
  uint8x16_t half[2];
};

constexpr int _CMP_UNORD_Q = 3, _MM_FROUND_TO_NEAREST_INT = 0, _MM_FROUND_NO_EXC = 8;

namespace on_neon {

// Both halves by one function, as elements of some size.
template <class Function>
inline __m256 floats(Function function, __m256 a) {
  return {{function(a.half[0]), function(a.half[1])}};
}
template <class Function>
inline __m256 floats(Function function, __m256 a, __m256 b) {
  return {{function(a.half[0], b.half[0]), function(a.half[1], b.half[1])}};
}
template <class Function>
inline __m256i integers(Function function, __m256i a) {
  return {{function(a.half[0]), function(a.half[1])}};
}
template <class Function>
inline __m256i integers(Function function, __m256i a, __m256i b) {
  return {{function(a.half[0], b.half[0]), function(a.half[1], b.half[1])}};
}

inline int32x4_t words(uint8x16_t x) { return vreinterpretq_s32_u8(x); }
inline int16x8_t shorts(uint8x16_t x) { return vreinterpretq_s16_u8(x); }
inline uint8x16_t bytes(int32x4_t x) { return vreinterpretq_u8_s32(x); }
inline uint8x16_t bytes(uint32x4_t x) { return vreinterpretq_u8_u32(x); }
inline uint8x16_t bytes(int16x8_t x) { return vreinterpretq_u8_s16(x); }
inline uint8x16_t bytes(uint16x8_t x) { return vreinterpretq_u8_u16(x); }

}  // namespace on_neon

// ---- memory ----

inline __m256 _mm256_loadu_ps(const float* from) { return {{vld1q_f32(from), vld1q_f32(from + 4)}}; }
inline __m256 _mm256_load_ps(const float* from) { return _mm256_loadu_ps(from); }
inline void _mm256_storeu_ps(float* to, __m256 x) { vst1q_f32(to, x.half[0]), vst1q_f32(to + 4, x.half[1]); }
inline void _mm256_store_ps(float* to, __m256 x) { _mm256_storeu_ps(to, x); }
inline __m128i _mm_loadu_si128(const __m128i* from) { return vld1q_u8(reinterpret_cast<const uint8_t*>(from)); }
inline void _mm_storeu_si128(__m128i* to, __m128i x) { vst1q_u8(reinterpret_cast<uint8_t*>(to), x); }
inline __m128i _mm_loadl_epi64(const __m128i* from) {
  return vcombine_u8(vld1_u8(reinterpret_cast<const uint8_t*>(from)), vdup_n_u8(0));
}
inline void _mm_storel_epi64(__m128i* to, __m128i x) { vst1_u8(reinterpret_cast<uint8_t*>(to), vget_low_u8(x)); }
inline void _mm_storeu_si32(void* to, __m128i x) {
  const uint32_t first = vgetq_lane_u32(vreinterpretq_u32_u8(x), 0);
  std::memcpy(to, &first, 4);
}
inline __m256i _mm256_loadu_si256(const __m256i* from) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(from);
  return {{vld1q_u8(bytes), vld1q_u8(bytes + 16)}};
}
inline void _mm256_storeu_si256(__m256i* to, __m256i x) {
  uint8_t* bytes = reinterpret_cast<uint8_t*>(to);
  vst1q_u8(bytes, x.half[0]), vst1q_u8(bytes + 16, x.half[1]);
}

// ---- the same in all lanes, halves, other types of the same bits ----

inline __m256 _mm256_set1_ps(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x)}}; }
inline __m256 _mm256_broadcast_ss(const float* from) { return _mm256_set1_ps(*from); }
inline __m256 _mm256_setzero_ps() { return _mm256_set1_ps(0); }
inline __m256i _mm256_set1_epi8(int8_t x) { return {{vdupq_n_u8(uint8_t(x)), vdupq_n_u8(uint8_t(x))}}; }
inline __m256i _mm256_set1_epi16(int16_t x) {
  return {{on_neon::bytes(vdupq_n_s16(x)), on_neon::bytes(vdupq_n_s16(x))}};
}
inline __m256i _mm256_set1_epi32(int32_t x) {
  return {{on_neon::bytes(vdupq_n_s32(x)), on_neon::bytes(vdupq_n_s32(x))}};
}
inline __m256i _mm256_setzero_si256() { return _mm256_set1_epi8(0); }
inline __m128i _mm256_castsi256_si128(__m256i x) { return x.half[0]; }
inline __m128i _mm256_extracti128_si256(__m256i x, int which) { return x.half[which]; }
inline __m256 _mm256_castsi256_ps(__m256i x) {
  return {{vreinterpretq_f32_u8(x.half[0]), vreinterpretq_f32_u8(x.half[1])}};
}
inline __m256i _mm256_castps_si256(__m256 x) {
  return {{vreinterpretq_u8_f32(x.half[0]), vreinterpretq_u8_f32(x.half[1])}};
}

// ---- floats ----

inline __m256 _mm256_add_ps(__m256 a, __m256 b) { return on_neon::floats(vaddq_f32, a, b); }
inline __m256 _mm256_sub_ps(__m256 a, __m256 b) { return on_neon::floats(vsubq_f32, a, b); }
inline __m256 _mm256_mul_ps(__m256 a, __m256 b) { return on_neon::floats(vmulq_f32, a, b); }
inline __m256 _mm256_fmadd_ps(__m256 a, __m256 b, __m256 c) {
  return {{vfmaq_f32(c.half[0], a.half[0], b.half[0]), vfmaq_f32(c.half[1], a.half[1], b.half[1])}};
}
// The second where one is a NaN, as on x86.
inline __m256 _mm256_max_ps(__m256 a, __m256 b) {
  return on_neon::floats([](auto x, auto y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }, a, b);
}
inline __m256 _mm256_min_ps(__m256 a, __m256 b) {
  return on_neon::floats([](auto x, auto y) { return vbslq_f32(vcltq_f32(x, y), x, y); }, a, b);
}
inline __m256 _mm256_round_ps(__m256 x, int) { return on_neon::floats(vrndnq_f32, x); }
inline __m256 _mm256_cmp_ps(__m256 a, __m256 b, int) {  // _CMP_UNORD_Q
  auto unordered = [](auto x, auto y) {
    return vreinterpretq_f32_u32(vmvnq_u32(vandq_u32(vceqq_f32(x, x), vceqq_f32(y, y))));
  };
  return on_neon::floats(unordered, a, b);
}

// ---- between types ----

inline __m256 _mm256_cvtepi32_ps(__m256i x) {
  return {{vcvtq_f32_s32(on_neon::words(x.half[0])), vcvtq_f32_s32(on_neon::words(x.half[1]))}};
}
// Half to even; NaN and what passes 2^31 give -2^31, as on x86.
inline __m256i _mm256_cvtps_epi32(__m256 x) {
  auto convert = [](float32x4_t lanes) {
    const uint32x4_t fits = vcltq_f32(vabsq_f32(lanes), vdupq_n_f32(2147483648.0f));
    return on_neon::bytes(vbslq_s32(fits, vcvtnq_s32_f32(lanes), vdupq_n_s32(INT32_MIN)));
  };
  return {{convert(x.half[0]), convert(x.half[1])}};
}
inline __m256 _mm256_cvtph_ps(__m128i x) {
  const float16x8_t halves = vreinterpretq_f16_u8(x);
  return {{vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)}};
}
inline __m128i _mm256_cvtps_ph(__m256 x, int) {
  return vreinterpretq_u8_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.half[0]), x.half[1]));
}
inline float _cvtsh_ss(uint16_t bits) {
  __fp16 half;
  std::memcpy(&half, &bits, 2);
  return half;
}
inline uint16_t _cvtss_sh(float x, int) {
  const __fp16 half = x;
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline __m256i _mm256_cvtepu8_epi32(__m128i x) {
  const uint16x8_t wide = vmovl_u8(vget_low_u8(x));
  return {{on_neon::bytes(vmovl_u16(vget_low_u16(wide))), on_neon::bytes(vmovl_high_u16(wide))}};
}
inline __m256i _mm256_cvtepi8_epi32(__m128i x) {
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(vget_low_u8(x)));
  return {{on_neon::bytes(vmovl_s16(vget_low_s16(wide))), on_neon::bytes(vmovl_high_s16(wide))}};
}
inline __m256i _mm256_cvtepu16_epi32(__m128i x) {
  const uint16x8_t halves = vreinterpretq_u16_u8(x);
  return {{on_neon::bytes(vmovl_u16(vget_low_u16(halves))), on_neon::bytes(vmovl_high_u16(halves))}};
}
inline __m128i _mm_packus_epi32(__m128i a, __m128i b) {
  return on_neon::bytes(vqmovun_high_s32(vqmovun_s32(on_neon::words(a)), on_neon::words(b)));
}
inline __m128i _mm_packs_epi32(__m128i a, __m128i b) {
  return on_neon::bytes(vqmovn_high_s32(vqmovn_s32(on_neon::words(a)), on_neon::words(b)));
}
inline __m128i _mm_packs_epi16(__m128i a, __m128i b) {
  return vreinterpretq_u8_s8(vqmovn_high_s16(vqmovn_s16(on_neon::shorts(a)), on_neon::shorts(b)));
}

// ---- integers ----

inline __m256i _mm256_and_si256(__m256i a, __m256i b) { return on_neon::integers(vandq_u8, a, b); }
inline __m256i _mm256_or_si256(__m256i a, __m256i b) { return on_neon::integers(vorrq_u8, a, b); }
inline __m256i _mm256_xor_si256(__m256i a, __m256i b) { return on_neon::integers(veorq_u8, a, b); }
inline __m256 _mm256_and_ps(__m256 a, __m256 b) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}

// Of lanes of 32 bits; the name says which of NEON's functions computes them.
#define ON_WORDS(name, function)                                                                            \
  inline __m256i name(__m256i a, __m256i b) {                                                               \
    return on_neon::integers(                                                                               \
        [](auto x, auto y) { return on_neon::bytes(function(on_neon::words(x), on_neon::words(y))); }, a, b); \
  }
ON_WORDS(_mm256_add_epi32, vaddq_s32)
ON_WORDS(_mm256_sub_epi32, vsubq_s32)
ON_WORDS(_mm256_max_epi32, vmaxq_s32)
ON_WORDS(_mm256_cmpgt_epi32, vcgtq_s32)
#undef ON_WORDS
inline __m256i _mm256_max_epu32(__m256i a, __m256i b) {
  auto largest = [](auto x, auto y) {
    return on_neon::bytes(vmaxq_u32(vreinterpretq_u32_u8(x), vreinterpretq_u32_u8(y)));
  };
  return on_neon::integers(largest, a, b);
}
inline __m256i _mm256_cmpeq_epi16(__m256i a, __m256i b) {
  auto equal = [](auto x, auto y) { return on_neon::bytes(vceqq_s16(on_neon::shorts(x), on_neon::shorts(y))); };
  return on_neon::integers(equal, a, b);
}
// By a number of places that is negative to the right: NEON has no other with a count in a register.
inline __m256i _mm256_slli_epi32(__m256i x, int count) {
  return on_neon::integers([=](auto a) { return on_neon::bytes(vshlq_s32(on_neon::words(a), vdupq_n_s32(count))); }, x);
}
inline __m256i _mm256_srli_epi32(__m256i x, int count) {
  auto shift = [=](auto a) { return on_neon::bytes(vshlq_u32(vreinterpretq_u32_u8(a), vdupq_n_s32(-count))); };
  return on_neon::integers(shift, x);
}
inline __m256i _mm256_slli_epi16(__m256i x, int count) {
  auto shift = [=](auto a) { return on_neon::bytes(vshlq_s16(on_neon::shorts(a), vdupq_n_s16(int16_t(count)))); };
  return on_neon::integers(shift, x);
}
inline __m256i _mm256_srli_epi16(__m256i x, int count) {
  auto shift = [=](auto a) {
    return on_neon::bytes(vshlq_u16(vreinterpretq_u16_u8(a), vdupq_n_s16(int16_t(-count))));
  };
  return on_neon::integers(shift, x);
}

inline __m128i _mm_setzero_si128() { return vdupq_n_u8(0); }
inline __m128i _mm_set1_epi8(int8_t x) { return vdupq_n_u8(uint8_t(x)); }
inline __m128i _mm_set1_epi16(int16_t x) { return on_neon::bytes(vdupq_n_s16(x)); }
inline __m128i _mm_cvtsi32_si128(int32_t x) { return on_neon::bytes(vsetq_lane_s32(x, vdupq_n_s32(0), 0)); }
inline __m128i _mm_and_si128(__m128i a, __m128i b) { return vandq_u8(a, b); }
inline __m128i _mm_or_si128(__m128i a, __m128i b) { return vorrq_u8(a, b); }
inline __m128i _mm_srli_epi16(__m128i x, int count) {
  return on_neon::bytes(vshlq_u16(vreinterpretq_u16_u8(x), vdupq_n_s16(int16_t(-count))));
}
inline __m128i _mm_cmpeq_epi16(__m128i a, __m128i b) {
  return on_neon::bytes(vceqq_s16(on_neon::shorts(a), on_neon::shorts(b)));
}
inline __m128i _mm_unpacklo_epi8(__m128i a, __m128i b) { return vzip1q_u8(a, b); }

// b where the top bit of a lane of the mask is set, a elsewhere.
inline __m128i _mm_blendv_epi8(__m128i a, __m128i b, __m128i mask) {
  return vbslq_u8(vreinterpretq_u8_s8(vshrq_n_s8(vreinterpretq_s8_u8(mask), 7)), b, a);
}
inline __m256i _mm256_blendv_epi8(__m256i a, __m256i b, __m256i mask) {
  return {{_mm_blendv_epi8(a.half[0], b.half[0], mask.half[0]), _mm_blendv_epi8(a.half[1], b.half[1], mask.half[1])}};
}
inline __m256 _mm256_blendv_ps(__m256 a, __m256 b, __m256 mask) {
  __m256 chosen;
  for (int i = 0; i < 2; ++i) {
    const int32x4_t all = vshrq_n_s32(vreinterpretq_s32_f32(mask.half[i]), 31);
    chosen.half[i] = vbslq_f32(vreinterpretq_u32_s32(all), b.half[i], a.half[i]);
  }
  return chosen;
}

// acc + the products of four bytes each, signed, in 32 bits.
inline __m256i dot_bytes(__m256i acc, __m256i w, __m256i x) {
  for (int i = 0; i < 2; ++i) {
    const int8x16_t weights = vreinterpretq_s8_u8(w.half[i]), values = vreinterpretq_s8_u8(x.half[i]);
    acc.half[i] = on_neon::bytes(vdotq_s32(on_neon::words(acc.half[i]), weights, values));
  }
  return acc;
}

#ifdef __ARM_FEATURE_MATMUL_INT8

// The sums of 8 outputs of two rows as four squares: two outputs of the first row, the same of the second; and back.
inline void to_squares(__m256i first, __m256i second, int32x4_t* squares) {
  for (int i = 0; i < 2; ++i) {
    const int64x2_t a = vreinterpretq_s64_u8(first.half[i]), b = vreinterpretq_s64_u8(second.half[i]);
    squares[2 * i] = vreinterpretq_s32_s64(vzip1q_s64(a, b));
    squares[2 * i + 1] = vreinterpretq_s32_s64(vzip2q_s64(a, b));
  }
}
inline void from_squares(const int32x4_t* squares, __m256i& first, __m256i& second) {
  for (int i = 0; i < 2; ++i) {
    const int64x2_t a = vreinterpretq_s64_s32(squares[2 * i]), b = vreinterpretq_s64_s32(squares[2 * i + 1]);
    second.half[i] = vreinterpretq_u8_s64(vzip2q_s64(a, b));
    first.half[i] = vreinterpretq_u8_s64(vzip1q_s64(a, b));
  }
}

// INPUTS bytes of each, zeros behind them.
template <int INPUTS>
inline int8x16_t two_rows(const char* first, const char* second) {
  uint64_t rows[2] = {};
  std::memcpy(rows, first, INPUTS), std::memcpy(rows + 1, second, INPUTS);
  return vreinterpretq_s8_u64(vcombine_u64(vcreate_u64(rows[0]), vcreate_u64(rows[1])));
}
// Of four outputs' bytes of four inputs, and of the four inputs behind them: the first two outputs, or the last.
template <int WHICH>
inline int8x16_t weights_of_two(__m128i first, __m128i others) {
  const int32x4_t a = on_neon::words(first), b = on_neon::words(others);
  return vreinterpretq_s8_s32(WHICH ? vzip2q_s32(a, b) : vzip1q_s32(a, b));
}

#endif

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC

// acc + the products of the even inputs, then of the odd ones, each by fma: w and x are pairs of bf16.
inline __m256 fmadd_bf16_pairs(__m256i w, __m256i x, __m256 acc) {
  for (int i = 0; i < 2; ++i) {
    const bfloat16x8_t weights = vreinterpretq_bf16_u8(w.half[i]), values = vreinterpretq_bf16_u8(x.half[i]);
    acc.half[i] = vbfmlaltq_f32(vbfmlalbq_f32(acc.half[i], weights, values), weights, values);
  }
  return acc;
}

#endif
