// The gated delta rule (arXiv 2412.06464) over whole sequences, one token after the other:
//
//   state = g state      state = state + k (b (v - k state))      y = q state      [key_dim][value_dim] of each head, fp32
//
// Sixteen values of a head depend on no others, so their part of the state stays in the first cache over a tile of tokens.
#include "recurrent.h"

namespace baton {

// Projected rows are gates [inner], then q and k [num_key_heads][key_dim] each, v [inner], then of each head how much it
// writes, of each its raw step.
struct DeltaNet {
  Convolution conv;
  int64_t num_heads, num_key_heads, key_dim, value_dim;
  const float *step_bias, *decay;  // of each head
  const float* norm_weight;        // [value_dim], of every head
  Meeting meeting;
  double eps, length_eps;

  int64_t num_sums() const { return 0; }  // a norm is of one head
  int64_t inner() const { return num_heads * value_dim; }
  int64_t keys() const { return num_key_heads * key_dim; }
};

namespace {

constexpr int64_t TILE = 32;  // tokens at a time: their q and k stay in the first cache while a head's values pass
constexpr int CHAINS = 4;     // sums that do not wait for each other

// Some tokens of a segment, of one head.
struct Tile {
  const float *q, *k, *v;       // of the first row; rows are `stride` apart
  const float *written, *kept;  // num_heads apart
  int64_t stride, num_heads, num_rows;
};

inline V16 joined(const V16* sums) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }

// Sixteen values of a head, their state [key_dim][16] -> out, out_stride apart.
void scan_values(const Tile& tile, int64_t key_dim, int64_t at, float* state, float* out, int64_t out_stride) {
  for (int64_t t = 0; t < tile.num_rows; t++) {
    const float *q = tile.q + t * tile.stride, *k = tile.k + t * tile.stride;
    const V16 kept = all16(tile.kept[t * tile.num_heads]);
    V16 known[CHAINS] = {}, read[CHAINS] = {};
    for (int64_t i = 0; i < key_dim; i += CHAINS)
      for (int c = 0; c < CHAINS; c++) known[c] = fma16(load16(state + (i + c) * 16), all16(k[i + c]), known[c]);
    const V16 value = load16(tile.v + t * tile.stride + at) - joined(known) * kept;
    const V16 change = value * all16(tile.written[t * tile.num_heads]);
    for (int64_t i = 0; i < key_dim; i += CHAINS)
      for (int c = 0; c < CHAINS; c++) {
        const V16 row = fma16(change, all16(k[i + c]), load16(state + (i + c) * 16) * kept);
        store16(state + (i + c) * 16, row);
        read[c] = fma16(row, all16(q[i + c]), read[c]);
      }
    store16(out + t * out_stride + at, joined(read));
  }
}

// All rows of a segment through one head: those that are kept in tiles, then proposals, whose state nobody keeps.
void scan_head(const DeltaNet& layer, const Segment& segment, const Work& work, int64_t head) {
  static thread_local Scratch memory;
  const int64_t size = layer.key_dim, width = layer.value_dim, stride = layer.conv.size, inner = layer.inner();
  const int64_t q = head / (layer.num_heads / layer.num_key_heads) * size;
  float* own = segment.state + layer.conv.recurrence + head * size * width;
  float* state = (float*)scratch(memory, size * width * 4);  // sixteen values at a time, [width / 16][size][16]
  for (int64_t at = 0; at < width; at += 16)
    for (int64_t i = 0; i < size; i++)
      store16(state + at * size + i * 16, segment.begins ? V16{} : load16(own + i * width + at));
  for (int64_t begin = 0, end; begin < segment.num_rows(); begin = end) {
    const bool keeps = begin < segment.kept();
    end = std::min(begin + TILE, keeps ? segment.kept() : segment.num_rows());
    const float* row = work.convolved + begin * stride;
    const int64_t scalar = begin * layer.num_heads + head;
    const Tile tile{row + q, row + layer.keys() + q, row + 2 * layer.keys() + head * width, work.written + scalar,
                    work.kept + scalar, stride, layer.num_heads, end - begin};
    for (int64_t at = 0; at < width; at += 16)
      scan_values(tile, size, at, state + at * size, work.y + begin * inner + head * width, inner);
    if (keeps && end == segment.kept())
      for (int64_t at = 0; at < width; at += 16)
        for (int64_t i = 0; i < size; i++) store16(own + i * width + at, load16(state + at * size + i * 16));
  }
}

// Queries and keys of a convolved row to length one; queries over the root of their size as well.
void to_length_one(const DeltaNet& layer, float* row) {
  const float root = std::sqrt(float(layer.key_dim));
  for (int64_t head = 0; head < 2 * layer.num_key_heads; head++) {
    float* x = row + head * layer.key_dim;
    float scale = 1.0f / std::sqrt(sum_of_squares(x, layer.key_dim) + float(layer.length_eps));
    if (head < layer.num_key_heads) scale = scale / root;
    for (int64_t i = 0; i < layer.key_dim; i += 16) store16(x + i, load16(x + i) * all16(scale));
  }
}

// Row t of a segment, up to its recurrence.
void prepare_row(const DeltaNet& layer, const Work& work, int64_t t) {
  float* row = work.convolved + t * layer.conv.size;
  work.inputs.convolve(layer.conv, t, row);
  to_length_one(layer, row);
  const int64_t heads = layer.num_heads;
  const float *written = work.inputs.scalars + t * 2 * heads, *steps = written + heads;
  for (int64_t h = 0; h < heads; h++) {
    const float step = softplus(steps[h] + layer.step_bias[h]);
    work.written[t * heads + h] = 1.0f / (1.0f + std::exp(-written[h]));
    work.kept[t * heads + h] = std::exp(step * layer.decay[h]);
  }
}

void sum_row(const DeltaNet&, const void*, int64_t, float*, float*) {}

// y, of one row, with its norms and its gates -> out.
void finish_row(const DeltaNet& layer, const void* rows, int64_t row, float* y, const float*, void* out) {
  const int64_t kind = layer.conv.kind, inner = layer.inner(), size = layer.value_dim;
  for (int64_t begin = 0; begin < inner; begin += size) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(y + begin, size) / float(size) + float(layer.eps));
    for (int64_t i = 0; i < size; i += 16) {
      const V16 gates = silu16(read16(kind, rows, row * layer.conv.row_size + begin + i));
      const V16 normed = load16(y + begin + i) * all16(scale) * load16(layer.norm_weight + i);
      write16(kind, out, row * inner + begin + i, normed * gates);
    }
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" int64_t baton_delta_net(const DeltaNet* layer, const Segment* segments, int64_t num_segments,
                                   const void* rows, void* out, int64_t num_threads) {
  const HeadParts<DeltaNet> parts{prepare_row, scan_head, sum_row, finish_row};
  return fold_heads<DeltaNet>(*layer, parts, segments, num_segments, rows, out, num_threads);
}
