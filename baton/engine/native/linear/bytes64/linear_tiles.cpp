// Panels times rows by the tiles of AMX, 16 rows and all 64 outputs at a time: a panel is drawn as the tiles of weights
// are, one under another. Integer sums are exact, so that they have the bits of vpdpbusd; sums of bf16 go by tiles of 32
// inputs (tiles.h tells their order), which no other instruction repeats: all rows take them, however few.
#include "../../common.h"

#ifdef BATON_AMX
#include "linear64.h"
#include "tiles.h"

namespace baton {
namespace {

constexpr int64_t WEIGHT_STRIDE = 4 * PANEL;  // bytes

#define MULTIPLY_TILE(dot, x_tile, w_tile, v)              \
  TILE_LOAD(w_tile, w + (v) * TILE_BYTES, WEIGHT_STRIDE);   \
  dot(v, x_tile, w_tile)
#define MULTIPLY_TILES(dot, x_tile, w_tile) \
  TILE_LOAD(x_tile, x, stride);             \
  MULTIPLY_TILE(dot, x_tile, w_tile, 0);   \
  MULTIPLY_TILE(dot, x_tile, w_tile, 1);   \
  MULTIPLY_TILE(dot, x_tile, w_tile, 2);   \
  MULTIPLY_TILE(dot, x_tile, w_tile, 3)

// num_bytes of each row, whose weights begin at w, into `to` [16][64].
template <bool INTEGERS, class Sum>
void multiply(const char* x, int64_t stride, const uint8_t* w, int64_t num_bytes, Sum* to) {
  static_assert(sizeof(Sum) == 4);
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (; num_bytes >= TILE_BYTES; num_bytes -= TILE_BYTES, x += TILE_BYTES, w += TILE_ROWS * WEIGHT_STRIDE) {
    if constexpr (INTEGERS) { MULTIPLY_TILES(TILE_DOT_INT8, 4, 5); }
    else { MULTIPLY_TILES(TILE_DOT_BF16, 4, 5); }
  }
  if (num_bytes) {
    if constexpr (INTEGERS) { MULTIPLY_TILES(TILE_DOT_INT8, 6, 7); }
    else { MULTIPLY_TILES(TILE_DOT_BF16, 6, 7); }
  }
  TILE_STORE(0, to, WEIGHT_STRIDE);
  TILE_STORE(1, to + 16, WEIGHT_STRIDE);
  TILE_STORE(2, to + 32, WEIGHT_STRIDE);
  TILE_STORE(3, to + 48, WEIGHT_STRIDE);
}

// take(row, num_rows) for every 16 rows, whose tiles are configured for groups of so many bytes.
template <class Take>
void by_tiles(const Rows& rows, int64_t group_bytes, Take take) {
  for (int64_t row = 0, configured = 0; row < rows.num_rows; row += TILE_ROWS) {
    const int64_t num_rows = std::min(TILE_ROWS, rows.num_rows - row);
    if (num_rows != configured) {
      const TileConfig config(num_rows, group_bytes % TILE_BYTES);
      TILE_CONFIGURE(config);
      configured = num_rows;
    }
    take(row, num_rows);
  }
  TILE_RELEASE();  // else the system keeps 8 KiB more of the thread
}

}  // namespace

void int_tiles(const Linear& linear, const uint8_t* values, int64_t panel, const Rows& rows, void* y) {
  const int64_t num_groups = linear.num_groups, group = linear.group;
  by_tiles(rows, group, [&](int64_t row, int64_t num_rows) {
    alignas(64) int32_t acc[TILE_ROWS * PANEL];
    alignas(64) float out[TILE_ROWS * PANEL] = {};
    for (int64_t g = 0; g < num_groups; ++g) {
      multiply<true>(rows.values + row * rows.stride + g * group, rows.stride, values + g * group * PANEL, group, acc);
      const int64_t scale = (panel * linear.num_scales + g / linear.groups_per_scale) * PANEL;
      for (int v = 0; v < 4; ++v) {
        const __m512 s = load_scales(linear.scales, linear.scale_kind, scale + 16 * v);
        const __m512 o = linear.offsets ? load_scales(linear.offsets, linear.scale_kind, scale + 16 * v) : s;
        for (int64_t m = 0; m < num_rows; ++m) {
          const int64_t at = (row + m) * rows.num_groups + g;
          float* to = out + m * PANEL + 16 * v;
          __m512i sum = _mm512_load_si512(acc + m * PANEL + 16 * v);
          sum = _mm512_add_epi32(sum, _mm512_set1_epi32(rows.starts[at]));
          const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(rows.scales[at]));
          __m512 total = _mm512_fmadd_ps(scaled, s, _mm512_load_ps(to));
          if (linear.offsets) total = _mm512_fmadd_ps(_mm512_set1_ps(rows.shifts[at]), o, total);
          _mm512_store_ps(to, total);
        }
      }
    }
    for (int64_t m = 0; m < num_rows; ++m) finish_row(linear, panel, rows, row + m, out + m * PANEL, y);
  });
}

void bf16_tiles(const Linear& linear, const uint8_t* values, int64_t panel, const Rows& rows, void* y) {
  const int64_t num_bytes = 2 * linear.padded_in;
  by_tiles(rows, num_bytes, [&](int64_t row, int64_t num_rows) {
    alignas(64) float out[TILE_ROWS * PANEL];
    multiply<false>(rows.values + row * rows.stride, rows.stride, values, num_bytes, out);
    for (int64_t m = 0; m < num_rows; ++m) finish_row(linear, panel, rows, row + m, out + m * PANEL, y);
  });
}

}  // namespace baton

#endif
