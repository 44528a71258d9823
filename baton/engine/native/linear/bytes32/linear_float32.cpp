// Floating-point weights in vectors of 32 bytes: bf16 and e4m3 are widened to fp32 (exactly), products are added by fma. One sum
// per output that takes the inputs in order, as linear_float64.cpp adds fp32 (the same bits).
#include "../../common.h"

#ifndef BATON_VNNI_BF16
#include "linear32.h"

namespace baton {
namespace {

inline __m256 even_bf16(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd_bf16(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000))));
}

// Of fp16 whose bits are those of an e4m3, 7 places further left (its exponent comes out 8 too small).
inline __m256 wide_e4m3(__m128i halves) { return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0f)); }
inline __m256i half_e4m3(__m256i sign, __m256i magnitude) {
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f << 7));
  return _mm256_or_si256(_mm256_or_si256(sign, magnitude), _mm256_and_si256(nan, _mm256_set1_epi16(0x7fff)));
}

// Of 16 outputs: the even inputs of each, then the odd ones.
inline void widen_e4m3(__m256i pairs, __m256 (&wide)[4]) {
  const __m256i sign = _mm256_set1_epi16(int16_t(0x8000)), magnitude = _mm256_set1_epi16(0x7f << 7);
  const __m256i even = half_e4m3(_mm256_and_si256(_mm256_slli_epi16(pairs, 8), sign),
                                 _mm256_and_si256(_mm256_slli_epi16(pairs, 7), magnitude));
  const __m256i odd = half_e4m3(_mm256_and_si256(pairs, sign), _mm256_and_si256(_mm256_srli_epi16(pairs, 1), magnitude));
  wide[0] = wide_e4m3(_mm256_castsi256_si128(even)), wide[1] = wide_e4m3(_mm256_extracti128_si256(even, 1));
  wide[2] = wide_e4m3(_mm256_castsi256_si128(odd)), wide[3] = wide_e4m3(_mm256_extracti128_si256(odd, 1));
}


// A line of each row of the next tile, into the first cache: rows are too short for the processor to see them coming.
template <int NUM_ROWS>
inline void fetch_rows(const float* x, int64_t stride) {
#pragma GCC unroll 8
  for (int m = 0; m < NUM_ROWS; ++m) __builtin_prefetch(x + m * stride);
}

// Whether bf16 is widened as it is multiplied: by two tiles at most, since to put it down costs as much as two rows, and of
// four rows at most, which leave registers for it (8 rows at 93 instead of 79 GFLOP/s on a core, 12 at 73 instead of 90).
inline bool as_stored(int64_t num_rows) { return num_rows <= 4 || num_rows == 7 || num_rows == 8; }

// A slice holds fp32 [inputs][16], or is what is STORED.
template <int64_t KIND, bool STORED = false>
struct Floats {
  static constexpr bool AS_STORED = STORED;
  static constexpr int64_t SLICE_BYTES = 4 * SLICE, TURN = KIND == W_F32 ? 1 : 2;
  static int64_t bytes(int64_t inputs) { return inputs * PANEL * (KIND == W_F32 ? 4 : KIND == W_BF16 ? 2 : 1); }

  static void unpack(const uint8_t* from, int64_t inputs, char* to) {
    for (int64_t k = 0; k < inputs; k += TURN, from += bytes(TURN), to += TURN * SLICE_BYTES) {
      float* even = reinterpret_cast<float*>(to);
      if constexpr (KIND == W_E4M3) {
        __m256 wide[4];
        widen_e4m3(load32(from), wide);
        for (int v = 0; v < 4; ++v) _mm256_store_ps(even + 8 * v, wide[v]);
      } else {
        const __m256i low = load32(from), high = load32(from + 32);
        if constexpr (KIND == W_F32) {
          _mm256_store_ps(even, _mm256_castsi256_ps(low)), _mm256_store_ps(even + 8, _mm256_castsi256_ps(high));
        } else {
          _mm256_store_ps(even, even_bf16(low)), _mm256_store_ps(even + 8, even_bf16(high));
          _mm256_store_ps(even + 16, odd_bf16(low)), _mm256_store_ps(even + 24, odd_bf16(high));
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
    const char* w = slice.values;
    Ahead ahead = shared;
    fetch_rows<NUM_ROWS>(sums + NUM_ROWS * PANEL, PANEL);
    int64_t g = slice.group, scale = slice.scale, scale_left = slice.scale_left;
    int64_t leaf = slice.leaf, leaf_left = slice.leaf_left;
    for (int64_t k = slice.k0, end; k < slice.k1; k = end, ++g) {
      end = std::min(slice.k1, (g + 1) * linear.group);
      const bool goes_on = k > g * linear.group;
      __m256 acc[NUM_ROWS][2];
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
          acc[m][v] = goes_on ? _mm256_loadu_ps(sums + m * PANEL + 8 * v) : _mm256_setzero_ps();
      auto multiply = [&](int64_t i, bool is_odd) __attribute__((always_inline)) {
        __m256 w0, w1;
        if constexpr (STORED) {
          const char* at = w + bytes(i - is_odd);
          w0 = is_odd ? odd_bf16(load32(at)) : even_bf16(load32(at));
          w1 = is_odd ? odd_bf16(load32(at + 32)) : even_bf16(load32(at + 32));
        } else {
          const float* at = reinterpret_cast<const float*>(w) + SLICE * i;
          w0 = _mm256_load_ps(at), w1 = _mm256_load_ps(at + 8);
        }
#pragma GCC unroll 8
        for (int m = 0; m < NUM_ROWS; ++m) {
          const __m256 b = _mm256_broadcast_ss(x + m * stride + i);
          acc[m][0] = _mm256_fmadd_ps(w0, b, acc[m][0]), acc[m][1] = _mm256_fmadd_ps(w1, b, acc[m][1]);
        }
      };
      const int64_t num_inputs = end - k;
      int64_t i = 0;
      for (; i + LINE_INPUTS <= num_inputs; i += LINE_INPUTS) {
        fetch_rows<NUM_ROWS>(x + NUM_ROWS * stride + i, stride);
#pragma GCC unroll 1
        for (int64_t j = i; j < i + LINE_INPUTS; j += 2) ahead.fetch(), multiply(j, false), multiply(j + 1, true);
      }
      for (; i < num_inputs; ++i) multiply(i, i % 2);
      x += num_inputs, w += STORED ? bytes(num_inputs) : num_inputs * SLICE_BYTES;
      if constexpr (GROUPED) {
        if (end == (g + 1) * linear.group) {
          for (int v = 0; v < 2; ++v) {
            const __m256 s = load8_scales(linear.scales, linear.scale_kind, scale + 8 * v);
#pragma GCC unroll 8
            for (int m = 0; m < NUM_ROWS; ++m) {
              const __m256 sx = _mm256_broadcast_ss(slice.rows.scales + (row + m) * slice.rows.num_groups + g);
              const __m256 before = leaf_left < slice.leaf_groups ? _mm256_loadu_ps(sums + m * PANEL + 8 * v) : _mm256_setzero_ps();
              acc[m][v] = _mm256_fmadd_ps(_mm256_mul_ps(acc[m][v], sx), s, before);
            }
          }
          if (--scale_left == 0) scale += PANEL, scale_left = linear.groups_per_scale;
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) _mm256_storeu_ps(sums + m * PANEL + 8 * v, acc[m][v]);
      if (end == (g + 1) * linear.group && --leaf_left == 0)
        sums = next_leaf<NUM_ROWS, 2>(sums, slice.plane, leaf++), leaf_left = slice.leaf_groups;
    }
    shared = ahead;
  }
};

#ifdef BATON_BF16_FMA
// Two fp32 that are bf16, in all lanes.
inline __m256i bf16_pair(const float* x) {
  uint32_t bits[2];
  std::memcpy(bits, x, 8);
  return _mm256_set1_epi32(int32_t(bits[0] >> 16 | (bits[1] & 0xffff0000)));
}
#endif

// One row streams the panel as it comes from memory: inputs [k, end) of its 64 sums.
template <int64_t KIND>
void add_row(const uint8_t* w, const float* x, int64_t num_inputs, __m256 (&sums)[8]) {
  constexpr int64_t TURN = Floats<KIND>::TURN;
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) sums[v] = _mm256_setzero_ps();
  for (int64_t k = 0; k < num_inputs; k += TURN, w += Floats<KIND>::bytes(TURN)) {
#ifdef BATON_BF16_FMA
    if constexpr (KIND == W_BF16) {
      const __m256i both = bf16_pair(x + k);
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) sums[v] = fmadd_bf16_pairs(load32(w + 32 * v), both, sums[v]);
      continue;
    }
#endif
    const __m256 even = _mm256_broadcast_ss(x + k);
    [[maybe_unused]] __m256 odd;
    if constexpr (KIND != W_F32) odd = _mm256_broadcast_ss(x + k + 1);
    if constexpr (KIND == W_E4M3) {
#pragma GCC unroll 4
      for (int v = 0; v < 8; v += 2) {
        __m256 wide[4];
        widen_e4m3(load32(w + 16 * v), wide);
        sums[v] = _mm256_fmadd_ps(wide[0], even, sums[v]), sums[v + 1] = _mm256_fmadd_ps(wide[1], even, sums[v + 1]);
        sums[v] = _mm256_fmadd_ps(wide[2], odd, sums[v]), sums[v + 1] = _mm256_fmadd_ps(wide[3], odd, sums[v + 1]);
      }
    } else {
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
  }
}

template <int64_t KIND>
void one_row(const Linear& linear, int64_t panel, const Rows& rows, void* y) {
  const uint8_t* w = linear.values + panel * Floats<KIND>::bytes(linear.padded_in);
  const float* x = reinterpret_cast<const float*>(rows.values);
  float planes[MAX_PLANES * PANEL], *last = planes;
  const int64_t leaf_groups = linear.num_groups / linear.num_leaves;
  int64_t leaf = 0, leaf_left = leaf_groups;
  for (int64_t g = 0; g < linear.num_groups; ++g) {
    __m256 sums[8];
    add_row<KIND>(w + Floats<KIND>::bytes(g * linear.group), x + g * linear.group, linear.group, sums);
    if constexpr (KIND == W_E4M3) {
      const int64_t scale = (panel * linear.num_scales + g / linear.groups_per_scale) * PANEL;
      const __m256 sx = _mm256_broadcast_ss(rows.scales + g);
      for (int v = 0; v < 8; ++v)
        sums[v] = _mm256_fmadd_ps(_mm256_mul_ps(sums[v], sx), load8_scales(linear.scales, linear.scale_kind, scale + 8 * v),
                                  leaf_left < leaf_groups ? _mm256_loadu_ps(last + 8 * v) : _mm256_setzero_ps());
    }
    for (int v = 0; v < 8; ++v) _mm256_storeu_ps(last + 8 * v, sums[v]);
    if (--leaf_left == 0) last = next_leaf<1, 8>(last, PANEL, leaf++), leaf_left = leaf_groups;
  }
  finish_row(linear, panel, rows, 0, planes, y);
}

template <int64_t KIND>
void apply(const Linear& linear, int64_t panel, const uint8_t* next, const Rows& rows, void* y, Scratch& memory) {
  if (rows.num_rows == 1) one_row<KIND>(linear, panel, rows, y);
  else if (KIND == W_BF16 && as_stored(rows.num_rows))
    in_chunks<Floats<KIND, KIND == W_BF16>>(linear, panel, next, rows, y, memory);
  else in_chunks<Floats<KIND>>(linear, panel, next, rows, y, memory);
}

}  // namespace

void float_panel(const Linear& linear, int64_t panel, const uint8_t* next, const Rows& rows, void* y, Scratch& memory) {
#ifdef BATON_AVX512
  if (linear.kind != W_E4M3 && rows.num_rows > 1) return fma_panel(linear, panel, next, rows, y, memory);
#endif
  if (linear.kind == W_E4M3) apply<W_E4M3>(linear, panel, next, rows, y, memory);
  else if (linear.kind == W_BF16) apply<W_BF16>(linear, panel, next, rows, y, memory);
  else apply<W_F32>(linear, panel, next, rows, y, memory);
}

}  // namespace baton

#endif
