// MLPs of a layer: the activation between their products, and a mixture of experts.
//
// A row's experts are those that its router scores highest, in fp32, the lower index first among equals. Rows are put in
// order of their expert (a counting sort), so that each expert's linears are called once, and only those that were
// chosen; a row then adds the outputs of its experts in the order in which it chose them. No sum depends on other rows.
#include "fused.h"

namespace baton {

namespace {

// (up + 1) * gate * sigmoid(alpha * gate), gates up to a limit, ups within it.
void clamped_swiglu(const Model& model, const Step& step, int64_t size, const void* from, void* to) {
  const int64_t kind = model.kind;
  const V16 limit = all16(float(model.swiglu_limit));
  const float factor = -LOG2_E * float(model.swiglu_alpha);
  each_row(step, size, [&](int64_t t) {
    for (int64_t i = 0; i < size; i += 16) {
      const V16 gate = min16(read16(kind, from, t * 2 * size + i), limit);
      const V16 up = min16(max16(read16(kind, from, t * 2 * size + size + i), -limit), limit);
      write16(kind, to, t * size + i, gated16((up + 1.0f) * gate, gate * factor));
    }
  });
}

}  // namespace

void activate(const Model& model, const Step& step, int64_t size, const void* from, void* to) {
  const int64_t kind = model.kind, width = model.gated ? 2 * size : size;
  const bool is_silu = model.activation == SILU;
  if (model.activation == CLAMPED_SWIGLU) return clamped_swiglu(model, step, size, from, to);
  each_row(step, size, [&](int64_t t) {
    for (int64_t i = 0; i < size; i += 16) {
      const V16 gate = read16(kind, from, t * width + i);
      // gelu_tanh(x) = x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
      V16 power = gate * -LOG2_E;
      if (!is_silu) power = (gate + gate * gate * gate * 0.044715f) * (-LOG2_E * 1.59576912f);
      V16 y = gated16(gate, power);
      if (model.gated) y = y * read16(kind, from, t * width + size + i);
      write16(kind, to, t * size + i, y);
    }
  });
}

namespace {

// The `count` largest of scores, best first, and their share of all or of one another.
void choose(const Experts& experts, const float* scores, int32_t* chosen, float* weights) {
  const int64_t size = experts.num_experts, count = experts.num_chosen;
  const auto is_taken = [&](int64_t slot, int64_t e) { return std::find(chosen, chosen + slot, e) != chosen + slot; };
  for (int64_t slot = 0; slot < count; slot++) {
    int64_t best = -1;
    for (int64_t e = 0; e < size; e++)
      if ((best < 0 || scores[e] > scores[best]) && !is_taken(slot, e)) best = e;
    chosen[slot] = int32_t(best);
  }
  float total = 0, of_chosen = 0;
  for (int64_t e = 0; e < size; e++) total += std::exp(scores[e] - scores[chosen[0]]);
  for (int64_t slot = 0; slot < count; slot++) {
    weights[slot] = std::exp(scores[chosen[slot]] - scores[chosen[0]]) / total;
    of_chosen += weights[slot];
  }
  if (experts.renormalized)
    for (int64_t slot = 0; slot < count; slot++) weights[slot] /= of_chosen;
}

// The rows between the products of an MLP on rows [step.num_tokens], in `between`.
void* enter_mlp(const Model& model, const Step& step, const Linear* gate_up, int64_t size, const void* x, char* between) {
  char* activated = between + step.num_tokens * 2 * size * bytes_of(model.kind);
  baton_linear(gate_up, x, nullptr, between, step.num_tokens, step.num_threads);
  activate(model, step, size, between, activated);
  return activated;
}

// Rows in order of their expert: those of expert e end at ends[e].
struct Sorted {
  const char* rows;
  const int64_t* ends;
  int64_t begin(int64_t e) const { return e ? ends[e - 1] : 0; }
};

// Rows whose experts run in one call. Threads wait for one another at its end, for half a panel on average: with 64 rows
// that is an eighth of the time of an expert of 512 outputs. Rows of 512 are quantized and multiplied in the third cache.
constexpr int64_t TOGETHER = 512;

// Runs experts [first, last) on their rows -> `outputs`.
void run_experts(const Model& model, const Step& step, const Experts& experts, const Sorted& sorted, int64_t first,
                 int64_t last, char* between, char* outputs) {
  thread_local std::vector<Product> ups, downs;
  const int64_t width = bytes_of(model.kind), bytes = model.hidden_size * width;
  const int64_t size = experts.intermediate_size, gated = model.gated ? 2 * size : size;
  Step own = step;
  for (int64_t e = first; e < last;) {
    const int64_t begin = sorted.begin(e);
    char* activated = between + (sorted.ends[last - 1] - begin) * gated * width;
    ups.clear(), downs.clear();
    for (own.num_tokens = 0; e < last && own.num_tokens < TOGETHER; e++) {
      const int64_t at = sorted.begin(e), count = sorted.ends[e] - at;
      if (!count) continue;
      char* entered = activated + own.num_tokens * size * width;
      ups.push_back({experts.gate_up[e], sorted.rows + at * bytes, nullptr, between + own.num_tokens * gated * width, count});
      downs.push_back({experts.down[e], entered, nullptr, outputs + at * bytes, count});
      own.num_tokens += count;
    }
    if (!own.num_tokens) return;
    multiply_all(ups.data(), ups.size(), step.num_threads);
    activate(model, own, size, between, activated);
    multiply_all(downs.data(), downs.size(), step.num_threads);
  }
}

// As run_experts, of experts that this rank has a part of each: parts of their outputs. False: a rank is lost.
bool run_parts(const Model& model, const Step& step, const Experts& experts, const Sorted& sorted, char* between,
               int64_t output_bytes, char* outputs) {
  const int64_t bytes = model.hidden_size * bytes_of(model.kind);
  Step own = step;
  for (int64_t e = 0; e < experts.num_experts; e++) {
    const int64_t begin = sorted.begin(e);
    if ((own.num_tokens = sorted.ends[e] - begin) == 0) continue;
    const char* rows = sorted.rows + begin * bytes;
    void* entered = enter_mlp(model, own, experts.gate_up[e], experts.intermediate_size, rows, between);
    char* const parts = outputs + begin * output_bytes;
    if (!part_of_sum(model, own, experts.down[e], experts.down_sums[e], entered, parts)) return false;
  }
  return true;
}

// Parts of all ranks -> outputs of experts, in one turn for all of them: each row by itself, then the bias of its expert.
bool sum_parts(const Model& model, const Step& step, const Experts& experts, const Sorted& sorted, float* parts,
               char* outputs) {
  const int64_t hidden = model.hidden_size, count = sorted.ends[experts.num_experts - 1];
  if (baton_sum_ranks(model.ranks, parts, FP32, count, hidden, nullptr, FP32, parts, step.num_threads)) return false;
  for (int64_t e = 0; e < experts.num_experts; e++)
    for (int64_t row = sorted.begin(e); row < sorted.ends[e]; row++)
      for (int64_t i = 0; i < hidden; i += 16) {
        const V16 sum = load16(parts + row * hidden + i);
        const float* bias = experts.down_sums[e].bias;
        write16(model.kind, outputs, row * hidden + i, bias ? sum + load16(bias + i) : sum);
      }
  return true;
}

// The outputs of the experts of every rank, on all of them: each has neighbouring rows of `outputs`.
bool gather_outputs(const Model& model, const Experts& experts, const Sorted& sorted, char* outputs) {
  thread_local Scratch memory;
  const int64_t degree = model.ranks->degree, each = experts.num_experts / degree;
  const int64_t bytes = model.hidden_size * bytes_of(model.kind);
  const auto begin = [&](int64_t rank) { return sorted.begin(rank * each) * bytes; };
  const auto size = [&](int64_t rank) { return sorted.ends[(rank + 1) * each - 1] * bytes - begin(rank); };
  int64_t most = 0;
  for (int64_t rank = 0; rank < degree; rank++) most = std::max(most, size(rank));
  char *own = scratch(memory, most * (1 + degree)), *all = own + most;
  std::memcpy(own, outputs + begin(model.ranks->rank), size(model.ranks->rank));
  if (baton_gather_ranks(model.ranks, own, most, all)) return false;
  for (int64_t rank = 0; rank < degree; rank++) std::memcpy(outputs + begin(rank), all + rank * most, size(rank));
  return true;
}

// Runs each row's experts -> the outputs of those of all ranks; where sums are fast, of this rank's. False: a rank is lost.
bool run_chosen(const Model& model, const Step& step, const Experts& experts, const Sorted& sorted, char* between,
                char* outputs) {
  const int64_t count = experts.num_experts, bytes = model.hidden_size * bytes_of(model.kind);
  const bool fast = model.ranks && model.ranks->fast;
  if (model.ranks && experts.are_whole) {
    const int64_t each = count / model.ranks->degree, first = model.ranks->rank * each;
    if (fast) std::memset(outputs, 0, sorted.ends[count - 1] * bytes);
    run_experts(model, step, experts, sorted, first, first + each, between, outputs);
    return fast || gather_outputs(model, experts, sorted, outputs);
  }
  if (!model.ranks) return run_experts(model, step, experts, sorted, 0, count, between, outputs), true;
  if (fast) return run_parts(model, step, experts, sorted, between, bytes, outputs);
  thread_local Scratch memory;
  const int64_t part_bytes = model.hidden_size * 4;
  char* parts = scratch(memory, sorted.ends[count - 1] * part_bytes);
  return run_parts(model, step, experts, sorted, between, part_bytes, parts) &&
         sum_parts(model, step, experts, sorted, (float*)parts, outputs);
}

}  // namespace

bool mix_experts(const Model& model, const Step& step, const Experts& experts, const void* x, void* to) {
  static thread_local Scratch memory;
  static thread_local std::vector<int64_t> starts, places;  // of an expert's rows; of a row's slot among all
  const int64_t rows = step.num_tokens, hidden = model.hidden_size, count = experts.num_chosen, kind = model.kind;
  const int64_t bytes = hidden * bytes_of(kind), num_scores = experts.router->num_out;
  const int64_t widest = std::max(experts.intermediate_size, experts.shared_size);
  const int64_t sizes[] = {rows * hidden * 4, rows * num_scores * 4, rows * count * 4, rows * count * 4,
                           rows * count * bytes, rows * count * bytes, rows * bytes, rows * count * 3 * widest * 4};
  int64_t total = 0;
  for (const int64_t size : sizes) total += rounded_up(size, LINE);
  char* at = scratch(memory, total);
  int part = 0;
  const auto take = [&] {
    char* const taken = at;
    at += rounded_up(sizes[part++], LINE);
    return taken;
  };
  float *wide = (float*)take(), *scores = (float*)take();
  int32_t* chosen = (int32_t*)take();
  float* weights = (float*)take();
  char *sorted = take(), *outputs = take(), *shared = take(), *between = take();

  each_row(step, hidden, [&](int64_t t) {
    read_row(kind, x, t * hidden, hidden, wide + t * hidden);
  });
  baton_linear(experts.router, wide, nullptr, scores, rows, step.num_threads);
  starts.assign(experts.num_experts + 1, 0), places.resize(rows * count);
  each_row(step, num_scores * count, [&](int64_t t) {
    choose(experts, scores + t * num_scores, chosen + t * count, weights + t * count);
  });
  for (int64_t i = 0; i < rows * count; i++) starts[chosen[i] + 1]++;
  for (int64_t e = 0; e < experts.num_experts; e++) starts[e + 1] += starts[e];
  for (int64_t i = 0; i < rows * count; i++) places[i] = starts[chosen[i]]++;  // from here on the end of the expert's rows
  const int64_t* const place = places.data();  // of this thread: those that work beside it have vectors of their own
  each_row(step, hidden * count, [&](int64_t t) {
    for (int64_t slot = 0; slot < count; slot++)
      std::memcpy(sorted + place[t * count + slot] * bytes, (const char*)x + t * bytes, bytes);
  });
  if (!run_chosen(model, step, experts, {sorted, starts.data()}, between, outputs)) return false;
  const bool fast = model.ranks && model.ranks->fast;
  if (experts.shared_gate_up) {
    void* entered = enter_mlp(model, step, experts.shared_gate_up, experts.shared_size, x, between);
    const auto multiply = fast ? part_of_sum : sum_linear;
    if (!multiply(model, step, experts.shared_down, experts.shared_down_sum, entered, shared)) return false;
  }
  each_row(step, hidden, [&](int64_t t) {
    const float share = experts.shared_gate_up ? 1 / (1 + std::exp(-scores[t * num_scores + experts.num_experts])) : 0;
    for (int64_t i = 0; i < hidden; i += 16) {
      V16 sum{};
      for (int64_t slot = 0; slot < count; slot++)
        sum = sum + read16(kind, outputs, place[t * count + slot] * hidden + i) * weights[t * count + slot];
      if (experts.shared_gate_up) sum = sum + read16(kind, shared, t * hidden + i) * share;
      write16(kind, to, t * hidden + i, sum);
    }
  });
  return !fast || !baton_sum_ranks(model.ranks, to, kind, rows, hidden, nullptr, kind, to, step.num_threads);
}

}  // namespace baton
