// A packed linear weight, and how its kernels meet: rows are prepared (linear_rows.cpp), then multiplied
// panel by panel (linear_int.cpp, linear_float.cpp). Python fills the struct: baton/engine/layers/linear/packed.py.
//
// A panel is 64 outputs, four vectors wide. Along the inputs every lane is one output and takes its inputs in order, so
// an output's sum has one order whatever the number of rows, of threads, or of outputs beside it:
//
//   U8    [panels][in / 4][64][4]   q + 128           x: int8, integer sums per group (exact)
//   U4    [panels][in / 8][64][4]   q + 8; inputs 8i..8i+3 in the low halves, 8i+4..8i+7 in the high ones
//   BF16  [panels][in / 2][64][2]   x: bf16           fp32 sums
//   F32   [panels][in][64]          x: fp32           fp32 sums
//   E4M3  [panels][in / 2][64][2]   x: bf16           fp32 sums per group
#pragma once

#include "common.h"

namespace baton {

constexpr int64_t PANEL = 64;  // outputs
constexpr int MAX_ROWS = 6;    // rows of a register tile: 6 x 4 sums, 4 weights and a broadcast fill 32 registers

enum WeightKind : int64_t { U8 = 0, U4 = 1, W_BF16 = 2, W_F32 = 3, W_E4M3 = 4 };
enum XKind : int64_t { X_FP32 = 0, X_BF16 = 1 };
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
  int64_t padded_in;         // what the panels hold; inputs past num_in count as zero
  int64_t group;             // inputs per sum; divides padded_in
  int64_t groups_per_scale;  // sums that share a weight scale
  int64_t kind, scale_kind;
  int64_t activations;
  int64_t x_kind;     // of x and y
  float input_scale;  // of E4M3_STATIC

  int64_t num_panels() const { return (num_out + PANEL - 1) / PANEL; }
  int64_t num_groups() const { return padded_in / group; }
  int64_t num_scales() const { return (num_groups() + groups_per_scale - 1) / groups_per_scale; }
};

// The activations of one call in the form that the panels want.
struct Rows {
  int64_t num_rows, stride;  // stride: bytes from row to row of values
  char* values;              // int8, bf16 or fp32 [num_rows][padded_in]
  float* scales;             // [num_rows][num_groups]
  int32_t* starts;           // [num_rows][num_groups], sums of int8 values times the weights' zero
  float* shifts;             // [num_rows][num_groups], sums times scales
  float* outliers;           // [num_rows][num_outliers]
};

// One row of it; calls for different rows may run at the same time.
void prepare_row(const Linear& linear, const void* x, int64_t row, const Rows& rows);

// Weights that are wanted soon: fetched into the second cache a little at every turn of a loop that multiplies. Those
// of the next panel no faster than the tiles of this one take them up: 32 rows at 430 instead of 355 GFLOP/s (bf16, one
// core). A tile that has its panel for itself fetches from it, as far ahead as OWN_AHEAD: the processor's own fetching
// falls behind where there is more to do than to multiply (one row at 38 instead of 34 GB/s in int4, at 36 instead of
// 30 in e4m3; six rows at 215 instead of 193 GFLOP/s in bf16).
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

// All rows of one panel into y [num_rows][num_out]; the thread's next one is `next`, `memory` is its own.
void int_panel(const Linear& linear, int64_t panel, int64_t next, const Rows& rows, void* y,
               std::vector<char>& memory);
void float_panel(const Linear& linear, int64_t panel, int64_t next, const Rows& rows, void* y,
                 std::vector<char>& memory);

#ifdef BATON_AVX512
inline __m512 load_scales(const void* scales, int64_t kind, int64_t index) {
  if (kind == S_FP32) return _mm512_loadu_ps(static_cast<const float*>(scales) + index);
  const uint16_t* halves = static_cast<const uint16_t*>(scales) + index;
  if (kind == S_BF16) return load16_bf16(halves);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}

// Adds outliers and bias to the 64 sums of a row and writes those outputs that exist.
inline void finish_row(const Linear& linear, int64_t panel, const Rows& rows, int64_t row, const float* from, void* y) {
  __m512 sums[4];
  for (int v = 0; v < 4; ++v) sums[v] = _mm512_loadu_ps(from + 16 * v);
  for (int64_t i = 0; i < linear.num_outliers; ++i) {
    __m512 x = _mm512_set1_ps(rows.outliers[row * linear.num_outliers + i]);
    const uint16_t* column = linear.outlier_values + (panel * linear.num_outliers + i) * PANEL;
    for (int v = 0; v < 4; ++v) sums[v] = _mm512_fmadd_ps(x, load16_bf16(column + 16 * v), sums[v]);
  }
  for (int v = 0; v < 4; ++v) {
    int64_t output = panel * PANEL + 16 * v, left = linear.num_out - output;
    if (left <= 0) return;
    __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
    if (linear.bias) sums[v] = _mm512_add_ps(sums[v], _mm512_loadu_ps(linear.bias + output));
    int64_t at = row * linear.num_out + output;
    if (linear.x_kind == X_BF16) store16_bf16(static_cast<uint16_t*>(y) + at, sums[v], mask);
    else _mm512_mask_storeu_ps(static_cast<float*>(y) + at, mask, sums[v]);
  }
}
#endif

}  // namespace baton
