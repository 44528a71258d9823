// Products of int8 rows and integer weights by an instruction that adds four signed ones (NEON's sdot). U8 is taken as q:
// its bytes with the top bit turned.
#pragma once

#include "linear32.h"

namespace baton {
namespace {

template <int64_t KIND>
struct IntProducts {
  static constexpr int64_t BYTES_OF_X = 1, SLICE_BYTES = SLICE;

  static __m256i as_signed(__m256i bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)); }

  // Of four inputs (U4: of eight, the first four before the others) and 16 outputs: bytes.
  static void unpack(__m256i low, __m256i high, char* to) {
    store32(to, KIND == U4 ? low_halves(low) : as_signed(low));
    store32(to + 32, KIND == U4 ? low_halves(high) : as_signed(high));
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
      for (int line = 0; line < 256; line += 64) __builtin_prefetch(w + OWN_AHEAD + line);
      const __m256i first = four_of(x);
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) {
        const __m256i bytes = load32(w + 32 * v);
        acc[v] = dot_bytes(acc[v], KIND == U4 ? low_halves(bytes) : as_signed(bytes), first);
        if constexpr (KIND == U4) acc[v] = dot_bytes(acc[v], high_halves(bytes), four_of(x + 4));
      }
    }
  }
};

}  // namespace
}  // namespace baton
