// The layers of a step in one call: the work between the linear products and attention, and the calls of both.
//
// Each row is computed by itself and in one order. Between operations rows have the compute dtype, as in the torch code
// that this replaces (models/decoder.py); within one they are fp32: a rotation or an activation is rounded once.
#include "fused.h"

namespace baton {
namespace {

// from[at..] scaled to a root mean square of one, times weight.
void norm(const float* from, const void* weight, int64_t kind, int64_t size, float eps, float* to) {
  const float scale = 1 / std::sqrt(sum_of_squares(from, size) / float(size) + eps);
  for (int64_t i = 0; i < size; i += 16) store16(to + i, load16(from + i) * scale * read16(kind, weight, i));
}

}  // namespace

// As `norm`, of any kind: a mean taken away first, a bias added.
void norm(const Norm& of, int64_t index, int64_t size, float eps, float* row) {
  if (of.is_layer_norm) {
    V16 sum{};
    for (int64_t i = 0; i < size; i += 16) sum = sum + load16(row + i);
    const float mean = sum16(sum) / float(size);
    for (int64_t i = 0; i < size; i += 16) store16(row + i, load16(row + i) - mean);
  }
  norm(row, (const char*)of.weight + index * bytes_of(of.kind), of.kind, size, eps, row);
  if (of.bias)
    for (int64_t i = 0; i < size; i += 16) store16(row + i, load16(row + i) + load16(of.bias + index + i));
}

namespace {

// x += delta (null: nothing), normed before by `of_delta` and scaled; normed = norm(x) (no weight: not wanted). normed
// may be delta.
void add_norm(const Model& model, const Step& step, const void* delta, const Norm& of_delta, const Norm& of_row,
              void* normed) {
  const int64_t size = model.hidden_size, kind = model.kind;
  const float scale = float(model.residual_scale);
  each_row(step, size, [&](int64_t t) {
    thread_local Scratch memory;
    float* row = (float*)scratch(memory, size * 8);
    float* added = row + size;
    if (of_delta.weight) {
      read_row(kind, delta, t * size, size, added);
      norm(of_delta, 0, size, float(model.eps), added);
    }
    for (int64_t i = 0; i < size; i += 16) {
      V16 x = read16(kind, step.x, t * size + i);
      if (delta) {
        V16 y = of_delta.weight ? rounded16(kind, load16(added + i)) : read16(kind, delta, t * size + i);
        if (scale != 1) y = rounded16(kind, y * scale);
        x = rounded16(kind, x + y);
        write16(kind, step.x, t * size + i, x);
      }
      store16(row + i, x);
    }
    if (!of_row.weight) return;
    norm(of_row, 0, size, float(model.eps), row);
    write_row(kind, row, size, normed, t * size);
  });
}

// The `size` elements from `at` on, of all heads of q or k, as one row.
void norm_heads(const Model& model, const Norm& of, void* qkv, int64_t at, int64_t size) {
  thread_local Scratch memory;
  float* row = (float*)scratch(memory, size * 4);
  read_row(model.kind, qkv, at, size, row);
  norm(of, 0, size, float(model.eps), row);
  write_row(model.kind, row, size, qkv, at);
}

// Rotates the queries of qkv where they are; keys, rotated, and values go to the pool.
void rotate_and_store(const Model& model, const Step& step, const Layer& layer, int64_t index, void* qkv) {
  const Pool& pool = *step.pool;
  const int64_t size = pool.head_dim, half = size / 2, kind = model.kind;
  const int64_t num_heads = model.shape->num_heads, num_kv_heads = pool.num_kv_heads;
  each_row(step, (num_heads + 2 * num_kv_heads) * size, [&](int64_t t) {
    thread_local Scratch memory;
    float* head = (float*)scratch(memory, size * 8);  // twice, one behind the other: a half and the other half
    const float *cos = layer.cos + step.positions[t] * size, *sin = layer.sin + step.positions[t] * size;
    const int64_t block_id = step.slots[t] / pool.block_size, offset = step.slots[t] % pool.block_size;
    if (layer.q_norm.weight && model.norm_of_heads == OF_ALL_HEADS && !model.ranks) {
      const int64_t at = t * (num_heads + 2 * num_kv_heads) * size;
      norm_heads(model, layer.q_norm, qkv, at, num_heads * size);
      norm_heads(model, layer.k_norm, qkv, at + num_heads * size, num_kv_heads * size);
    }
    for (int64_t h = 0; h < num_heads + 2 * num_kv_heads; h++) {
      const int64_t at = (t * (num_heads + 2 * num_kv_heads) + h) * size;
      const bool is_query = h < num_heads, is_value = h >= num_heads + num_kv_heads;
      read_row(kind, qkv, at, size, head);
      if (const Norm& of = is_query ? layer.q_norm : layer.k_norm;
          of.weight && !is_value && model.norm_of_heads != OF_ALL_HEADS) {
        const int64_t which = model.norm_of_heads == OF_EACH_HEAD ? (is_query ? h : h - num_heads) : 0;
        norm(of, which * size, size, float(model.eps), head);
        for (int64_t i = 0; i < size; i += 16) store16(head + i, rounded16(kind, load16(head + i)));
        if (is_query && !layer.cos) write_row(kind, head, size, qkv, at);
      }
      if (!is_value && layer.cos) {
        std::memcpy(head + size, head, size * 4);
        for (int64_t i = 0; i < size; i += 16) {
          const V16 turned = fma16(load16(head + i + half), load16(sin + i), load16(head + size + i) * load16(cos + i));
          if (is_query)
            write16(kind, qkv, at + i, turned);
          else
            store16(head + i, rounded16(kind, turned));
        }
      }
      if (is_query) continue;
      const int64_t row = pool.row(index, is_value, (h - num_heads) % num_kv_heads) + offset;
      store_row(pool.form, head, size, pool.values(block_id, row), pool.scales(block_id, row));
    }
  });
}

// x -> to, which may be `from`: experts, or the products of one MLP by way of `wide` and `narrow`. False: a rank is lost.
bool run_mlp(const Model& model, const Step& step, int64_t index, const void* x, char* wide, char* narrow, void* to) {
  const Layer& layer = model.layers[index];
  if (layer.experts) return mix_experts(model, step, *layer.experts, x, to);
  baton_linear(layer.gate_up, x, nullptr, wide, step.num_tokens, step.num_threads);
  adapt(model, step, index, GATE_UP, x, wide);
  activate(model, step, model.intermediate_size, wide, narrow);
  if (!sum_linear(model, step, layer.down, layer.down_sum, narrow, to)) return false;
  return adapt(model, step, index, DOWN, narrow, to);
}

}  // namespace
}  // namespace baton

using namespace baton;

int64_t baton_layers(const Model* model, const Step* step, int64_t first, int64_t last) {
  thread_local Scratch memory;
  const Pool& pool = *step->pool;
  const int64_t rows = step->num_tokens, threads = step->num_threads, width = bytes_of(model->kind);
  const int64_t query_size = model->shape->num_heads * pool.head_dim;
  const int64_t qkv_size = query_size + 2 * pool.num_kv_heads * pool.head_dim;
  // Buffers, used in turn; the last one where attention and MLP read the same rows.
  const int64_t wide = std::max(qkv_size, 2 * model->intermediate_size) * rows * width;
  const int64_t narrow = std::max(query_size, model->intermediate_size) * rows * width;
  const int64_t stream = rows * model->hidden_size * width;
  char* a = scratch(memory, wide + narrow + (1 + model->parallel) * (stream + LINE) + 2 * LINE);
  char *b = a + rounded_up(wide, LINE), *c = b + rounded_up(narrow, LINE), *d = c + rounded_up(stream, LINE);
  const Norm none{};
  const auto normed = [&](const Norm& of) { return of.weight ? (const void*)c : step->x; };
  add_norm(*model, *step, nullptr, none, model->layers[first].input_norm, c);
  for (int64_t index = first; index < last; index++) {
    const Layer& layer = model->layers[index];
    const Norm& next = index + 1 < last ? model->layers[index + 1].input_norm : none;
    const void* const inputs = normed(layer.input_norm);
    baton_linear(layer.qkv, inputs, nullptr, a, rows, threads);
    adapt(*model, *step, index, QKV, inputs, a);
    if (layer.q_norm.weight && model->norm_of_heads == OF_ALL_HEADS && model->ranks)
      if (!norm_heads_of_ranks(*model, *step, layer, a)) return 1;
    rotate_and_store(*model, *step, layer, index, a);
    baton_attention(step->pool, model->shape, step->seqs, step->num_seqs, index, a, qkv_size, b, threads);
    char* const attended = model->parallel ? d : c;
    if (!sum_linear(*model, *step, layer.output, layer.output_sum, b, attended)) return 1;
    if (!adapt(*model, *step, index, OUTPUT, b, attended)) return 1;
    if (model->parallel) {
      if (!run_mlp(*model, *step, index, inputs, a, b, c)) return 1;
      add_norm(*model, *step, d, layer.attention_out_norm, none, nullptr);
    } else {
      add_norm(*model, *step, c, layer.attention_out_norm, layer.mlp_norm, c);
      if (!run_mlp(*model, *step, index, normed(layer.mlp_norm), a, b, c)) return 1;
    }
    add_norm(*model, *step, c, layer.mlp_out_norm, next, c);
  }
  return 0;
}

void baton_norm(const Model* model, const void* x, const void* weight, void* normed, int64_t num_rows,
                int64_t num_threads) {
  Step step{};
  step.num_tokens = num_rows, step.num_threads = num_threads, step.x = const_cast<void*>(x);
  add_norm(*model, step, nullptr, Norm{}, Norm{weight, nullptr, model->kind, 0}, normed);
}
