// Integer weights times int8 rows: vpdpbusd with the weights as the unsigned side (q + 128, or q + 8 at 4 bits), so
// that the correction is -128 (or -8) times the sum of the row's own integers, known when the row is quantized.
#include "linear.h"

#if defined(BATON_AVX512) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)

namespace baton {
namespace {

constexpr int MAX_WHOLE_ROWS = 3;    // of a tile with groups that takes whole panels: 12 integer and 12 fp32 sums
constexpr int64_t UNPACK_ROWS = 13;  // from here on a 4-bit panel is unpacked once instead of once per tile

// acc += four products of unsigned w and signed x in each of 16 lanes. As text, because gcc 12 moves and spills the
// accumulators around _mm512_dpbusd_epi32: 230 instead of 400 GFLOP/s on a core.
inline void multiply_add(__m512i& acc, __m512i w, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
}

// A tile of NUM_ROWS rows and VECS vectors of outputs, from vector `first` on: integer sums of a group in registers,
// then scaled onto fp32 sums, which stay there too where there are groups. Not inlined, so that the compiler has
// nothing else to keep in registers.
template <int NUM_ROWS, int VECS, bool FOUR_BITS, bool OFFSETS, bool GROUPED>
__attribute__((noinline)) void multiply_tile(const Linear& linear, const uint8_t* values, int64_t panel,
                                             const Rows& rows, int64_t row, int first, Ahead& ahead, float* out) {
  const int64_t num_groups = linear.num_groups(), group = linear.group, stride = rows.stride;
  const int32_t zero = linear.kind == U4 ? -8 : -128;
  const int8_t* x = reinterpret_cast<const int8_t*>(rows.values) + row * stride;
  values += 64 * first;
  __m512 sums[NUM_ROWS][VECS];
#pragma GCC unroll 8
  for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) sums[m][v] = _mm512_setzero_ps();
  for (int64_t g = 0; g < (GROUPED ? num_groups : 1); ++g) {
    __m512i acc[NUM_ROWS][VECS];
#pragma GCC unroll 8
    for (int m = 0; m < NUM_ROWS; ++m) {
      __m512i start = _mm512_set1_epi32(zero * rows.sums[(row + m) * num_groups + g]);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) acc[m][v] = start;
    }
    auto multiply = [&](const __m512i (&w)[VECS], const int8_t* at) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m) {
        int32_t four;
        std::memcpy(&four, at + m * stride, 4);
        __m512i b = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) multiply_add(acc[m][v], w[v], b);
      }
    };
    for (const int8_t* end = x + group; x < end; x += FOUR_BITS ? 8 : 4, values += 4 * PANEL) {
      __m512i w[VECS];
      ahead.fetch();
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) w[v] = _mm512_load_si512(values + 64 * v);
      if constexpr (FOUR_BITS) {
        const __m512i low = _mm512_set1_epi8(15);
        __m512i half[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) half[v] = _mm512_and_si512(w[v], low);
        multiply(half, x);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) half[v] = _mm512_and_si512(_mm512_srli_epi16(w[v], 4), low);
        multiply(half, x + 4);
      } else {
        multiply(w, x);
      }
    }
    const int64_t scale = (panel * linear.num_scales() + g / linear.groups_per_scale) * PANEL + 16 * first;
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      __m512 s = load_scales(linear.scales, linear.scale_kind, scale + 16 * v);
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m) {
        __m512 sx = _mm512_set1_ps(rows.scales[(row + m) * num_groups + g]);
        sums[m][v] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(acc[m][v]), sx), s, sums[m][v]);
      }
      if constexpr (OFFSETS) {
        s = load_scales(linear.offsets, linear.scale_kind, scale + 16 * v);
#pragma GCC unroll 8
        for (int m = 0; m < NUM_ROWS; ++m) {
          int64_t at = (row + m) * num_groups + g;
          sums[m][v] = _mm512_fmadd_ps(_mm512_set1_ps(rows.scales[at] * float(rows.sums[at])), s, sums[m][v]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) _mm512_store_ps(out + m * PANEL + 16 * (first + v), sums[m][v]);
}

// All 64 outputs of a few rows. With groups two sets of sums share the registers: more rows take half a panel a time.
template <int NUM_ROWS, bool FOUR_BITS, bool OFFSETS>
void tile(const Linear& linear, const uint8_t* values, int64_t panel, const Rows& rows, int64_t row, Ahead& ahead,
          void* y) {
  constexpr int VECS = NUM_ROWS > MAX_WHOLE_ROWS ? 2 : 4;
  alignas(64) float out[NUM_ROWS * PANEL];
  if (linear.num_groups() == 1) {
    multiply_tile<NUM_ROWS, 4, FOUR_BITS, OFFSETS, false>(linear, values, panel, rows, row, 0, ahead, out);
  } else {
    for (int first = 0; first < 4; first += VECS)
      multiply_tile<NUM_ROWS, VECS, FOUR_BITS, OFFSETS, true>(linear, values, panel, rows, row, first, ahead, out);
  }
  for (int m = 0; m < NUM_ROWS; ++m) finish_row(linear, panel, rows, row + m, out + m * PANEL, y);
}

template <bool FOUR_BITS, bool OFFSETS>
void tiles(const Linear& linear, const uint8_t* values, int64_t panel, const Rows& rows, Ahead ahead, void* y) {
  // Few rows wait for memory, which whole panels stream better than halves: 8 rows twice as fast.
  const int64_t most = linear.num_groups() > 1 && rows.num_rows < UNPACK_ROWS ? MAX_WHOLE_ROWS : MAX_ROWS;
  const int64_t num_tiles = (rows.num_rows + most - 1) / most;
  // The first tile waits for memory, those behind it find the panel in the cache and fetch the next: 8 rows on a core
  // at 25.7 instead of 18.5 GB/s (int8), 12.4 instead of 10.6 (int4). Many rows of plain sums multiply all the time:
  // there it costs 6 %.
  if (num_tiles == 1 || (num_tiles > 2 && linear.num_groups() == 1)) ahead = {};
  for (int64_t i = 0, row = 0; i < num_tiles; ++i) {
    int64_t next = rows.num_rows * (i + 1) / num_tiles;
    switch (next - row) {
      case 1: tile<1, FOUR_BITS, OFFSETS>(linear, values, panel, rows, row, ahead, y); break;
      case 2: tile<2, FOUR_BITS, OFFSETS>(linear, values, panel, rows, row, ahead, y); break;
      case 3: tile<3, FOUR_BITS, OFFSETS>(linear, values, panel, rows, row, ahead, y); break;
      case 4: tile<4, FOUR_BITS, OFFSETS>(linear, values, panel, rows, row, ahead, y); break;
      case 5: tile<5, FOUR_BITS, OFFSETS>(linear, values, panel, rows, row, ahead, y); break;
      default: tile<6, FOUR_BITS, OFFSETS>(linear, values, panel, rows, row, ahead, y);
    }
    row = next;
  }
}

// U4 to the layout of U8, without the change of zero point.
void unpack(const uint8_t* from, uint8_t* to, int64_t padded_in) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int64_t k = 0; k < padded_in; k += 8, from += 4 * PANEL, to += 8 * PANEL) {
    for (int v = 0; v < 4; ++v) {
      __m512i both = _mm512_loadu_si512(from + 64 * v);
      _mm512_store_si512(to + 64 * v, _mm512_and_si512(both, low));
      _mm512_store_si512(to + 4 * PANEL + 64 * v, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
    }
  }
}

}  // namespace

void int_panel(const Linear& linear, int64_t panel, int64_t next, const Rows& rows, void* y,
               std::vector<char>& memory) {
  const int64_t in = linear.padded_in, num_bytes = PANEL * (linear.kind == U4 ? in / 2 : in);
  const uint8_t* values = linear.values + panel * num_bytes;
  Ahead ahead;
  if (next != panel) ahead = {linear.values + next * num_bytes, linear.values + (next + 1) * num_bytes};
  bool four_bits = linear.kind == U4;
  if (four_bits && rows.num_rows >= UNPACK_ROWS) {
    uint8_t* wide = reinterpret_cast<uint8_t*>(scratch(memory, PANEL * in));
    unpack(values, wide, in);
    values = wide, four_bits = false;
  }
  if (four_bits && linear.offsets) tiles<true, true>(linear, values, panel, rows, ahead, y);
  else if (four_bits) tiles<true, false>(linear, values, panel, rows, ahead, y);
  else if (linear.offsets) tiles<false, true>(linear, values, panel, rows, ahead, y);
  else tiles<false, false>(linear, values, panel, rows, ahead, y);
}

}  // namespace baton

#endif
