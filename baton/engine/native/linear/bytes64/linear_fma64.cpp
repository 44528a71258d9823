// Several rows times bf16 or fp32 weights in vectors of 64 bytes where there are no products of bf16 pairs: bf16 is widened
// to fp32 in registers, products are added by fma, in the order of linear_float32.cpp (the same bits). Tiles of up to 6 rows and
// all 64 outputs of a panel, so that the multipliers, not what feeds them, are the limit.
#include "../../common.h"

#if defined(BATON_AVX512) && !defined(BATON_VNNI_BF16)
#include "../bytes32/linear32.h"

namespace baton {
namespace {

constexpr int64_t CHUNK_BYTES = 64 << 10;  // of a panel, which with the rows' chunks stays in the second cache

// acc [rows][64], put down at `sums`, += the rows' inputs times a chunk as it is stored.
template <int NUM_ROWS, int64_t KIND>
__attribute__((noinline)) void tile(const uint8_t* w, const float* x, int64_t stride, int64_t num_inputs, bool goes_on,
                                    Ahead& shared, float* sums) {
  constexpr int64_t TURN = KIND == W_F32 ? 1 : 2;
  const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000));
  Ahead ahead = shared;
  __m512 acc[NUM_ROWS][4];
#pragma GCC unroll 8
  for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) acc[m][v] = goes_on ? _mm512_loadu_ps(sums + m * PANEL + 16 * v) : _mm512_setzero_ps();
  for (int64_t line = 0; line < num_inputs; line += LINE_INPUTS) {
    // A line of each row of the next tile: rows are too short for the processor to see them coming.
#pragma GCC unroll 8
    for (int m = 0; m < NUM_ROWS; ++m) __builtin_prefetch(x + (NUM_ROWS + m) * stride + line);
    const int64_t end = std::min(line + LINE_INPUTS, num_inputs);
    for (int64_t k = line; k < end; k += TURN, w += 256) {
      ahead.fetch();
#pragma GCC unroll 2
      for (int64_t i = 0; i < TURN; ++i) {
        __m512 weights[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
          const __m512i stored = _mm512_loadu_si512(w + 64 * v);
          if constexpr (KIND == W_F32) weights[v] = _mm512_castsi512_ps(stored);
          else weights[v] = _mm512_castsi512_ps(i ? _mm512_and_si512(stored, upper) : _mm512_slli_epi32(stored, 16));
        }
#pragma GCC unroll 8
        for (int m = 0; m < NUM_ROWS; ++m) {
          const __m512 b = _mm512_set1_ps(x[m * stride + k + i]);
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) acc[m][v] = _mm512_fmadd_ps(weights[v], b, acc[m][v]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) _mm512_storeu_ps(sums + m * PANEL + 16 * v, acc[m][v]);
  shared = ahead;
}

// Inputs [k0, k1) of a leaf and a panel, which is added to those before it where the leaf ends there.
template <int64_t KIND>
void tiles(const Rows& rows, const uint8_t* w, int64_t k0, int64_t k1, int64_t leaf_in, Ahead& ahead, float* planes) {
  const int64_t num_tiles = (rows.num_rows + MAX_ROWS - 1) / MAX_ROWS, plane = rows.num_rows * PANEL, leaf = k0 / leaf_in;
  const bool goes_on = k0 % leaf_in, ends = k1 % leaf_in == 0;
  in_row_tiles(0, rows.num_rows, num_tiles, [&](int64_t row, auto count) {
    constexpr int NUM_ROWS = decltype(count)::value;
    const float* x = reinterpret_cast<const float*>(rows.values + row * rows.stride) + k0;
    float* sums = planes + __builtin_popcountll(leaf) * plane + row * PANEL;
    tile<NUM_ROWS, KIND>(w, x, rows.stride / 4, k1 - k0, goes_on, ahead, sums);
    if (ends) next_leaf<NUM_ROWS, 8>(sums, plane, leaf);
  });
}

}  // namespace

void fma_panel(const Linear& linear, int64_t panel, const uint8_t* next, const Rows& rows, void* y, Scratch& memory) {
  const int64_t in = linear.padded_in, leaf_in = in / linear.num_leaves, input = panel_bytes(linear, 1);
  const int64_t num_tiles = (rows.num_rows + MAX_ROWS - 1) / MAX_ROWS;
  const uint8_t* values = linear.values + panel * panel_bytes(linear, in);
  // One tile takes the panel as it comes from memory, once.
  const int64_t chunk = num_tiles == 1 ? leaf_in : std::min(leaf_in, CHUNK_BYTES / input);
  float* planes = reinterpret_cast<float*>(scratch(memory, num_planes(linear) * rows.num_rows * PANEL * 4));
  for (int64_t k0 = 0, k1; k0 < in; k0 = k1) {
    k1 = std::min(k0 + chunk, (k0 / leaf_in + 1) * leaf_in);
    const uint8_t* w = values + k0 * input;
    Ahead ahead;
    if (num_tiles == 1) {
      if (rows.num_rows > 3) ahead = {w + OWN_AHEAD, w + OWN_AHEAD + (k1 - k0) * input, 256};
    } else if (k1 < in || next) {  // tiles behind the first find the chunk in the cache
      const uint8_t* from = k1 < in ? values + k1 * input : next;
      ahead = {from, from + std::min(chunk, leaf_in) * input, num_tiles > 2 ? 64 : 128};
    }
    if (linear.kind == W_BF16) tiles<W_BF16>(rows, w, k0, k1, leaf_in, ahead, planes);
    else tiles<W_F32>(rows, w, k0, k1, leaf_in, ahead, planes);
  }
  for (int64_t row = 0; row < rows.num_rows; ++row) finish_row(linear, panel, rows, row, planes + row * PANEL, y);
}

}  // namespace baton

#endif
