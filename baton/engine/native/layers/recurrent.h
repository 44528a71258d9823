// What layers with a state share: segments of sequences, the short convolution in front of the recurrence, and the walk of a
// step through a recurrence of heads.
//
// A state block holds of each layer the last inputs of the convolution (its tail), then the recurrence's own state, fp32.
// A token is folded into it by the same operations in the same order wherever a chunk begins, so that reading a prompt in
// pieces, or again, gives the same bits as decoding it.
#pragma once

#include "../ranks.h"

namespace baton {

// One sequence's share of a step: rows [query_start, query_start + query_len). Before them `num_pending` rows out of
// `drafts` are folded, which a step before computed as proposals and which are certain now. The state is kept as it
// stands behind the first num_certain rows; the rest are proposals, whose inputs go to `drafts`.
struct Segment {
  int64_t query_start, query_len, num_certain, num_pending;
  int64_t begins;  // at its first token: what the block holds is another sequence's
  float* state;
  float* drafts;  // null where nobody proposes

  int64_t num_rows() const { return num_pending + query_len; }
  int64_t kept() const { return num_pending + num_certain; }  // the state is kept behind so many rows
};

// Channels [first, first + size) of projected rows go through the convolution: [taps][size] weights, oldest tap first.
struct Convolution {
  int64_t kind, first, size, taps, row_size;  // row_size: elements of a projected row
  int64_t num_scalars, first_scalar;           // of a row, that drafts keep beside their channels
  const float *weight, *bias;                  // bias null: none
  // Ranks that have some heads each share a state block. Its tail has rows of tail_size channels, of which those of this
  // process are up to three runs, one after the other; its part of the recurrence begins `recurrence` floats into the block.
  int64_t tail_size, run_first[3], run_size[3], recurrence;

  // A tail of this process [taps - 1][size], from a block or into it.
  template <class Copy>
  void each_run(const Copy& copy) const {
    for (int64_t tap = 0, at = 0; tap + 1 < taps; tap++)
      for (int run = 0; run < 3; at += run_size[run++]) copy(at, tap * tail_size + run_first[run], run_size[run] * 4);
  }
  void read_tail(const float* block, float* to) const {
    each_run([&](int64_t own, int64_t in_block, int64_t bytes) { std::memcpy(to + own, block + in_block, bytes); });
  }
  void write_tail(const float* from, float* block) const {
    each_run([&](int64_t own, int64_t in_block, int64_t bytes) { std::memcpy(block + in_block, from + own, bytes); });
  }
};

// What ranks with a part of a layer each exchange in the middle of it. `span` neighbours share a norm: they add
// what each has summed for it, by the tree of all sums. Where several have the same channels none writes a tail before all
// have read it. ranks null: neither is so.
struct Meeting {
  Ranks* ranks;
  int64_t span;

  // sums: of each row one, where norms are shared. Not 0: a rank is lost.
  int64_t meet(float* sums, int64_t num_rows) const {
    static thread_local std::vector<float> exchanged;
    if (!ranks) return 0;
    const int64_t count = span > 1 ? num_rows : 1;
    exchanged.resize((1 + ranks->degree) * count);
    float *own = exchanged.data(), *all = own + count;
    std::copy_n(span > 1 ? sums : own, count, own);
    if (baton_gather_ranks(ranks, own, count * 4, all)) return 1;
    for (int64_t row = 0; span > 1 && row < num_rows; row++)
      sums[row] = sum_by_tree(ranks->rank / span * span, span, [&](int64_t rank) { return all[rank * count + row]; });
    return 0;
  }
};

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// A segment's inputs in fp32: the tail, then its rows; and the scalars of its rows.
struct Inputs {
  float *channels, *scalars;  // [taps - 1 + num_rows][size], [num_rows][num_scalars], null where rows have none

  static int64_t floats(const Convolution& conv, const Segment& segment) {
    return (conv.taps - 1 + segment.num_rows()) * conv.size + rounded_up(segment.num_rows() * conv.num_scalars, 16);
  }

  void read(const Convolution& conv, const Segment& segment, const void* rows) const {
    const int64_t tail = (conv.taps - 1) * conv.size, draft = conv.size + conv.num_scalars;
    if (segment.begins) std::memset(channels, 0, tail * 4);
    else conv.read_tail(segment.state, channels);
    for (int64_t t = 0; t < segment.num_rows(); t++) {
      float *to = channels + tail + t * conv.size, *scalar = scalars + t * conv.num_scalars;
      if (t < segment.num_pending) {
        std::memcpy(to, segment.drafts + t * draft, conv.size * 4);
        std::copy_n(segment.drafts + t * draft + conv.size, conv.num_scalars, scalar);
        continue;
      }
      const int64_t at = (segment.query_start + t - segment.num_pending) * conv.row_size;
      read_row(conv.kind, rows, at + conv.first, conv.size, to);
      for (int64_t i = 0; i < conv.num_scalars; i++) scalar[i] = read1(conv.kind, rows, at + conv.first_scalar + i);
    }
  }

  // Behind `read` of the whole segment: the tail of what is kept, and the inputs of proposals.
  void keep(const Convolution& conv, const Segment& segment) const {
    const int64_t tail = (conv.taps - 1) * conv.size, draft = conv.size + conv.num_scalars;
    conv.write_tail(channels + segment.kept() * conv.size, segment.state);
    for (int64_t t = segment.kept(); t < segment.num_rows(); t++) {
      float* to = segment.drafts + (t - segment.kept()) * draft;
      std::memcpy(to, channels + tail + t * conv.size, conv.size * 4);
      std::copy_n(scalars + t * conv.num_scalars, conv.num_scalars, to + conv.size);
    }
  }

  // Row t behind the convolution and its activation, [size].
  void convolve(const Convolution& conv, int64_t t, float* to) const {
    for (int64_t i = 0; i < conv.size; i += 16) {
      V16 sum = conv.bias ? load16(conv.bias + i) : V16{};
      for (int64_t tap = 0; tap < conv.taps; tap++)
        sum = fma16(load16(channels + (t + tap) * conv.size + i), load16(conv.weight + tap * conv.size + i), sum);
      store16(to + i, silu16(sum));
    }
  }
};

// f(s, t, row) of row t of segment s, which is `row` of all; the threads of a parallel region share all rows and then meet.
template <class Function>
void share_rows(const Segment* segments, int64_t num_segments, const Function& f) {
  int64_t total = 0;
  for (int64_t s = 0; s < num_segments; s++) total += segments[s].num_rows();
  const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
  const int64_t begin = total * thread / threads, end = total * (thread + 1) / threads;
  for (int64_t s = 0, first = 0; s < num_segments; first += segments[s++].num_rows()) {
    const int64_t upto = std::min(end - first, segments[s].num_rows());
    for (int64_t t = std::max<int64_t>(begin - first, 0); t < upto; t++) f(s, t, first + t);
  }
#pragma omp barrier
}

// What a segment's rows need on their way through a recurrence of heads, pending ones first.
struct Work {
  Inputs inputs;
  float *written, *kept;   // [num_rows][num_heads]: how much of a row goes into the state, and how much of the state stays
  float *convolved, *y;    // [num_rows][conv.size], [num_rows][inner]
};

// The parts of a recurrence of heads. They run over rows, heads and rows again, on several threads.
template <class Layer>
struct HeadParts {
  void (*prepare_row)(const Layer&, const Work&, int64_t t);  // row t of a segment, up to its recurrence
  void (*scan_head)(const Layer&, const Segment&, const Work&, int64_t head);
  void (*sum_row)(const Layer&, const void* rows, int64_t row, float* y, float* sums);  // sums [num_sums()] for norms of y
  void (*finish_row)(const Layer&, const void* rows, int64_t row, float* y, const float* sums, void* out);
};

// rows: projected, of conv.row_size elements, out: rows of inner elements, both of conv.kind. States are folded forward.
// Not 0: a rank is lost.
template <class Layer>
int64_t fold_heads(const Layer& layer, const HeadParts<Layer>& parts, const Segment* segments, int64_t num_segments,
                const void* rows, void* out, int64_t num_threads) {
  const Convolution& conv = layer.conv;
  const int64_t heads = layer.num_heads, inner = layer.inner(), num_sums = layer.num_sums();
  if (!num_segments) return 0;
  const Segment& last = segments[num_segments - 1];
  const int64_t num_rows = last.query_start + last.query_len;
  thread_local Scratch memory;
  thread_local std::vector<Work> works;
  int64_t total = rounded_up(num_rows * num_sums, 16);
  for (int64_t s = 0; s < num_segments; s++) {
    const int64_t count = segments[s].num_rows();
    total += Inputs::floats(conv, segments[s]) + 2 * rounded_up(count * heads, 16) + count * (conv.size + inner);
  }
  float* at = (float*)scratch(memory, total * 4);
  works.resize(num_segments);
  const auto take = [&](int64_t floats) { return at += floats, at - floats; };
  for (int64_t s = 0; s < num_segments; s++) {
    const int64_t count = segments[s].num_rows();
    Work& work = works[s];
    work.inputs.channels = take((conv.taps - 1 + count) * conv.size);
    work.inputs.scalars = take(rounded_up(count * conv.num_scalars, 16));
    work.written = take(rounded_up(count * heads, 16)), work.kept = take(rounded_up(count * heads, 16));
    work.convolved = take(count * conv.size), work.y = take(count * inner);
  }
  float* const sums = take(rounded_up(num_rows * num_sums, 16));
  const Work* own = works.data();  // threads would each find their own vector
  // f(row, its y, its sums) of each new row.
  const auto each_new_row = [&](const auto& f) {
    share_rows(segments, num_segments, [&](int64_t s, int64_t t, int64_t) {
      const int64_t row = segments[s].query_start + t - segments[s].num_pending;
      if (t >= segments[s].num_pending) f(row, own[s].y + t * inner, sums + row * num_sums);
    });
  };
  int64_t lost = 0;
  num_threads = std::max<int64_t>(1, num_threads);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t s = 0; s < num_segments; s++) own[s].inputs.read(conv, segments[s], rows);
    share_rows(segments, num_segments, [&](int64_t s, int64_t t, int64_t) { parts.prepare_row(layer, own[s], t); });
#pragma omp for schedule(static)
    for (int64_t item = 0; item < num_segments * heads; item++)
      parts.scan_head(layer, segments[item / heads], own[item / heads], item % heads);
    if (layer.meeting.ranks) {
      each_new_row([&](int64_t row, float* y, float* own_sums) { parts.sum_row(layer, rows, row, y, own_sums); });
#pragma omp single
      lost = layer.meeting.meet(sums, num_rows);
    }
#pragma omp for schedule(static)
    for (int64_t s = 0; s < num_segments; s++) own[s].inputs.keep(conv, segments[s]);
    each_new_row([&](int64_t row, float* y, float* own_sums) {
      if (!layer.meeting.ranks) parts.sum_row(layer, rows, row, y, own_sums);
      parts.finish_row(layer, rows, row, y, own_sums, out);
    });
  }
  return lost;
}

}  // namespace baton
