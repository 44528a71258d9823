// Products of int8 rows and integer weights by an instruction that adds four of them (vpdpbusd, NEON's sdot), and several rows
// by one that multiplies two rows of eight by the weights of two outputs (smmla) where there is one: integer sums are exact,
// so the bits are the same.
#pragma once

#include "linear32.h"

namespace baton {
namespace {

#ifndef BATON_SIGNED_DOT
// acc + the products of four bytes each, w unsigned. As text, as in linear_int64.cpp.
inline __m256i dot_bytes(__m256i acc, __m256i w, __m256i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
}
#endif

template <int64_t KIND>
struct IntProducts {
  static constexpr int64_t BYTES_OF_X = 1, SLICE_BYTES = SLICE;

  // The bytes of U8, q + 128, as the instruction takes them: as they are, or as q.
#ifdef BATON_SIGNED_DOT
  static __m256i factors(__m256i bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)); }
#else
  static __m256i factors(__m256i bytes) { return bytes; }
#endif

  // Of four inputs (U4: of eight, the first four before the others) and 16 outputs: bytes.
  static void unpack(__m256i low, __m256i high, char* to) {
    store32(to, KIND == U4 ? low_halves(low) : factors(low));
    store32(to + 32, KIND == U4 ? low_halves(high) : factors(high));
    if constexpr (KIND == U4) store32(to + 64, high_halves(low)), store32(to + 96, high_halves(high));
  }

  // acc = before(row, vector) + x [rows] times a slice, both moved behind these inputs.
  template <int NUM_ROWS, class Before>
  __attribute__((always_inline)) static void add(const char*& x, int64_t stride, const char*& w, int64_t inputs,
                                                 Ahead& ahead, Before before, __m256i (&acc)[NUM_ROWS][2]) {
#pragma GCC unroll 8
    for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) acc[m][v] = before(m, v);
#ifdef BATON_MATMUL
    if constexpr (NUM_ROWS > 1) return add_squares(x, stride, w, inputs, ahead, acc);
#endif
    for (int64_t i = 0; i < inputs; i += 4, x += 4, w += 64) {
      ahead.fetch();
      const __m256i w0 = load32(w), w1 = load32(w + 32);
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m) {
        const __m256i b = four_of(x + m * stride);
        acc[m][0] = dot_bytes(acc[m][0], w0, b), acc[m][1] = dot_bytes(acc[m][1], w1, b);
      }
    }
  }

  // acc += one row times the 64 outputs of a panel, as it comes from memory.
  static void add_row(const uint8_t* w, const char* x, int64_t group, __m256i (&acc)[8]) {
    constexpr int64_t TURN = KIND == U4 ? 8 : 4;
    for (int64_t i = 0; i < group; i += TURN, w += 256, x += TURN) {
      // Of int8 the processor's own fetching keeps up: 143 to 158 us without this, 153 to 186 with it (2048 x 2048).
      for (int line = 0; KIND == U4 && line < 256; line += 64) __builtin_prefetch(w + OWN_AHEAD + line);
      const __m256i first = four_of(x);
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) {
        const __m256i bytes = load32(w + 32 * v);
        acc[v] = dot_bytes(acc[v], KIND == U4 ? low_halves(bytes) : factors(bytes), first);
        if constexpr (KIND == U4) acc[v] = dot_bytes(acc[v], high_halves(bytes), four_of(x + 4));
      }
    }
  }

#ifdef BATON_MATMUL
 private:
  // acc += x [rows] times a slice, in squares of two rows and two outputs; a last odd row is taken twice.
  template <int NUM_ROWS>
  __attribute__((always_inline)) static void add_squares(const char*& x, int64_t stride, const char*& w, int64_t inputs,
                                                         Ahead& ahead, __m256i (&acc)[NUM_ROWS][2]) {
    constexpr int PAIRS = (NUM_ROWS + 1) / 2;
    int32x4_t squares[PAIRS][8];
    const auto second = [](int pair) { return std::min(2 * pair + 1, NUM_ROWS - 1); };
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; ++p)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) to_squares(acc[2 * p][v], acc[second(p)][v], squares[p] + 4 * v);
    for (int64_t i = 0; i + 8 <= inputs; i += 8, x += 8, w += 128) {
      ahead.fetch(), ahead.fetch();
      multiply_squares<8, NUM_ROWS>(x, stride, w, squares);
    }
    if (inputs % 8) multiply_squares<4, NUM_ROWS>(x, stride, w, squares), x += 4, w += 64;
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; ++p)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) from_squares(squares[p] + 4 * v, acc[2 * p][v], acc[second(p)][v]);
  }

  template <int INPUTS, int NUM_ROWS>
  __attribute__((always_inline)) static void multiply_squares(const char* x, int64_t stride, const char* w,
                                                              int32x4_t (&squares)[(NUM_ROWS + 1) / 2][8]) {
    int8x16_t rows[(NUM_ROWS + 1) / 2];
#pragma GCC unroll 4
    for (int p = 0; p < (NUM_ROWS + 1) / 2; ++p)
      rows[p] = two_rows<INPUTS>(x + 2 * p * stride, x + std::min(2 * p + 1, NUM_ROWS - 1) * stride);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {  // four outputs
      const __m128i none = _mm_setzero_si128(), first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w) + n);
      const __m128i others = INPUTS == 8 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + 64) + n) : none;
      const int8x16_t low = weights_of_two<0>(first, others), high = weights_of_two<1>(first, others);
#pragma GCC unroll 4
      for (int p = 0; p < (NUM_ROWS + 1) / 2; ++p) {
        squares[p][2 * n] = vmmlaq_s32(squares[p][2 * n], rows[p], low);
        squares[p][2 * n + 1] = vmmlaq_s32(squares[p][2 * n + 1], rows[p], high);
      }
    }
  }
#endif
};

}  // namespace
}  // namespace baton
