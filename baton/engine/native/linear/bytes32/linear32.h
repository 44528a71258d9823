// Shared by the linear kernels of 32 byte vectors (AVX2, AVX-512 without BF16, NEON).
//
// One row streams the panel as it is stored. More rows take it in chunks of inputs and slices of 16 outputs, each unpacked
// to what the multipliers take where the first cache holds it; tiles of up to 6 rows and 16 outputs go through it with 12
// sums in registers, which are put down between two chunks and taken up again.
#pragma once

#include "../linear.h"

namespace baton {

constexpr int64_t SLICE = 16;            // outputs
constexpr int64_t LINE_INPUTS = 16;      // fp32 inputs of a row in a line
constexpr int64_t CHUNK_OF_ROW = 1024;   // bytes of a row's values: a slice of as many inputs is 16 KiB
constexpr int64_t BLOCK = 240;           // rows whose chunks stay in a 512 KiB second cache with an unpacked one

inline __m256i load32(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store32(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
inline __m256i four_of(const void* from) {  // bytes, in all lanes
  return _mm256_set1_epi32(word_at(from));
}
inline __m256i low_halves(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
inline __m256i high_halves(__m256i bytes) { return low_halves(_mm256_srli_epi16(bytes, 4)); }

inline __m256 load8_scales(const void* scales, int64_t kind, int64_t index) {
  if (kind == S_FP32) return _mm256_loadu_ps(static_cast<const float*>(scales) + index);
  const uint16_t* halves = static_cast<const uint16_t*>(scales) + index;
  if (kind == S_BF16) return load8_bf16(halves);
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}

// Adds outliers and bias to the 64 sums of a row and writes those outputs that exist.
inline void finish_row(const Linear& linear, int64_t panel, const Rows& rows, int64_t row, const float* from, void* y) {
  for (int v = 0; v < 8; ++v) {
    const int64_t output = panel * PANEL + 8 * v, left = std::min<int64_t>(linear.num_out - output, 8);
    if (left <= 0) return;
    __m256 sum = _mm256_loadu_ps(from + 8 * v);
    for (int64_t i = 0; i < linear.num_outliers; ++i) {
      const uint16_t* column = linear.outlier_values + (panel * linear.num_outliers + i) * PANEL;
      const __m256 x = _mm256_set1_ps(rows.outliers[row * rows.num_outliers + i]);
      sum = _mm256_fmadd_ps(x, load8_bf16(column + 8 * v), sum);
    }
    if (linear.bias) sum = _mm256_add_ps(sum, _mm256_loadu_ps(linear.bias + output));
    const int64_t at = row * linear.num_out + output;
    if (linear.y_kind == ADDED_SUMS) sum = _mm256_add_ps(sum, _mm256_loadu_ps(static_cast<float*>(y) + at));
    if (linear.y_kind == X_BF16) {
      uint16_t last[8], *to = static_cast<uint16_t*>(y) + at;
      store8_bf16(left == 8 ? to : last, sum);
      if (left < 8) std::copy_n(last, left, to);
    } else {
      float last[8], *to = static_cast<float*>(y) + at;
      _mm256_storeu_ps(left == 8 ? to : last, sum);
      if (left < 8) std::copy_n(last, left, to);
    }
  }
}

// Whether a panel's kernel adds the leaves by itself, and not one call a leaf.
inline bool adds_leaves(const Linear& linear) { return !linear.num_outliers; }

// Sums of leaves are put down in planes: a leaf, or a branch, that waits for its neighbour lies a plane before it. A leaf that
// has been summed, NUM_VECS vectors of each row, is added to those that wait for it; returns where the next one goes.
template <int NUM_ROWS, int NUM_VECS>
inline float* next_leaf(float* sums, int64_t plane, int64_t leaf) {
  for (; leaf & 1; leaf >>= 1, sums -= plane)
    for (int m = 0; m < NUM_ROWS; ++m)
      for (int v = 0; v < NUM_VECS; ++v) {
        float *right = sums + m * PANEL + 8 * v, *left = right - plane;
        _mm256_storeu_ps(left, _mm256_add_ps(_mm256_loadu_ps(left), _mm256_loadu_ps(right)));
      }
  return sums + plane;
}

constexpr int64_t MAX_PLANES = 4;  // of 8 leaves
inline int64_t num_planes(const Linear& linear) { return 1 + __builtin_ctzll(linear.num_leaves); }

// Inputs [k0, k1) of 16 outputs, unpacked.
struct Slice {
  const Linear& linear;
  const Rows& rows;
  int64_t panel, first, k0, k1;  // first: output of the panel
  const char* values;
  int64_t plane;  // floats of one
  int64_t group = k0 / linear.group;
  int64_t leaf_groups = linear.num_groups / linear.num_leaves, leaf = group / leaf_groups;
  int64_t leaf_left = leaf_groups - group % leaf_groups;  // groups of the leaf that are not summed
  int64_t scale = (panel * linear.num_scales + group / linear.groups_per_scale) * PANEL + first;
  int64_t scale_left = linear.groups_per_scale - group % linear.groups_per_scale;  // groups that share it
};

// Inputs of a chunk: whole groups where a leaf has several.
inline int64_t chunk_of(const Linear& linear) {
  const int64_t most = CHUNK_OF_ROW / bytes_of_x(linear);
  if (linear.num_groups == linear.num_leaves) return std::min(most, linear.padded_in);
  return std::max<int64_t>(1, most / linear.group) * linear.group;
}

#ifdef BATON_AVX512
// Several rows of a panel of bf16 or fp32, in vectors of 64 bytes (bytes64/linear_fma64.cpp).
void fma_panel(const Linear& linear, int64_t panel, const uint8_t* next, const Rows& rows, void* y, Scratch& memory);
#endif

// All rows of a panel. Sums are side by side between two chunks, [planes][rows][64]. Kernel has:
//   bytes(inputs)  of a panel
//   TURN           inputs, whose values of the 64 outputs lie side by side
//   AS_STORED      slices are taken as they are stored; or else SLICE_BYTES of an unpacked input, and
//                  unpack(values of 16 outputs, inputs, slice)
//   tile<rows>     (slice, first row, its sums, ahead)
template <class Kernel>
void in_chunks(const Linear& linear, int64_t panel, const uint8_t* next, const Rows& rows, void* y, Scratch& memory) {
  const int64_t in = linear.padded_in, chunk = chunk_of(linear);
  const int64_t slice_bytes = chunk * Kernel::SLICE_BYTES, stored_bytes = Kernel::bytes(Kernel::TURN) / (PANEL / SLICE);
  const uint8_t* values = linear.values + panel * Kernel::bytes(in);
  if (!next) next = values;
  const int64_t plane = std::min(rows.num_rows, BLOCK) * PANEL;
  char* unpacked = scratch(memory, slice_bytes + num_planes(linear) * plane * 4);
  for (int64_t begin = 0, end; begin < rows.num_rows; begin = end) {
    end = std::min(begin + BLOCK, rows.num_rows);
    const int64_t num_tiles = (end - begin + MAX_ROWS - 1) / MAX_ROWS;
    float* sums = reinterpret_cast<float*>(unpacked + slice_bytes);
    for (int64_t k0 = 0; k0 < in; k0 += chunk) {
      const int64_t k1 = std::min(in, k0 + chunk);
      const uint8_t* from = k1 < in ? values + Kernel::bytes(k1) : next;
      Ahead ahead{from, from + Kernel::bytes(std::min(chunk, k1 < in ? in - k1 : in))};
      for (int64_t first = 0; first < PANEL; first += SLICE) {
        const uint8_t* stored = values + Kernel::bytes(k0) + first / SLICE * stored_bytes;
        if constexpr (!Kernel::AS_STORED) Kernel::unpack(stored, k1 - k0, unpacked);
        const char* taken = Kernel::AS_STORED ? reinterpret_cast<const char*>(stored) : unpacked;
        const Slice slice{linear, rows, panel, first, k0, k1, taken, plane};
        in_row_tiles(begin, end, num_tiles, [&](int64_t row, auto count) {
          float* at = sums + __builtin_popcountll(slice.leaf) * plane + (row - begin) * PANEL + first;
          Kernel::template tile<decltype(count)::value>(slice, row, at, ahead);
        });
      }
    }
    for (int64_t row = begin; row < end; ++row)
      finish_row(linear, panel, rows, row, sums + (row - begin) * PANEL, y);
  }
}

}  // namespace baton
