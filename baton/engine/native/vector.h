// Sixteen floats at a time: a CPU without AVX-512 does them in two halves. The same operations in the same order either
// way, so that both give the same bits.
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>

#include "common.h"

namespace baton {

// Elements of activations, as attention/native.py numbers them.
enum Kind : int64_t { FP32 = 0, BF16 = 1, FP16 = 2 };
constexpr int64_t bytes_of(int64_t kind) { return kind == FP32 ? 4 : 2; }  // an element

#ifdef BATON_AVX512
using V16 = float __attribute__((vector_size(64)));
using I16 = int32_t __attribute__((vector_size(64)));
#else
// One vector of two: gcc keeps its own of 64 bytes in memory where no register holds them.
template <class Half>
struct Halves {
  using Lane = std::decay_t<decltype(std::declval<Half&>()[0])>;
  Half half[2];

  Lane& operator[](int64_t lane) { return reinterpret_cast<Lane*>(half)[lane]; }
  Lane operator[](int64_t lane) const { return reinterpret_cast<const Lane*>(half)[lane]; }
  template <class Other>
  explicit operator Halves<Other>() const { return {{(Other)half[0], (Other)half[1]}}; }  // the same bits

#define BATON_OPERATOR(OP)                                                                              \
  friend auto operator OP(Halves a, Halves b) {                                                         \
    return Halves<decltype(a.half[0] OP b.half[0])>{{a.half[0] OP b.half[0], a.half[1] OP b.half[1]}};  \
  }                                                                                                     \
  friend auto operator OP(Halves a, Lane b) { return a OP Halves{{b - Half{}, b - Half{}}}; }
  BATON_OPERATOR(+) BATON_OPERATOR(-) BATON_OPERATOR(*) BATON_OPERATOR(/)
  BATON_OPERATOR(<) BATON_OPERATOR(>) BATON_OPERATOR(<=) BATON_OPERATOR(>=)
  BATON_OPERATOR(<<) BATON_OPERATOR(>>) BATON_OPERATOR(&) BATON_OPERATOR(|)
#undef BATON_OPERATOR
  friend Halves operator-(Lane a, Halves b) { return {{a - b.half[0], a - b.half[1]}}; }
  friend Halves operator-(Halves x) { return {{-x.half[0], -x.half[1]}}; }
  friend auto operator~(Halves x) { return Halves{{~x.half[0], ~x.half[1]}}; }
};

#ifdef __aarch64__
using V16 = Halves<Halves<float32x4_t>>;
using I16 = Halves<Halves<int32x4_t>>;
inline __m256 half8(V16 x, int which) { return {{x.half[which].half[0], x.half[which].half[1]}}; }
inline V16 joined8(__m256 low, __m256 high) { return {{{{low.half[0], low.half[1]}}, {{high.half[0], high.half[1]}}}}; }
#else
using V16 = Halves<float __attribute__((vector_size(32)))>;
using I16 = Halves<int32_t __attribute__((vector_size(32)))>;
inline __m256 half8(V16 x, int which) { return x.half[which]; }
inline V16 joined8(__m256 low, __m256 high) { return {{low, high}}; }
#endif
#endif

inline V16 load16(const float* from) {
#ifdef BATON_AVX512
  return (V16)_mm512_loadu_ps(from);
#else
  return joined8(_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8));
#endif
}
inline void store16(float* to, V16 x) {
#ifdef BATON_AVX512
  _mm512_storeu_ps(to, (__m512)x);
#else
  _mm256_storeu_ps(to, half8(x, 0)), _mm256_storeu_ps(to + 8, half8(x, 1));
#endif
}
inline V16 all16(float x) { return x - V16{}; }
inline V16 fma16(V16 a, V16 b, V16 c) {
#ifdef BATON_AVX512
  return (V16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return joined8(_mm256_fmadd_ps(half8(a, 0), half8(b, 0), half8(c, 0)),
                 _mm256_fmadd_ps(half8(a, 1), half8(b, 1), half8(c, 1)));
#endif
}

// Of a where the mask is set, else of b.
template <class Mask, class Vector>
inline Vector chosen(Mask mask, Vector a, Vector b) {
  if constexpr (std::is_class_v<Vector>)
    return {{chosen(mask.half[0], a.half[0], b.half[0]), chosen(mask.half[1], a.half[1], b.half[1])}};
  else
    return mask ? a : b;
}
inline V16 max16(V16 a, V16 b) { return chosen(a > b, a, b); }
inline V16 min16(V16 a, V16 b) { return chosen(a < b, a, b); }
// x in lanes first..last, `other` elsewhere.
inline V16 within16(V16 x, int32_t first, int32_t last, float other) {
  const I16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return chosen((lane >= first) & (lane <= last), x, all16(other));
}
// Halves are put together until one is left.
template <class Join>
inline float joined16(V16 x, Join join) {
  using I4 = int32_t __attribute__((vector_size(16)));
  using V4 = float __attribute__((vector_size(16)));
  const auto quarter = [&](int which) {
    V4 four;
    std::memcpy(&four, (const char*)&x + which * sizeof four, sizeof four);
    return four;
  };
  V4 four = join(join(quarter(0), quarter(2)), join(quarter(1), quarter(3)));
  four = join(four, __builtin_shuffle(four, I4{2, 3, 0, 1}));
  four = join(four, __builtin_shuffle(four, I4{1, 0, 3, 2}));
  return four[0];
}
inline float sum16(V16 x) {
  return joined16(x, [](auto a, auto b) { return a + b; });
}
inline float max_of16(V16 x) {
  return joined16(x, [](auto a, auto b) { return a > b ? a : b; });
}

inline float from_fp16(uint16_t x) { return _cvtsh_ss(x); }
inline uint16_t to_fp16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// Elements [index, index + 16) of a tensor of some Kind, and back.
inline V16 read16(int64_t kind, const void* from, int64_t index) {
  if (kind == FP32) return load16((const float*)from + index);
  const uint16_t* halves = (const uint16_t*)from + index;
#ifdef BATON_AVX512
  if (kind == FP16) return (V16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)halves));
  return (V16)load16_bf16(halves);
#else
  if (kind == BF16) return joined8(load8_bf16(halves), load8_bf16(halves + 8));
  return joined8(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)halves)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(halves + 8))));
#endif
}
inline void write16(int64_t kind, void* to, int64_t index, V16 x) {
  if (kind == FP32) return store16((float*)to + index, x);
  uint16_t* halves = (uint16_t*)to + index;
#ifdef BATON_AVX512
  if (kind == FP16) {
    _mm256_storeu_si256((__m256i*)halves, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
    return;
  }
  store16_bf16(halves, (__m512)x);
#else
  for (int i = 0; i < 2; i++) {
    if (kind == BF16) store8_bf16(halves + 8 * i, half8(x, i));
    else _mm_storeu_si128((__m128i*)(halves + 8 * i), _mm256_cvtps_ph(half8(x, i), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
}
inline float read1(int64_t kind, const void* from, int64_t index) {
  if (kind == FP32) return ((const float*)from)[index];
  const uint16_t half = ((const uint16_t*)from)[index];
  return kind == BF16 ? from_bf16(half) : from_fp16(half);
}
// Elements [index, index + size), whole vectors of them, to floats, and back.
inline void read_row(int64_t kind, const void* from, int64_t index, int64_t size, float* to) {
  for (int64_t i = 0; i < size; i += 16) store16(to + i, read16(kind, from, index + i));
}
inline void write_row(int64_t kind, const float* from, int64_t size, void* to, int64_t index) {
  for (int64_t i = 0; i < size; i += 16) write16(kind, to, index + i, load16(from + i));
}
inline V16 rounded16(int64_t kind, V16 x) {
  if (kind == FP32) return x;
  uint16_t halves[16];
  write16(kind, halves, 0, x);
  return read16(kind, halves, 0);
}

inline float sum_of_squares(const float* x, int64_t size) {
  V16 sum{};
  for (int64_t i = 0; i < size; i += 16) sum = fma16(load16(x + i), load16(x + i), sum);
  return sum16(sum);
}

// The sum of part(first) to part(first + count - 1), a power of two of them, by the tree of leaves and ranks: neighbours are
// added, their sums, and so on.
template <class Part>
inline auto sum_by_tree(int64_t first, int64_t count, const Part& part) -> decltype(part(first)) {
  if (count == 1) return part(first);
  return sum_by_tree(first, count / 2, part) + sum_by_tree(first + count / 2, count / 2, part);
}

constexpr float LOG2_E = 1.44269504f;
constexpr float ROUNDER = 12582912;  // 1.5 * 2^23: adding it rounds to an integer, half to even, which stands in the low bits

// 2^x for x <= 127; exactly 1 at 0, exactly 0 below -126.
inline V16 power_of_two(V16 x) {
  x = max16(all16(-127.0f), x);  // a NaN stays one
  const V16 shifted = x + ROUNDER, whole = shifted - ROUNDER, rest = x - whole;
  V16 y = all16(1.5403530e-4f);  // exp(rest * ln 2), |rest| <= 0.5
  for (const float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    y = fma16(y, rest, all16(c));
  const I16 bits = ((I16)shifted - (I16)all16(ROUNDER) + 127) << 23;
  return y * (V16)bits;
}

// x / (1 + 2^power): x times the sigmoid of z, where power is -z times LOG2_E.
inline V16 gated16(V16 x, V16 power) { return x / (power_of_two(min16(power, all16(127.0f))) + 1.0f); }
inline V16 silu16(V16 x) { return gated16(x, x * -LOG2_E); }

}  // namespace baton
