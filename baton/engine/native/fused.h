// Decoder layers as they are called, and what they are made of. Python fills these: baton/engine/models/fused.py.
#pragma once

#include "attention/attention.h"
#include "linear/linear.h"

namespace baton {

struct Layer {
  const void* input_norm;
  const Linear* qkv;
  const void *q_norm, *k_norm;  // null: none
  const Linear* output;
  const void* mlp_norm;
  const Linear *gate_up, *down;
};
struct Model {
  int64_t kind, hidden_size, intermediate_size;
  const float *cos, *sin;  // [positions][head_dim], the first half of sin negated
  const Layer* layers;
  const Shape* shape;
  double eps;
};
struct Step {
  const Pool* pool;
  const Sequence* seqs;
  int64_t num_seqs;
  const int64_t *positions, *slots;
  int64_t num_tokens, num_threads;
  void* x;  // [num_tokens][hidden_size]
};

}  // namespace baton

extern "C" {

void baton_linear(const baton::Linear* linear, const void* x, void* y, int64_t num_rows, int64_t num_threads);

// Layers [first, last) on step->x, in place; their KV is in the pool afterwards.
void baton_layers(const baton::Model* model, const baton::Step* step, int64_t first, int64_t last);

// x [num_rows][hidden_size] -> normed, as before a product; normed may be x.
void baton_norm(const baton::Model* model, const void* x, const void* weight, void* normed, int64_t num_rows,
                int64_t num_threads);
}
