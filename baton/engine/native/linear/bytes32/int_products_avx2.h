// Products of int8 rows and integer weights without VNNI.
//
// 4 bits: vpmaddubsw, whose pairs are at most 2 x 15 x 128, so that 8 of them stay below 2^15: a group of 32 is summed in
// 16 bits and widened once. 8 bits: vpmaddwd on weights and rows widened to 16 bits, each byte of a word by itself.
#pragma once

#include "linear32.h"

namespace baton {
namespace {

constexpr int64_t SHORT_SUM = 32;  // inputs whose 4-bit products fit into 16 bits

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

template <int64_t KIND>
struct IntProducts;

template <>
struct IntProducts<U8> {
  static constexpr int64_t BYTES_OF_X = 2, SLICE_BYTES = 2 * SLICE;

  // Of four inputs and 16 outputs: words of the even ones, then of the odd ones.
  static void unpack(__m256i low, __m256i high, char* to) {
    store32(to, even_bytes(low)), store32(to + 32, even_bytes(high));
    store32(to + 64, odd_bytes(low)), store32(to + 96, odd_bytes(high));
  }

  // acc = before(row, vector) + x [rows] times a slice, both moved behind these inputs.
  template <int NUM_ROWS, class Before>
  __attribute__((always_inline)) static void add(const char*& x, int64_t stride, const char*& w, int64_t inputs,
                                                 Ahead& ahead, Before before, __m256i (&acc)[NUM_ROWS][2]) {
#pragma GCC unroll 8
    for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) acc[m][v] = before(m, v);
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

  // acc += one row times the 64 outputs of a panel, as it comes from memory.
  static void add_row(const uint8_t* w, const char* x, int64_t group, __m256i (&acc)[8]) {
    for (int64_t i = 0; i < group; i += 4, w += 256, x += 8) {
      const __m256i even = four_of(x), odd = four_of(x + 4);
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) {
        const __m256i both = load32(w + 32 * v);
        multiply_add_words(acc[v], even_bytes(both), even), multiply_add_words(acc[v], odd_bytes(both), odd);
      }
    }
  }
};

template <>
struct IntProducts<U4> {
  static constexpr int64_t BYTES_OF_X = 1, SLICE_BYTES = SLICE;

  // Of eight inputs and 16 outputs: bytes of the first four, then of the others.
  static void unpack(__m256i low, __m256i high, char* to) {
    store32(to, low_halves(low)), store32(to + 32, low_halves(high));
    store32(to + 64, high_halves(low)), store32(to + 96, high_halves(high));
  }

  template <int NUM_ROWS, class Before>
  __attribute__((always_inline)) static void add(const char*& x, int64_t stride, const char*& w, int64_t inputs,
                                                 Ahead& ahead, Before before, __m256i (&acc)[NUM_ROWS][2]) {
    __m256i words[NUM_ROWS][2];
    if (inputs == SHORT_SUM) {  // 12 sums are all that the registers hold: `before` is added last
      add_words<NUM_ROWS>(x, stride, w, SHORT_SUM, ahead, words);
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) acc[m][v] = _mm256_add_epi32(before(m, v), widened(words[m][v]));
      return;
    }
#pragma GCC unroll 8
    for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) acc[m][v] = before(m, v);
    for (int64_t i = 0; i < inputs; i += SHORT_SUM) {
      const int64_t now = std::min(SHORT_SUM, inputs - i);
      if (now == SHORT_SUM) add_words<NUM_ROWS>(x, stride, w, SHORT_SUM, ahead, words);
      else add_words<NUM_ROWS>(x, stride, w, now, ahead, words);
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) acc[m][v] = _mm256_add_epi32(acc[m][v], widened(words[m][v]));
    }
  }

  static void add_row(const uint8_t* w, const char* x, int64_t group, __m256i (&acc)[8]) {
    for (int64_t left = group; left > 0; left -= SHORT_SUM, w += 32 * SHORT_SUM, x += SHORT_SUM) {
      if (left >= SHORT_SUM) add_words_of_row(w, x, SHORT_SUM, acc);
      else add_words_of_row(w, x, left, acc);
    }
  }

 private:
  // At most SHORT_SUM inputs, in 16 bits.
  template <int NUM_ROWS>
  __attribute__((always_inline)) static void add_words(const char*& x, int64_t stride, const char*& w, int64_t inputs,
                                                       Ahead& ahead, __m256i (&words)[NUM_ROWS][2]) {
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

  // Of one row, all vectors of an input after the other, as they lie in memory.
  __attribute__((always_inline)) static void add_words_of_row(const uint8_t* w, const char* x, int64_t inputs,
                                                              __m256i (&acc)[8]) {
    __m256i words[8];
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) words[v] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int64_t i = 0; i < inputs; i += 8) {
      const __m256i low = four_of(x + i), high = four_of(x + i + 4);
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) {
        const __m256i both = load32(w + 32 * (i + v));
        multiply_add_bytes(words[v], low_halves(both), low), multiply_add_bytes(words[v], high_halves(both), high);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) acc[v] = _mm256_add_epi32(acc[v], widened(words[v]));
  }
};

}  // namespace
}  // namespace baton
