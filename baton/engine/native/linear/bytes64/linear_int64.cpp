// Integer weights times int8 rows: vpdpbusd with the weights as the unsigned side (q + 128, or q + 8 at 4 bits), so
// that the correction is -128 (or -8) times the sum of the row's own integers, known when the row is quantized.
#include "../../common.h"

#ifdef BATON_VNNI_BF16
#include "linear64.h"

namespace baton {
namespace {

constexpr int MAX_WHOLE_ROWS = 3;    // of a tile with groups that takes whole panels: 12 integer and 12 fp32 sums
constexpr int64_t UNPACK_ROWS = 13;  // from here on a 4-bit panel is unpacked once instead of once per tile

// acc += four products of unsigned w and signed x in each of 16 lanes. As text, because gcc 12 moves and spills the
// accumulators around _mm512_dpbusd_epi32: 230 instead of 400 GFLOP/s on a core.
inline void multiply_add(__m512i& acc, __m512i w, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
}

// A panel in memory: as linear.h draws it, or unpacked to 8 bits with outputs 0..31 before outputs 32..63, so that what
// takes half a panel at a time reads it from end to end (32 rows: 555 instead of 525 GFLOP/s on a core).
enum Form { EIGHT_BITS, FOUR_BITS, IN_HALVES };

// A tile of NUM_ROWS rows and VECS vectors of outputs, from vector `first` on: integer sums of a group in registers,
// then scaled onto fp32 sums, which stay there too where there are groups. Not inlined, so that the compiler has
// nothing else to keep in registers.
template <int NUM_ROWS, int VECS, Form FORM, bool OFFSETS, bool GROUPED>
__attribute__((noinline)) void multiply_tile(const Linear& linear, const uint8_t* values, int64_t panel,
                                             const Rows& rows, int64_t row, int first, Ahead& shared, bool adds,
                                             float* out) {
  constexpr int TURN = GROUPED || FORM == FOUR_BITS ? 8 : 4;    // inputs
  constexpr int64_t WIDTH = FORM == IN_HALVES ? PANEL / 2 : PANEL;  // outputs side by side
  const int64_t num_groups = GROUPED ? linear.num_groups : 1, stride = rows.stride, num_turns = linear.group / TURN;
  const int8_t* x = reinterpret_cast<const int8_t*>(rows.values) + row * stride;
  const int64_t row_groups = rows.num_groups, at = row * row_groups;
  int64_t scale = panel * linear.num_scales * PANEL + 16 * first, sums_left = linear.groups_per_scale;
  Ahead ahead = shared;  // in registers
  values += FORM == IN_HALVES ? 16 * first * linear.padded_in : 64 * first;
  __m512 sums[NUM_ROWS][VECS];
#pragma GCC unroll 8
  for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) sums[m][v] = _mm512_setzero_ps();
  for (int64_t g = at; g < at + num_groups; ++g) {
    __m512i acc[NUM_ROWS][VECS];
#pragma GCC unroll 8
    for (int m = 0; m < NUM_ROWS; ++m) {
      const __m512i start = _mm512_set1_epi32(rows.starts[g + m * row_groups]);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) acc[m][v] = start;
    }
    auto multiply = [&](const __m512i (&w)[VECS], const int8_t* from) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m) {
        const __m512i b = four_of(from + m * stride);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) multiply_add(acc[m][v], w[v], b);
      }
    };
    for (int64_t turn = 0; turn < num_turns; ++turn, x += TURN, values += (FORM == FOUR_BITS ? 4 : TURN) * WIDTH) {
      __m512i w[VECS], half[VECS];
      ahead.fetch();
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) w[v] = _mm512_load_si512(values + 64 * v);
      if constexpr (FORM == FOUR_BITS) {
        const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) half[v] = _mm512_and_si512(w[v], low);
        multiply(half, x);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) half[v] = _mm512_and_si512(_mm512_srli_epi16(w[v], 4), low);
        multiply(half, x + 4);
      } else {
        multiply(w, x);
        if constexpr (TURN == 8) {
#pragma GCC unroll 4
          for (int v = 0; v < VECS; ++v) half[v] = _mm512_load_si512(values + 4 * WIDTH + 64 * v);
          multiply(half, x + 4);
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      __m512 s = load_scales(linear.scales, linear.scale_kind, scale + 16 * v);
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m) {
        __m512 sx = _mm512_set1_ps(rows.scales[g + m * row_groups]);
        sums[m][v] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(acc[m][v]), sx), s, sums[m][v]);
      }
      if constexpr (OFFSETS) {
        s = load_scales(linear.offsets, linear.scale_kind, scale + 16 * v);
#pragma GCC unroll 8
        for (int m = 0; m < NUM_ROWS; ++m)
          sums[m][v] = _mm512_fmadd_ps(_mm512_set1_ps(rows.shifts[g + m * row_groups]), s, sums[m][v]);
      }
    }
    if (--sums_left == 0) scale += PANEL, sums_left = linear.groups_per_scale;
  }
  shared = ahead;
#pragma GCC unroll 8
  for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      float* at = out + m * PANEL + 16 * (first + v);
      _mm512_store_ps(at, adds ? _mm512_add_ps(sums[m][v], _mm512_load_ps(at)) : sums[m][v]);
    }
}

// All 64 outputs of a few rows. With groups two sets of sums share the registers: more rows take half a panel a time.
template <int NUM_ROWS, Form FORM, bool OFFSETS>
void tile(const Linear& linear, const uint8_t* values, int64_t panel, const Rows& rows, int64_t row, Ahead& ahead,
          void* y) {
  constexpr int VECS = NUM_ROWS > MAX_WHOLE_ROWS || FORM == IN_HALVES ? 2 : 4;
  alignas(64) float own[NUM_ROWS * PANEL];
  const bool plain = linear.is_plain_leaf(), adds = plain && linear.y_kind == ADDED_SUMS;
  float* out = plain ? static_cast<float*>(y) + row * PANEL : own;
  if (FORM != IN_HALVES && linear.num_groups == 1) {
    multiply_tile<NUM_ROWS, 4, FORM, OFFSETS, false>(linear, values, panel, rows, row, 0, ahead, adds, out);
  } else {
    for (int first = 0; first < 4; first += VECS)
      multiply_tile<NUM_ROWS, VECS, FORM, OFFSETS, true>(linear, values, panel, rows, row, first, ahead, adds, out);
  }
  for (int m = 0; !plain && m < NUM_ROWS; ++m) finish_row(linear, panel, rows, row + m, out + m * PANEL, y);
}

template <Form FORM, bool OFFSETS>
void tiles(const Linear& linear, const uint8_t* values, int64_t panel, const Rows& rows, Ahead ahead, void* y) {
  // Few rows wait for memory, which whole panels stream better than halves: 8 rows twice as fast.
  const int64_t most = linear.num_groups > 1 && rows.num_rows < UNPACK_ROWS ? MAX_WHOLE_ROWS : MAX_ROWS;
  const int64_t num_tiles = (rows.num_rows + most - 1) / most;
  // The first tile waits for memory, those behind it find the panel in the cache and fetch the next: 8 rows on a core
  // at 25.7 instead of 18.5 GB/s (int8), 12.4 instead of 10.6 (int4), 32 rows at 815 instead of 680 GFLOP/s (int8).
  ahead.step = FORM == FOUR_BITS || num_tiles == 2 ? 128 : 64;
  if (num_tiles == 1) ahead = {};
  // Of fewer the processor's own fetching keeps up: int4 in groups of 32, one row in 92 to 104 us, 111 to 123 with this.
  if (num_tiles == 1 && rows.num_rows > 3) {
    const uint8_t* from = values + OWN_AHEAD;
    ahead = {from, from + PANEL * linear.padded_in / (FORM == FOUR_BITS ? 2 : 1), 256};
  }
  in_row_tiles(0, rows.num_rows, num_tiles, [&](int64_t row, auto count) {
    tile<decltype(count)::value, FORM, OFFSETS>(linear, values, panel, rows, row, ahead, y);
  });
}

// U4 to 8 bits, without the change of zero point.
void unpack(const uint8_t* from, uint8_t* to, int64_t padded_in, bool in_halves) {
  const __m512i low = _mm512_set1_epi8(15);
  const int64_t width = in_halves ? PANEL / 2 : PANEL;
  for (int64_t k = 0; k < padded_in; k += 8, from += 4 * PANEL, to += 8 * width) {
    for (int v = 0; v < 4; ++v) {
      __m512i both = _mm512_loadu_si512(from + 64 * v);
      uint8_t* at = to + (in_halves && v > 1 ? padded_in * width + 64 * (v - 2) : 64 * v);
      _mm512_store_si512(at, _mm512_and_si512(both, low));
      _mm512_store_si512(at + 4 * width, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
    }
  }
}

}  // namespace

void int_panel(const Linear& linear, int64_t panel, const uint8_t* next, const Rows& rows, void* y, Scratch& memory) {
  const int64_t in = linear.padded_in, num_bytes = panel_bytes(linear, in);
  const uint8_t* values = linear.values + panel * num_bytes;
  Ahead ahead;
  if (next) ahead = {next, next + num_bytes};
  auto multiply = [&](auto form) {
    if (linear.offsets) tiles<form(), true>(linear, values, panel, rows, ahead, y);
    else tiles<form(), false>(linear, values, panel, rows, ahead, y);
  };
  using Whole = std::integral_constant<Form, EIGHT_BITS>;
#ifdef BATON_AMX
  const bool by_tiles = rows.num_rows >= MIN_TILE_ROWS;
  if (linear.kind == U8 && by_tiles) return int_tiles(linear, values, panel, rows, y);
#else
  constexpr bool by_tiles = false;
#endif
  if (linear.kind == U8) return multiply(Whole{});
  if (rows.num_rows < UNPACK_ROWS) return multiply(std::integral_constant<Form, FOUR_BITS>{});
  const bool in_halves = linear.num_groups > 1 && !by_tiles;
  uint8_t* wide = reinterpret_cast<uint8_t*>(scratch(memory, PANEL * in));
  unpack(values, wide, in, in_halves);
  values = wide;
#ifdef BATON_AMX
  if (by_tiles) return int_tiles(linear, values, panel, rows, y);
#endif
  if (in_halves) multiply(std::integral_constant<Form, IN_HALVES>{});
  else multiply(Whole{});
}

}  // namespace baton

#endif
