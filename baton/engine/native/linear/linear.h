// A packed linear weight, and how its kernels meet: rows are prepared (linear_rows.cpp), then multiplied
// panel by panel (bytes32/, bytes64/). Python fills the struct: baton/engine/layers/linear/packed.py.
//
// A panel is 64 outputs, four vectors wide. Along the inputs every lane is one output and takes its inputs in order (of
// bf16 by tiles of AMX: 32 after 32), so an output's sum has one order whatever the number of rows, of threads, or of
// outputs beside it. With leaves the inputs are cut into so many of equal length, each is summed so from zero, and fp32
// adds neighbours, their sums, and so on: a part of the leaves gives the same partial sum wherever it is computed.
//
//   U8    [panels][in / 4][64][4]   q + 128           x: int8, integer sums per group (exact)
//   U4    [panels][in / 8][64][4]   q + 8; inputs 8i..8i+3 in the low halves, 8i+4..8i+7 in the high ones
//   BF16  [panels][in / 2][64][2]   x: bf16           fp32 sums
//   F32   [panels][in][64]          x: fp32           fp32 sums
//   E4M3  [panels][in / 2][64][2]   x: bf16           fp32 sums per group
#pragma once

#include <type_traits>

#include "../common.h"

namespace baton {

constexpr int64_t PANEL = 64;  // outputs
constexpr int MAX_ROWS = 6;    // rows of a register tile: 6 x 4 sums, 4 weights and a broadcast fill 32 registers

enum WeightKind : int64_t { U8 = 0, U4 = 1, W_BF16 = 2, W_F32 = 3, W_E4M3 = 4 };
// SUMS: of a leaf, fp32 [num_rows][64]; ADDED_SUMS: onto those that are there.
enum XKind : int64_t { X_FP32 = 0, X_BF16 = 1, SUMS = 2, ADDED_SUMS = 3 };
enum ScaleKind : int64_t { S_FP32 = 0, S_BF16 = 1, S_FP16 = 2 };
enum Activations : int64_t { AS_THEY_COME, INT8_PER_ROW, INT8_PER_GROUP, E4M3_PER_ROW, E4M3_PER_GROUP, E4M3_STATIC };

struct Linear {
  const uint8_t* values;
  const void* scales;              // [panels][scale groups][64] of scale_kind; null: none
  const void* offsets;             // as scales; null: symmetric
  const float* bias;               // [panels * 64]; null: none
  const int32_t* order;            // [in]: input order[j] is multiplied by column j; null: j
  const int32_t* outlier_columns;  // [num_outliers], in the model's order of inputs
  const uint16_t* outlier_values;  // bf16 [panels][num_outliers][64]
  int64_t num_outliers;
  int64_t num_out, num_in;
  int64_t padded_in;          // what the panels hold; inputs past num_in count as zero
  int64_t group, num_groups;  // inputs per sum, and sums: padded_in in all
  int64_t groups_per_scale;   // sums that share a weight scale
  int64_t num_scales;         // of an output
  int64_t kind, scale_kind;
  int64_t activations;
  int64_t x_kind, y_kind;
  int64_t num_leaves;  // 1, 2, 4 or 8; divides num_groups
  float input_scale;   // of E4M3_STATIC

  // Whether a kernel may put its sums where they belong by itself.
  bool is_plain_leaf() const { return y_kind >= SUMS && !num_outliers; }
  int64_t num_panels() const { return (num_out + PANEL - 1) / PANEL; }
};

// What multiplies an int8 value in place of a weight of zero. Signed products take the bytes of U8 as q.
#ifdef BATON_SIGNED_DOT
inline int32_t zero_of(const Linear& linear) { return linear.kind == U4 ? 8 : 0; }
#else
inline int32_t zero_of(const Linear& linear) { return linear.kind == U4 ? 8 : 128; }
#endif

// The activations of one call in the form that the kernels want.
struct Rows {
  int64_t num_rows, stride;            // stride: bytes from row to row of values
  int64_t num_groups, num_outliers;    // of a row
  char* values;              // [num_rows][padded_in], bytes_of_x each
  float* scales;             // [num_rows][num_groups]
  int32_t* starts;           // [num_rows][num_groups], sums of int8 values times -zero_of()
  float* shifts;             // [num_rows][num_groups], sums times scales
  float* outliers;           // [num_rows][num_outliers]
};

#ifdef BATON_VNNI_BF16
// int8, bf16 or fp32.
inline int64_t bytes_of_x(const Linear& linear) {
  return linear.kind == W_F32 ? 4 : linear.kind == W_BF16 || linear.kind == W_E4M3 ? 2 : 1;
}
inline int64_t stride_of(int64_t num_bytes) { return rounded_up(num_bytes, LINE); }
#else
#ifdef BATON_DOT
// int8 or fp32.
inline int64_t bytes_of_x(const Linear& linear) { return linear.kind == U4 || linear.kind == U8 ? 1 : 4; }
#else
// int8 for U4; int16 for U8, inputs 4i..4i+3 as pairs (0, 2) and (1, 3); fp32.
inline int64_t bytes_of_x(const Linear& linear) { return linear.kind == U4 ? 1 : linear.kind == U8 ? 2 : 4; }
#endif
// A KiB and a line past a multiple of 4 KiB, so that the rows of a tile do not share the sets of the first cache.
inline int64_t stride_of(int64_t num_bytes) {
  return num_bytes < 4096 ? rounded_up(num_bytes, LINE) : rounded_up(num_bytes, 4096) + 1024 + LINE;
}
#endif

// One row of it; calls for different rows may run at the same time. `given`: the largest magnitudes of rows that have
// one scale each, [num_rows]; null: those of x.
void prepare_row(const Linear& linear, const void* x, const float* given, int64_t row, const Rows& rows);

// Weights that are wanted soon: fetched into the second cache a little at every turn of a loop that multiplies. Those
// of the next panel no faster than the tiles of this one take them up: 32 rows at 430 instead of 355 GFLOP/s (bf16, one
// core). A tile that has its panel for itself fetches from it, as far ahead as OWN_AHEAD: the processor's own fetching
// falls behind where there is more to do than to multiply (one row at 36 instead of 30
// GB/s in e4m3; six rows at 215 instead of 193 GFLOP/s in bf16). One row in vectors of 32 bytes leaves it to the processor (int8
// at 31 instead of 28 GB/s on a core, bf16 at 31 instead of 29).
constexpr int64_t OWN_AHEAD = 4096;
struct Ahead {
  const uint8_t *at = nullptr, *end = nullptr;
  int64_t step = 64;  // bytes a turn: one line, two or four
  void fetch() {
    if (at >= end) return;
    __builtin_prefetch(at, 0, 2);
    if (step > 64) __builtin_prefetch(at + 64, 0, 2);
    if (step > 128) __builtin_prefetch(at + 128, 0, 2), __builtin_prefetch(at + 192, 0, 2);
    at += step;
  }
};

// Of `inputs` of a panel.
inline int64_t panel_bytes(const Linear& linear, int64_t inputs) {
  const int64_t values = PANEL * inputs;
  return linear.kind == U4 ? values / 2 : linear.kind == W_F32 ? 4 * values : linear.kind == W_BF16 ? 2 * values : values;
}

// x [num_rows][num_in] of linear->x_kind -> y [num_rows][num_out] of linear->y_kind, rows without gaps. `largest`
// [num_rows]: magnitudes to scale rows by that have one scale each, where x has a part of their inputs; null: those of x.
struct Product {
  const Linear* linear;
  const void* x;
  const float* largest;
  void* y;
  int64_t num_rows;
};

// use(row, std::integral_constant<int, rows>) for each tile of rows [begin, end): num_tiles of them, of at most MAX_ROWS rows
// and about as many each.
template <class Use>
inline __attribute__((always_inline)) void in_row_tiles(int64_t begin, int64_t end, int64_t num_tiles, const Use& use) {
  for (int64_t i = 0, row = begin; i < num_tiles; ++i) {
    const int64_t upto = begin + (end - begin) * (i + 1) / num_tiles;
    switch (upto - row) {
      case 1: use(row, std::integral_constant<int, 1>()); break;
      case 2: use(row, std::integral_constant<int, 2>()); break;
      case 3: use(row, std::integral_constant<int, 3>()); break;
      case 4: use(row, std::integral_constant<int, 4>()); break;
      case 5: use(row, std::integral_constant<int, 5>()); break;
      default: use(row, std::integral_constant<int, MAX_ROWS>());
    }
    row = upto;
  }
}

// Each as by itself, with threads that share out the panels of all: small ones one after the other would wait for a thread
// each.
void multiply_all(const Product* products, int64_t num_products, int64_t num_threads);

// All rows of one panel into y [num_rows][num_out]; the thread's next values are at `next` (null: none), `memory` is its
// own.
void int_panel(const Linear& linear, int64_t panel, const uint8_t* next, const Rows& rows, void* y, Scratch& memory);
void float_panel(const Linear& linear, int64_t panel, const uint8_t* next, const Rows& rows, void* y, Scratch& memory);

}  // namespace baton
