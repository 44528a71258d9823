// Mamba's recurrence (arXiv 2312.00752) over whole sequences, one token after the other:
//
//   state = state * exp(dt A) + (dt x) B       y = state C + D x       [state_size][channels], fp32
//
// dt, B and C are products of convolved rows, so that there are two calls: up to those products, and behind them.
#include "recurrent.h"

namespace baton {

// Projected rows are gates, then channels, as many of either.
struct Mamba {
  Convolution conv;
  int64_t state_size;
  const float *decay, *skip;  // A [state_size][channels], D [channels]
};

// Of all rows of a step, pending ones of each segment first: x and dt [channels], what is written and read [state_size].
struct Selected {
  const float *x, *steps, *written, *read;
};

namespace {

// Sixteen channels of a segment; `first`: its first row among all.
void scan_channels(const Mamba& layer, const Segment& segment, const Selected& selected, int64_t first, int64_t at,
                   const void* rows, void* out) {
  static thread_local Scratch memory;
  const int64_t size = layer.state_size, width = layer.conv.size, kind = layer.conv.kind;
  const int64_t stride = layer.conv.tail_size;  // channels of all ranks
  float *own = segment.state + layer.conv.recurrence + at, *state = (float*)scratch(memory, size * 64);
  for (int64_t n = 0; n < size; n++) store16(state + n * 16, segment.begins ? V16{} : load16(own + n * stride));
  for (int64_t t = 0; t < segment.num_rows(); t++) {
    const V16 x = load16(selected.x + (first + t) * width + at), step = load16(selected.steps + (first + t) * width + at);
    const float *written = selected.written + (first + t) * size, *read = selected.read + (first + t) * size;
    const V16 in = step * x, base2 = step * all16(LOG2_E);
    V16 y = x * load16(layer.skip + at);
    for (int64_t n = 0; n < size; n++) {
      const V16 kept = load16(state + n * 16) * power_of_two(base2 * load16(layer.decay + n * width + at));
      const V16 now = fma16(in, all16(written[n]), kept);
      store16(state + n * 16, now);
      y = fma16(now, all16(read[n]), y);
    }
    if (t + 1 == segment.kept())
      for (int64_t n = 0; n < size; n++) store16(own + n * stride, load16(state + n * 16));
    if (t < segment.num_pending) continue;
    const int64_t row = segment.query_start + t - segment.num_pending;
    write16(kind, out, row * width + at, y * silu16(read16(kind, rows, row * layer.conv.row_size + at)));
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

// rows: projected, of conv.row_size elements of conv.kind; out: convolved rows in fp32, pending ones of each segment
// first. What the convolution will need is kept. Returns 0: ranks do not meet here.
extern "C" int64_t baton_mamba_convolve(const Mamba* layer, const Segment* segments, int64_t num_segments,
                                        const void* rows, float* out, int64_t num_threads) {
  const Convolution& conv = layer->conv;
  thread_local Scratch memory;
  thread_local std::vector<Inputs> inputs;
  int64_t total = 0;
  for (int64_t s = 0; s < num_segments; s++) total += Inputs::floats(conv, segments[s]);
  float* at = (float*)scratch(memory, total * 4);
  inputs.resize(num_segments);
  for (int64_t s = 0; s < num_segments; s++) {
    inputs[s] = {at, nullptr};
    at += Inputs::floats(conv, segments[s]);
  }
  const Inputs* own = inputs.data();
  num_threads = std::max<int64_t>(1, num_threads);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t s = 0; s < num_segments; s++) own[s].read(conv, segments[s], rows);
    share_rows(segments, num_segments,
               [&](int64_t s, int64_t t, int64_t row) { own[s].convolve(conv, t, out + row * conv.size); });
#pragma omp for schedule(static)
    for (int64_t s = 0; s < num_segments; s++) own[s].keep(conv, segments[s]);
  }
  return 0;
}

// rows: as above; out: rows of conv.size elements of conv.kind. States are folded forward.
extern "C" void baton_mamba_scan(const Mamba* layer, const Selected* selected, const Segment* segments,
                                 int64_t num_segments, const void* rows, void* out, int64_t num_threads) {
  const int64_t blocks = layer->conv.size / 16;
  thread_local std::vector<int64_t> firsts;
  firsts.assign(num_segments + 1, 0);
  for (int64_t s = 0; s < num_segments; s++) firsts[s + 1] = firsts[s] + segments[s].num_rows();
  const int64_t* first = firsts.data();
  num_threads = std::max<int64_t>(1, num_threads);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t item = 0; item < num_segments * blocks; item++) {
    const int64_t s = item / blocks;
    scan_channels(*layer, segments[s], *selected, first[s], item % blocks * 16, rows, out);
  }
}
