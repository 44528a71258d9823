// Decoder layers as they are called, and what they are made of. Python fills these: baton/engine/models/fused.py.
#pragma once

#include "../attention/attention.h"
#include "../linear/linear.h"
#include "../ranks.h"

namespace baton {

// Rows, or heads, are scaled by weights of `kind`; a mean is taken away first where is_layer_norm. No weight: no norm.
struct Norm {
  const void* weight;
  const float* bias;  // null: none
  int64_t kind, is_layer_norm;
};
// Of a product whose inputs ranks have parts of: what is added to their sum (null: nothing), and which of all inputs
// are this rank's (null: its own, as they are).
struct RowParallel {
  const float* bias;
  const int64_t* order;
};
enum Activation : int64_t { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2 };
// Of a mixture. An expert's linears are those of an MLP; the router scores rows of fp32, the shared expert last. Ranks
// have a part of every expert, or each the same number of whole ones, the first ranks the first ones.
struct Experts {
  int64_t num_experts, num_chosen, renormalized;
  int64_t intermediate_size, shared_size;  // of this rank, padded to whole vectors
  int64_t are_whole;
  const Linear *router, *const *gate_up, *const *down;
  const Linear *shared_gate_up, *shared_down;  // null: none
  const RowParallel* down_sums;                // of each expert
  RowParallel shared_down_sum;
};
struct Layer {
  Norm input_norm, attention_out_norm, mlp_norm, mlp_out_norm;
  Norm q_norm, k_norm;
  const Linear *qkv, *output;
  const Linear *gate_up, *down;
  const float *cos, *sin;  // [positions][head_dim], the first half of sin negated; null: heads do not turn
  const Experts* experts;  // in place of gate_up and down; null: none
  RowParallel output_sum, down_sum;
};
// What one weight of q_norm and k_norm is for: a head, each head of its own, all heads of a token.
enum NormOfHeads : int64_t { OF_A_HEAD = 0, OF_EACH_HEAD = 1, OF_ALL_HEADS = 2 };
struct Model {
  int64_t kind, hidden_size, intermediate_size;
  int64_t activation, gated, parallel, norm_of_heads;
  const Layer* layers;
  const Shape* shape;
  double eps, residual_scale;
  double swiglu_alpha, swiglu_limit;  // of CLAMPED_SWIGLU
  Ranks* ranks;          // that have a part of every layer each; null: one has all
  int64_t num_kv_heads;  // of all ranks: with fewer than ranks, several have the same one
};
// The rows of up that are one module's, among those whose inputs are the same.
struct Up {
  const void* values;          // [num_out / 16][rank][16] of the model's kind
  int64_t first_out, num_out;  // multiples of 16
  int64_t first_rank, rank;    // of down, that it multiplies
};
// What an adapter adds to a linear layer: up (down x). No `down`: nothing.
struct LowRank {
  const void* down;  // of all modules one above the other, padded with zeros: [rank / 4][num_in / 32][4][32]
  const Up* ups;
  int64_t num_ups, rank;
  int64_t num_in, num_out;  // of a row of x and of y; multiples of 16
};
enum Adapted : int64_t { QKV = 0, OUTPUT = 1, GATE_UP = 2, DOWN = 3, NUM_ADAPTED = 4 };
// Rows of a step to which one adapter adds.
struct AdapterRows {
  const int64_t* rows;
  int64_t num_rows;
  const LowRank* layers;  // [layers][NUM_ADAPTED]
};
struct Step {
  const Pool* pool;
  const Sequence* seqs;
  int64_t num_seqs;
  const int64_t *positions, *slots;
  int64_t num_tokens, num_threads;
  void* x;  // [num_tokens][hidden_size]
  const AdapterRows* adapters = nullptr;
  int64_t num_adapters = 0;
};

constexpr int64_t SERIAL_ELEMENTS = 1 << 14;  // that cost less than waking a second thread

template <class Row>
void each_row(const Step& step, int64_t size, Row row) {
  const bool parallel = step.num_threads > 1 && step.num_tokens * size > SERIAL_ELEMENTS;
#pragma omp parallel for schedule(static) num_threads(step.num_threads) if (parallel)
  for (int64_t t = 0; t < step.num_tokens; t++) row(t);
}

// What activates `size` gates of a row, times what is beside them where gated: [num_tokens][size or 2 size] -> [][size].
void activate(const Model& model, const Step& step, int64_t size, const void* from, void* to);

// row, of a `size`, normed by the weights of `of` from `index` on.
void norm(const Norm& of, int64_t index, int64_t size, float eps, float* row);

// Of rows x, of which every rank has num_in inputs, those of all ranks, one rank's after the other's, [num_tokens]
// [degree * num_in]; good until the next call of this thread. Null: a rank is lost.
const void* inputs_of_all(const Model& model, const Step& step, int64_t num_in, const void* x);

// Norms all heads of q, and those of k, as one row that ranks have parts of, in qkv. False: a rank is lost.
bool norm_heads_of_ranks(const Model& model, const Step& step, const Layer& layer, void* qkv);

// Of x times a weight of which this rank has some inputs, the part [num_tokens][hidden_size] of linear->y_kind. False: a
// rank is lost.
bool part_of_sum(const Model& model, const Step& step, const Linear* linear, const RowParallel& sum, const void* x,
                 void* part);

// x times a weight of which ranks may have some inputs each -> to, whole sums of the model's kind. False: a rank is lost.
bool sum_linear(const Model& model, const Step& step, const Linear* linear, const RowParallel& sum, const void* x,
                void* to);

// Adds to y, the rows of a layer's linear, what adapters make of x. Both without gaps between rows. Of inputs that ranks
// share it takes those of all, so that it has the bits of one process. False: a rank is lost.
bool adapt(const Model& model, const Step& step, int64_t index, Adapted which, const void* x, void* y);

// Of step's rows x, normed, [num_tokens][hidden_size] -> to, of the same kind. False: a rank is lost.
bool mix_experts(const Model& model, const Step& step, const Experts& experts, const void* x, void* to);

}  // namespace baton

extern "C" {

void baton_linear(const baton::Linear* linear, const void* x, const float* largest, void* y, int64_t num_rows,
                  int64_t num_threads);

// Layers [first, last) on step->x, in place; their KV is in the pool afterwards. Not 0: a rank is lost.
int64_t baton_layers(const baton::Model* model, const baton::Step* step, int64_t first, int64_t last);

// x [num_rows][hidden_size] -> its RMS norm, as before a product; normed may be x.
void baton_norm(const baton::Model* model, const void* x, const void* weight, void* normed, int64_t num_rows,
                int64_t num_threads);
}
