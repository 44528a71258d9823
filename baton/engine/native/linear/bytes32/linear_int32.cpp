// Integer weights times int8 rows in vectors of 32 bytes, to the same bits as linear_int64.cpp: integer sums of a group are
// exact, and what is added to the fp32 sums has its order.
#include "../../common.h"

#ifndef BATON_VNNI_BF16
#ifdef BATON_DOT
#include "int_products_dot.h"
#else
#include "int_products_avx2.h"
#endif

namespace baton {
namespace {

// The sum of a group of a row and 8 outputs, scaled onto what is there of the groups before.
inline __m256 scaled(__m256i acc, __m256 sx, __m256 s, __m256 before) {
  return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(acc), sx), s, before);
}

template <int64_t KIND>
struct Integers {
  using Products = IntProducts<KIND>;
  static constexpr bool AS_STORED = false;
  static constexpr int64_t SLICE_BYTES = Products::SLICE_BYTES, TURN = KIND == U4 ? 8 : 4;
  static int64_t bytes(int64_t inputs) { return inputs * PANEL / (KIND == U4 ? 2 : 1); }

  static void unpack(const uint8_t* from, int64_t inputs, char* to) {
    for (int64_t k = 0; k < inputs; k += TURN, from += bytes(TURN), to += TURN * SLICE_BYTES)
      Products::unpack(load32(from), load32(from + 32), to);
  }

  template <int NUM_ROWS>
  __attribute__((noinline)) static void tile(const Slice& slice, int64_t row, float* sums, Ahead& shared) {
    const Linear& linear = slice.linear;
    const Rows& rows = slice.rows;
    const int64_t stride = rows.stride, row_groups = rows.num_groups, group = linear.group;
    const char *x = rows.values + row * stride + slice.k0 * Products::BYTES_OF_X, *w = slice.values;
    const int32_t* row_starts = rows.starts + row * row_groups;
    const float* row_scales = rows.scales + row * row_groups;
    Ahead ahead = shared;
    int64_t g = slice.group, scale = slice.scale, scale_left = slice.scale_left;
    int64_t leaf = slice.leaf, leaf_left = slice.leaf_left;
    for (int64_t k = slice.k0, end; k < slice.k1; k = end, ++g) {
      end = std::min(slice.k1, (g + 1) * group);
      const int32_t* starts = row_starts + g;
      __m256i acc[NUM_ROWS][2];
      const auto of_sums = [&](int m, int v) __attribute__((always_inline)) { return load32(sums + m * PANEL + 8 * v); };
      const auto of_starts = [&](int m, int) __attribute__((always_inline)) { return four_of(starts + m * row_groups); };
      if (k > g * group) Products::template add<NUM_ROWS>(x, stride, w, end - k, ahead, of_sums, acc);
      else Products::template add<NUM_ROWS>(x, stride, w, end - k, ahead, of_starts, acc);
      if (end < (g + 1) * group) {
#pragma GCC unroll 8
        for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 2
          for (int v = 0; v < 2; ++v) store32(sums + m * PANEL + 8 * v, acc[m][v]);
        break;
      }
      const __m256 s0 = load8_scales(linear.scales, linear.scale_kind, scale);
      const __m256 s1 = load8_scales(linear.scales, linear.scale_kind, scale + 8);
      const __m256 not_first = _mm256_castsi256_ps(_mm256_set1_epi32(leaf_left < slice.leaf_groups ? -1 : 0));
      const float* scales = row_scales + g;
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m) {
        float* at = sums + m * PANEL;
        const __m256 sx = _mm256_broadcast_ss(scales + m * row_groups);
        const __m256 low = _mm256_and_ps(_mm256_loadu_ps(at), not_first);
        const __m256 high = _mm256_and_ps(_mm256_loadu_ps(at + 8), not_first);
        _mm256_storeu_ps(at, scaled(acc[m][0], sx, s0, low));
        _mm256_storeu_ps(at + 8, scaled(acc[m][1], sx, s1, high));
      }
      if (linear.offsets) add_offsets<NUM_ROWS>(slice, row, g, scale, sums);
      if (--scale_left == 0) scale += PANEL, scale_left = linear.groups_per_scale;
      if (--leaf_left == 0) sums = next_leaf<NUM_ROWS, 2>(sums, slice.plane, leaf++), leaf_left = slice.leaf_groups;
    }
    shared = ahead;
  }

  template <int NUM_ROWS>
  static void add_offsets(const Slice& slice, int64_t row, int64_t g, int64_t scale, float* sums) {
    for (int v = 0; v < 2; ++v) {
      const __m256 offset = load8_scales(slice.linear.offsets, slice.linear.scale_kind, scale + 8 * v);
      for (int m = 0; m < NUM_ROWS; ++m) {
        const __m256 shift = _mm256_broadcast_ss(slice.rows.shifts + (row + m) * slice.rows.num_groups + g);
        float* at = sums + m * PANEL + 8 * v;
        _mm256_storeu_ps(at, _mm256_fmadd_ps(shift, offset, _mm256_loadu_ps(at)));
      }
    }
  }
};

/// TREE: there are leaves to add. What that takes of a row without them was 13 % of its time.
template <int64_t KIND, bool TREE>
void one_row(const Linear& linear, int64_t panel, const Rows& rows, void* y) {
  const int64_t group = linear.group, step = Integers<KIND>::bytes(group);
  const uint8_t* w = linear.values + panel * Integers<KIND>::bytes(linear.padded_in);
  const char* x = rows.values;
  float planes[(TREE ? MAX_PLANES : 1) * PANEL] = {};
  int64_t scale = panel * linear.num_scales * PANEL, sums_left = linear.groups_per_scale;
  const int64_t leaf_groups = linear.num_groups / linear.num_leaves;
  [[maybe_unused]] float* leaf_sums = planes;
  [[maybe_unused]] int64_t leaf = 0, leaf_left = leaf_groups;
  for (int64_t g = 0; g < linear.num_groups; ++g, w += step, x += group * IntProducts<KIND>::BYTES_OF_X) {
    __m256i acc[8];
    for (int v = 0; v < 8; ++v) acc[v] = four_of(rows.starts + g);
    IntProducts<KIND>::add_row(w, x, group, acc);
    const __m256 sx = _mm256_broadcast_ss(rows.scales + g), shift = _mm256_broadcast_ss(rows.shifts + g);
    [[maybe_unused]] const __m256 not_first = _mm256_castsi256_ps(_mm256_set1_epi32(leaf_left < leaf_groups ? -1 : 0));
    float* sums = TREE ? leaf_sums : planes;
    for (int v = 0; v < 8; ++v) {
      const __m256 s = load8_scales(linear.scales, linear.scale_kind, scale + 8 * v);
      __m256 before = _mm256_loadu_ps(sums + 8 * v);
      if constexpr (TREE) before = _mm256_and_ps(before, not_first);
      __m256 sum = scaled(acc[v], sx, s, before);
      if (linear.offsets)
        sum = _mm256_fmadd_ps(shift, load8_scales(linear.offsets, linear.scale_kind, scale + 8 * v), sum);
      _mm256_storeu_ps(sums + 8 * v, sum);
    }
    if (--sums_left == 0) scale += PANEL, sums_left = linear.groups_per_scale;
    if constexpr (TREE)
      if (--leaf_left == 0) leaf_sums = next_leaf<1, 8>(leaf_sums, PANEL, leaf++), leaf_left = leaf_groups;
  }
  finish_row(linear, panel, rows, 0, planes, y);
}

template <int64_t KIND>
void apply(const Linear& linear, int64_t panel, const uint8_t* next, const Rows& rows, void* y, Scratch& memory) {
  if (rows.num_rows == 1) (linear.num_leaves > 1 ? one_row<KIND, true> : one_row<KIND, false>)(linear, panel, rows, y);
  else in_chunks<Integers<KIND>>(linear, panel, next, rows, y, memory);
}

}  // namespace

void int_panel(const Linear& linear, int64_t panel, const uint8_t* next, const Rows& rows, void* y, Scratch& memory) {
  if (linear.kind == U4) apply<U4>(linear, panel, next, rows, y, memory);
  else apply<U8>(linear, panel, next, rows, y, memory);
}

}  // namespace baton

#endif
