// Integer weights times int8 rows without VNNI, to the same bits as linear_int.cpp: integer sums of a group are exact,
// and what is added to the fp32 sums has its order.
//
// 4 bits: vpmaddubsw, whose pairs are at most 2 x 15 x 128, so that 8 of them stay below 2^15: a group of 32 is summed in
// 16 bits and widened once. 8 bits: vpmaddwd on weights and rows widened to 16 bits, each byte of a word by itself.
#include "../common.h"

#ifndef BATON_VNNI_BF16
#include "linear_avx2.h"

namespace baton {
namespace {

constexpr int64_t SHORT_SUM = 32;  // inputs whose 4-bit products fit into 16 bits

inline __m256i load32(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store32(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
inline __m256i four_of(const void* from) {  // bytes, in all lanes
  int32_t four;
  std::memcpy(&four, from, 4);
  return _mm256_set1_epi32(four);
}
inline __m256i low_halves(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
inline __m256i high_halves(__m256i bytes) { return low_halves(_mm256_srli_epi16(bytes, 4)); }
inline __m256i even_bytes(__m256i words) { return _mm256_and_si256(words, _mm256_set1_epi16(255)); }
inline __m256i odd_bytes(__m256i words) { return _mm256_srli_epi16(words, 8); }
// Sums of pairs of products, in 32 bits of words and in 16 of bytes (w unsigned). As text, because gcc 12 adds in another
// order and spills: 113 instead of 131 GOP/s on a core (int8).
inline void multiply_add_words(__m256i& acc, __m256i w, __m256i x) {
  __m256i product;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(product) : "x"(w), "x"(x));
}
inline void multiply_add_bytes(__m256i& acc, __m256i w, __m256i x) {
  __m256i product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(acc), "=&x"(product) : "x"(w), "x"(x));
}
inline __m256i widened(__m256i words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }

// The sum of a group of a row and 8 outputs, scaled onto what is there of the groups before.
inline __m256 scaled(__m256i acc, __m256 sx, __m256 s, __m256 before) {
  return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(acc), sx), s, before);
}

// A slice holds, of four inputs and 16 outputs, bytes (4 bits) or words of the even and then of the odd ones (8 bits).
template <int64_t KIND>
struct Integers {
  static constexpr int64_t SLICE_BYTES = (KIND == U4 ? 1 : 2) * SLICE;
  static int64_t bytes(int64_t inputs) { return inputs * PANEL / (KIND == U4 ? 2 : 1); }

  static void unpack(const uint8_t* from, int64_t inputs, char* to, int64_t slice_bytes) {
    constexpr int64_t TURN = KIND == U4 ? 8 : 4;
    for (int64_t k = 0; k < inputs; k += TURN, from += bytes(TURN), to += TURN * SLICE_BYTES) {
      for (int s = 0; s < 4; ++s) {
        char* at = to + s * slice_bytes;
        const __m256i low = load32(from + 64 * s), high = load32(from + 64 * s + 32);
        store32(at, KIND == U4 ? low_halves(low) : even_bytes(low));
        store32(at + 32, KIND == U4 ? low_halves(high) : even_bytes(high));
        store32(at + 64, KIND == U4 ? high_halves(low) : odd_bytes(low));
        store32(at + 96, KIND == U4 ? high_halves(high) : odd_bytes(high));
      }
    }
  }

  template <int NUM_ROWS>
  __attribute__((noinline)) static void tile(const Slice& slice, int64_t row, float* sums, Ahead& shared) {
    const Linear& linear = slice.linear;
    const Rows& rows = slice.rows;
    const int64_t stride = rows.stride, num_groups = linear.num_groups(), group = linear.group;
    const char *x = rows.values + row * stride + slice.k0 * (KIND == U4 ? 1 : 2), *w = slice.values;
    const int32_t* row_starts = rows.starts + row * num_groups;
    const float* row_scales = rows.scales + row * num_groups;
    Ahead ahead = shared;
    int64_t g = slice.group, scale = slice.scale, scale_left = slice.scale_left;
    for (int64_t k = slice.k0, end; k < slice.k1; k = end, ++g) {
      end = std::min(slice.k1, (g + 1) * group);
      const int32_t* starts = row_starts + g;
      __m256i acc[NUM_ROWS][2];
      if (k > g * group) {
#pragma GCC unroll 8
        for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
          for (int v = 0; v < 2; ++v) acc[m][v] = load32(sums + m * PANEL + 8 * v);
      } else if (KIND == U8 || group != SHORT_SUM) {
#pragma GCC unroll 8
        for (int m = 0; m < NUM_ROWS; ++m) acc[m][0] = acc[m][1] = four_of(starts + m * num_groups);
      }
      if constexpr (KIND == U8) {
        multiply_words<NUM_ROWS>(x, stride, w, end - k, ahead, acc);
      } else if (group == SHORT_SUM) {
        __m256i words[NUM_ROWS][2];
        multiply_bytes<NUM_ROWS>(x, stride, w, SHORT_SUM, ahead, words);
#pragma GCC unroll 8
        for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
          for (int v = 0; v < 2; ++v)
            acc[m][v] = _mm256_add_epi32(four_of(starts + m * num_groups), widened(words[m][v]));
      } else {
        for (int64_t i = k; i < end; i += SHORT_SUM) {
          const int64_t inputs = std::min(SHORT_SUM, end - i);
          __m256i words[NUM_ROWS][2];
          if (inputs == SHORT_SUM) multiply_bytes<NUM_ROWS>(x, stride, w, SHORT_SUM, ahead, words);
          else multiply_bytes<NUM_ROWS>(x, stride, w, inputs, ahead, words);
#pragma GCC unroll 8
          for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) acc[m][v] = _mm256_add_epi32(acc[m][v], widened(words[m][v]));
        }
      }
      if (end < (g + 1) * group) {
#pragma GCC unroll 8
        for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
          for (int v = 0; v < 2; ++v) store32(sums + m * PANEL + 8 * v, acc[m][v]);
        break;
      }
      const __m256 s0 = load8_scales(linear.scales, linear.scale_kind, scale);
      const __m256 s1 = load8_scales(linear.scales, linear.scale_kind, scale + 8);
      const __m256 not_first = _mm256_castsi256_ps(_mm256_set1_epi32(g ? -1 : 0));
      const float* scales = row_scales + g;
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m) {
        float* at = sums + m * PANEL;
        const __m256 sx = _mm256_broadcast_ss(scales + m * num_groups);
        const __m256 low = _mm256_and_ps(_mm256_loadu_ps(at), not_first);
        const __m256 high = _mm256_and_ps(_mm256_loadu_ps(at + 8), not_first);
        _mm256_storeu_ps(at, scaled(acc[m][0], sx, s0, low));
        _mm256_storeu_ps(at + 8, scaled(acc[m][1], sx, s1, high));
      }
      if (linear.offsets) add_offsets<NUM_ROWS>(slice, row, g, scale, sums);
      if (--scale_left == 0) scale += PANEL, scale_left = linear.groups_per_scale;
    }
    shared = ahead;
  }

  template <int NUM_ROWS>
  __attribute__((always_inline)) static void multiply_words(const char*& x, int64_t stride, const char*& w,
                                                            int64_t inputs, Ahead& ahead, __m256i (&acc)[NUM_ROWS][2]) {
    for (int64_t i = 0; i < inputs; i += 4, x += 8, w += 128) {
      ahead.fetch();
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part) {
        const __m256i w0 = load32(w + 64 * part), w1 = load32(w + 64 * part + 32);
#pragma GCC unroll 8
        for (int m = 0; m < NUM_ROWS; ++m) {
          const __m256i b = four_of(x + m * stride + 4 * part);
          multiply_add_words(acc[m][0], w0, b), multiply_add_words(acc[m][1], w1, b);
        }
      }
    }
  }

  // At most SHORT_SUM inputs.
  template <int NUM_ROWS>
  __attribute__((always_inline)) static void multiply_bytes(const char*& x, int64_t stride, const char*& w,
                                                            int64_t inputs, Ahead& ahead, __m256i (&words)[NUM_ROWS][2]) {
#pragma GCC unroll 8
    for (int m = 0; m < NUM_ROWS; ++m) words[m][0] = words[m][1] = _mm256_setzero_si256();
    ahead.fetch(), ahead.fetch(), ahead.fetch(), ahead.fetch();
#pragma GCC unroll 8
    for (int64_t i = 0; i < inputs; i += 4) {
      const __m256i w0 = load32(w + 16 * i), w1 = load32(w + 16 * i + 32);
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m) {
        const __m256i b = four_of(x + m * stride + i);
        multiply_add_bytes(words[m][0], w0, b), multiply_add_bytes(words[m][1], w1, b);
      }
    }
    x += inputs, w += 16 * inputs;
  }

  template <int NUM_ROWS>
  static void add_offsets(const Slice& slice, int64_t row, int64_t g, int64_t scale, float* sums) {
    for (int v = 0; v < 2; ++v) {
      const __m256 offset = load8_scales(slice.linear.offsets, slice.linear.scale_kind, scale + 8 * v);
      for (int m = 0; m < NUM_ROWS; ++m) {
        const __m256 shift = _mm256_broadcast_ss(slice.rows.shifts + (row + m) * slice.linear.num_groups() + g);
        float* at = sums + m * PANEL + 8 * v;
        _mm256_storeu_ps(at, _mm256_fmadd_ps(shift, offset, _mm256_loadu_ps(at)));
      }
    }
  }
};

// One row streams the panel as it comes from memory; the integer sums of a group and its 64 outputs.
void add_row_words(const uint8_t* w, const char* x, int64_t group, __m256i (&acc)[8]) {
  for (int64_t i = 0; i < group; i += 4, w += 256, x += 8) {
    for (int line = 0; line < 256; line += 64) __builtin_prefetch(w + OWN_AHEAD + line);
    const __m256i even = four_of(x), odd = four_of(x + 4);
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      const __m256i both = load32(w + 32 * v);
      multiply_add_words(acc[v], even_bytes(both), even), multiply_add_words(acc[v], odd_bytes(both), odd);
    }
  }
}

void add_row_bytes(const uint8_t* w, const char* x, int64_t group, __m256i (&acc)[8]) {
  for (int64_t begin = 0; begin < group; begin += SHORT_SUM) {
    const int64_t inputs = std::min(SHORT_SUM, group - begin);
#pragma GCC unroll 2
    for (int first = 0; first < 8; first += 4) {
      __m256i words[4];
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) words[v] = _mm256_setzero_si256();
      for (int64_t i = 0; i < inputs; i += 8) {
        const uint8_t* at = w + 32 * i + 32 * first;
        __builtin_prefetch(at + OWN_AHEAD), __builtin_prefetch(at + OWN_AHEAD + 64);
        const __m256i low = four_of(x + i), high = four_of(x + i + 4);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
          const __m256i both = load32(at + 32 * v);
          multiply_add_bytes(words[v], low_halves(both), low), multiply_add_bytes(words[v], high_halves(both), high);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) acc[first + v] = _mm256_add_epi32(acc[first + v], widened(words[v]));
    }
    w += 32 * inputs, x += inputs;
  }
}

template <int64_t KIND>
void one_row(const Linear& linear, int64_t panel, const Rows& rows, void* y) {
  const int64_t group = linear.group, step = Integers<KIND>::bytes(group);
  const uint8_t* w = linear.values + panel * Integers<KIND>::bytes(linear.padded_in);
  const char* x = rows.values;
  float sums[PANEL] = {};
  int64_t scale = panel * linear.num_scales() * PANEL, sums_left = linear.groups_per_scale;
  for (int64_t g = 0; g < linear.num_groups(); ++g, w += step, x += group * (KIND == U4 ? 1 : 2)) {
    __m256i acc[8];
    for (int v = 0; v < 8; ++v) acc[v] = four_of(rows.starts + g);
    if constexpr (KIND == U4) add_row_bytes(w, x, group, acc);
    else add_row_words(w, x, group, acc);
    const __m256 sx = _mm256_broadcast_ss(rows.scales + g), shift = _mm256_broadcast_ss(rows.shifts + g);
    for (int v = 0; v < 8; ++v) {
      const __m256 s = load8_scales(linear.scales, linear.scale_kind, scale + 8 * v);
      __m256 sum = scaled(acc[v], sx, s, _mm256_loadu_ps(sums + 8 * v));
      if (linear.offsets)
        sum = _mm256_fmadd_ps(shift, load8_scales(linear.offsets, linear.scale_kind, scale + 8 * v), sum);
      _mm256_storeu_ps(sums + 8 * v, sum);
    }
    if (--sums_left == 0) scale += PANEL, sums_left = linear.groups_per_scale;
  }
  finish_row(linear, panel, rows, 0, sums, y);
}

template <int64_t KIND>
void apply(const Linear& linear, int64_t panel, int64_t next, const Rows& rows, void* y, std::vector<char>& memory) {
  if (rows.num_rows == 1) one_row<KIND>(linear, panel, rows, y);
  else in_chunks<Integers<KIND>>(linear, panel, next, rows, y, memory);
}

}  // namespace

void int_panel(const Linear& linear, int64_t panel, int64_t next, const Rows& rows, void* y,
               std::vector<char>& memory) {
  if (linear.kind == U4) apply<U4>(linear, panel, next, rows, y, memory);
  else apply<U8>(linear, panel, next, rows, y, memory);
}

}  // namespace baton

#endif
