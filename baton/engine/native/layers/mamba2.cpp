// Mamba-2's recurrence (arXiv 2405.21060) over whole sequences, one token after the other:
//
//   state = state * exp(dt A) + (dt x) B       y = state C + D x       [head_dim][state_size] of each head, fp32
//
// A row of a head's state stays in registers over all tokens of a segment, so that its cost is in products, not memory.
#include "recurrent.h"

namespace baton {

// Projected rows are gates [inner], then x [inner], B and C [num_groups][state_size] each, then a step for each head.
struct Mamba2 {
  Convolution conv;
  int64_t num_heads, head_dim, num_groups, state_size;
  const float *step_bias, *decay, *skip;  // of each head: dt_bias, A, D
  const float* norm_weight;               // [inner]; null: no norm
  int64_t num_norm_groups, norm_first;    // equal parts of a row that are normed by themselves; before it is gated
  int64_t norm_size, num_leaves;          // elements of such a part over all ranks; the leaves of its sum that are here
  Meeting meeting;
  double least_step, largest_step, eps;

  int64_t inner() const { return num_heads * head_dim; }
  int64_t num_sums() const { return num_norm_groups; }
};

namespace {

constexpr int64_t TILE = 32;  // tokens at a time: their B and C stay in the first cache while a head's channels pass

// Some tokens of a segment, of one head.
struct Tile {
  const float *x, *b, *c;  // of the first row; rows are `stride` apart
  int64_t stride;
  const float *steps, *decays;  // of the first row, num_heads apart
  int64_t num_heads, num_rows;
  bool begins, keeps;  // from nothing; the state as it stands behind the tile
};

// N vectors of one row of the state over a tile: what they add to the sums [num_rows][16] of its outputs.
template <int N>
void scan_row(const Tile& tile, int64_t at, int64_t channel, float* state, float* sums) {
  V16 row[N];
  for (int i = 0; i < N; i++) row[i] = tile.begins ? V16{} : load16(state + at + 16 * i);
  for (int64_t t = 0; t < tile.num_rows; t++) {
    const V16 decays = all16(tile.decays[t * tile.num_heads]);
    const V16 ins = all16(tile.steps[t * tile.num_heads] * tile.x[t * tile.stride + channel]);
    const float *b = tile.b + t * tile.stride + at, *c = tile.c + t * tile.stride + at;
    V16 sum = load16(sums + 16 * t);
    for (int i = 0; i < N; i++) {
      row[i] = fma16(ins, load16(b + 16 * i), row[i] * decays);
      sum = fma16(row[i], load16(c + 16 * i), sum);
    }
    store16(sums + 16 * t, sum);
  }
  if (tile.keeps)
    for (int i = 0; i < N; i++) store16(state + at + 16 * i, row[i]);
}

// One channel of a head: its state [state_size], and its outputs [num_rows], out_stride apart.
void scan_channel(const Tile& tile, int64_t state_size, int64_t channel, float skip, float* state, float* out,
                  int64_t out_stride) {
  alignas(64) float sums[TILE * 16] = {};
  int64_t at = 0;
  for (; at + 128 <= state_size; at += 128) scan_row<8>(tile, at, channel, state, sums);
  if (at + 64 <= state_size) scan_row<4>(tile, at, channel, state, sums), at += 64;
  if (at + 32 <= state_size) scan_row<2>(tile, at, channel, state, sums), at += 32;
  if (at < state_size) scan_row<1>(tile, at, channel, state, sums);
  for (int64_t t = 0; t < tile.num_rows; t++)
    out[t * out_stride] = sum16(load16(sums + 16 * t)) + skip * tile.x[t * tile.stride + channel];
}

void gate(const Mamba2& layer, const void* rows, int64_t row, float* y) {
  for (int64_t i = 0; i < layer.inner(); i += 16)
    store16(y + i, load16(y + i) * silu16(read16(layer.conv.kind, rows, row * layer.conv.row_size + i)));
}

// The sum of squares by as many equal leaves, a power of two.
float squares(const float* y, int64_t size, int64_t leaves) {
  const int64_t of_leaf = size / leaves;
  return sum_by_tree(0, leaves, [&](int64_t leaf) { return sum_of_squares(y + leaf * of_leaf, of_leaf); });
}

// y, of one row, as its norm finds it, and its squares.
void sum_row(const Mamba2& layer, const void* rows, int64_t row, float* y, float* sums) {
  if (!layer.norm_first) gate(layer, rows, row, y);
  const int64_t size = layer.inner() / layer.num_norm_groups;
  for (int64_t group = 0; layer.norm_weight && group < layer.num_norm_groups; group++)
    sums[group] = squares(y + group * size, size, layer.num_leaves);
}

// y, of one row, with its norm and its gates -> out.
void finish_row(const Mamba2& layer, const void* rows, int64_t row, float* y, const float* sums, void* out) {
  const int64_t inner = layer.inner(), size = inner / layer.num_norm_groups;
  for (int64_t group = 0; layer.norm_weight && group < layer.num_norm_groups; group++) {
    const float scale = 1.0f / std::sqrt(sums[group] / float(layer.norm_size) + float(layer.eps));
    for (int64_t i = group * size; i < (group + 1) * size; i += 16)
      store16(y + i, load16(y + i) * all16(scale) * load16(layer.norm_weight + i));
  }
  if (layer.norm_first) gate(layer, rows, row, y);
  write_row(layer.conv.kind, y, inner, out, row * inner);
}

float step_of(const Mamba2& layer, int64_t head, float raw) {
  const float step = softplus(raw + layer.step_bias[head]);
  return std::min(std::max(step, float(layer.least_step)), float(layer.largest_step));
}

// All rows of a segment through one head: those that are kept in tiles, then proposals, whose state nobody keeps.
void scan_head(const Mamba2& layer, const Segment& segment, const Work& work, int64_t head) {
  const int64_t heads = layer.num_heads, inner = layer.inner(), size = layer.state_size, stride = layer.conv.size;
  const int64_t b = inner + head / (heads / layer.num_groups) * size, c = b + layer.num_groups * size;
  float* state = segment.state + layer.conv.recurrence;
  for (int64_t begin = 0, end; begin < segment.num_rows(); begin = end) {
    const bool keeps = begin < segment.kept();
    end = std::min(begin + TILE, keeps ? segment.kept() : segment.num_rows());
    const float* row = work.convolved + begin * stride;
    const Tile tile{row, row + b, row + c, stride, work.written + begin * heads + head,
                    work.kept + begin * heads + head, heads, end - begin, segment.begins && begin == 0, keeps};
    for (int64_t p = head * layer.head_dim; p < (head + 1) * layer.head_dim; p++)
      scan_channel(tile, size, p, layer.skip[head], state + p * size, work.y + begin * inner + p, inner);
  }
}

// Row t of a segment, up to its recurrence.
void prepare_row(const Mamba2& layer, const Work& work, int64_t t) {
  work.inputs.convolve(layer.conv, t, work.convolved + t * layer.conv.size);
  const int64_t heads = layer.num_heads;
  for (int64_t h = 0; h < heads; h++) {
    const float step = step_of(layer, h, work.inputs.scalars[t * heads + h]);
    work.written[t * heads + h] = step;
    work.kept[t * heads + h] = std::exp(step * layer.decay[h]);
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" int64_t baton_mamba2(const Mamba2* layer, const Segment* segments, int64_t num_segments, const void* rows,
                                void* out, int64_t num_threads) {
  const HeadParts<Mamba2> parts{prepare_row, scan_head, sum_row, finish_row};
  return fold_heads<Mamba2>(*layer, parts, segments, num_segments, rows, out, num_threads);
}
