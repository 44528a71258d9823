// The layers of a step in one call: the work between the linear products and attention, and the calls of both.
//
// Each row is computed by itself and in one order. Between operations rows have the compute dtype, as in the torch code
// that this replaces (models/decoder.py); within one they are fp32: a rotation or an activation is rounded once.
#include "fused.h"

namespace baton {
namespace {

constexpr int64_t SERIAL_ELEMENTS = 1 << 14;  // that cost less than waking a second thread

template <class Row>
void each_row(const Step& step, int64_t size, Row row) {
  const bool parallel = step.num_threads > 1 && step.num_tokens * size > SERIAL_ELEMENTS;
#pragma omp parallel for schedule(static) num_threads(step.num_threads) if (parallel)
  for (int64_t t = 0; t < step.num_tokens; t++) row(t);
}

// from[at..] scaled to a root mean square of one, times weight.
void norm(const float* from, const void* weight, int64_t kind, int64_t size, float eps, float* to) {
  V16 squares{};
  for (int64_t i = 0; i < size; i += 16) squares = fma16(load16(from + i), load16(from + i), squares);
  const float scale = 1 / std::sqrt(sum16(squares) / float(size) + eps);
  for (int64_t i = 0; i < size; i += 16) store16(to + i, load16(from + i) * scale * read16(kind, weight, i));
}

// x += delta (null: nothing); normed = norm(x) (no weight: not wanted). normed may be delta.
void add_norm(const Model& model, const Step& step, const void* delta, const void* weight, void* normed) {
  const int64_t size = model.hidden_size, kind = model.kind;
  each_row(step, size, [&](int64_t t) {
    thread_local std::vector<char> memory;
    float* row = (float*)scratch(memory, size * 4);
    for (int64_t i = 0; i < size; i += 16) {
      V16 x = read16(kind, step.x, t * size + i);
      if (delta) {
        x = rounded16(kind, x + read16(kind, delta, t * size + i));
        write16(kind, step.x, t * size + i, x);
      }
      store16(row + i, x);
    }
    if (!weight) return;
    norm(row, weight, kind, size, float(model.eps), row);
    for (int64_t i = 0; i < size; i += 16) write16(kind, normed, t * size + i, load16(row + i));
  });
}

// Rotates the queries of qkv where they are; keys, rotated, and values go to the pool.
void rotate_and_store(const Model& model, const Step& step, const Layer& layer, int64_t index, void* qkv) {
  const Pool& pool = *step.pool;
  const int64_t size = pool.head_dim, half = size / 2, kind = model.kind;
  const int64_t num_heads = model.shape->num_heads, num_kv_heads = pool.num_kv_heads;
  each_row(step, (num_heads + 2 * num_kv_heads) * size, [&](int64_t t) {
    thread_local std::vector<char> memory;
    float* head = (float*)scratch(memory, size * 8);  // twice, one behind the other: a half and the other half
    const float *cos = model.cos + step.positions[t] * size, *sin = model.sin + step.positions[t] * size;
    const int64_t block_id = step.slots[t] / pool.block_size, offset = step.slots[t] % pool.block_size;
    for (int64_t h = 0; h < num_heads + 2 * num_kv_heads; h++) {
      const int64_t at = (t * (num_heads + 2 * num_kv_heads) + h) * size;
      const bool is_query = h < num_heads, is_value = h >= num_heads + num_kv_heads;
      for (int64_t i = 0; i < size; i += 16) store16(head + i, read16(kind, qkv, at + i));
      if (const void* weight = is_query ? layer.q_norm : layer.k_norm; weight && !is_value) {
        norm(head, weight, kind, size, float(model.eps), head);
        for (int64_t i = 0; i < size; i += 16) store16(head + i, rounded16(kind, load16(head + i)));
      }
      if (!is_value) {
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

// silu(gate) * up, gates first in a row.
void swiglu(const Model& model, const Step& step, const void* gate_up, void* out) {
  const int64_t size = model.intermediate_size, kind = model.kind;
  each_row(step, size, [&](int64_t t) {
    for (int64_t i = 0; i < size; i += 16) {
      const V16 gate = read16(kind, gate_up, t * 2 * size + i), up = read16(kind, gate_up, t * 2 * size + size + i);
      const V16 power = min16(gate * -1.44269504f, all16(127.0f));
      write16(kind, out, t * size + i, gate / (power_of_two(power) + 1.0f) * up);
    }
  });
}

}  // namespace
}  // namespace baton

using namespace baton;

void baton_layers(const Model* model, const Step* step, int64_t first, int64_t last) {
  thread_local std::vector<char> memory;
  const Pool& pool = *step->pool;
  const int64_t rows = step->num_tokens, threads = step->num_threads, width = model->kind == FP32 ? 4 : 2;
  const int64_t query_size = model->shape->num_heads * pool.head_dim;
  const int64_t qkv_size = query_size + 2 * pool.num_kv_heads * pool.head_dim;
  // Three buffers, used in turn.
  const int64_t wide = std::max(qkv_size, 2 * model->intermediate_size) * rows * width;
  const int64_t narrow = std::max(query_size, model->intermediate_size) * rows * width;
  char* a = scratch(memory, wide + narrow + rows * model->hidden_size * width + 128);
  char *b = a + (wide + 63) / 64 * 64, *c = b + (narrow + 63) / 64 * 64;
  add_norm(*model, *step, nullptr, model->layers[first].input_norm, c);
  for (int64_t index = first; index < last; index++) {
    const Layer& layer = model->layers[index];
    baton_linear(layer.qkv, c, a, rows, threads);
    rotate_and_store(*model, *step, layer, index, a);
    baton_attention(step->pool, model->shape, step->seqs, step->num_seqs, index, a, qkv_size, b, threads);
    baton_linear(layer.output, b, c, rows, threads);
    add_norm(*model, *step, c, layer.mlp_norm, c);
    baton_linear(layer.gate_up, c, a, rows, threads);
    swiglu(*model, *step, a, b);
    baton_linear(layer.down, b, c, rows, threads);
    add_norm(*model, *step, c, index + 1 < last ? model->layers[index + 1].input_norm : nullptr, c);
  }
}

void baton_norm(const Model* model, const void* x, const void* weight, void* normed, int64_t num_rows,
                int64_t num_threads) {
  Step step{};
  step.num_tokens = num_rows, step.num_threads = num_threads, step.x = const_cast<void*>(x);
  add_norm(*model, step, nullptr, weight, normed);
}
