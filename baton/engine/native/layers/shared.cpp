// What ranks that have parts of a layer tell one another inside it: sums of products, and rows that are normed as wholes.
#include "fused.h"

namespace baton {
namespace {

// The largest magnitude of each row of which every rank has num_in inputs, outliers of the weight aside: what rows are
// scaled by that have one scale each. Null: a rank is lost.
const float* largest_of_rows(const Model& model, const Step& step, const Linear& linear, const void* x) {
  thread_local Scratch memory;
  const int64_t rows = step.num_tokens, size = linear.num_in, degree = model.ranks->degree;
  float* own = (float*)scratch(memory, (rows * (1 + degree) + size) * 4);
  float *all = own + rows, *row = all + rows * degree;
  for (int64_t t = 0; t < rows; t++) {
    read_row(model.kind, x, t * size, size, row);
    for (int64_t i = 0; i < linear.num_outliers; i++) row[linear.outlier_columns[i]] = 0;
    V16 largest{};
    for (int64_t i = 0; i < size; i += 16) largest = max16(largest, max16(load16(row + i), -load16(row + i)));
    own[t] = max_of16(largest);
  }
  if (baton_gather_ranks(model.ranks, own, rows * 4, all)) return nullptr;
  for (int64_t t = 0; t < rows; t++)
    for (int64_t rank = 0; rank < degree; rank++) own[t] = std::max(own[t], all[rank * rows + t]);
  return own;
}

// Of rows x, of which every rank has num_in inputs, the inputs order[0..num_in) of all. Null: a rank is lost.
const void* inputs_in_order(const Model& model, const Step& step, int64_t num_in, const int64_t* order, const void* x) {
  thread_local Scratch memory;
  const int64_t width = bytes_of(model.kind), bytes = step.num_tokens * num_in * width;
  char* own = scratch(memory, bytes * (1 + model.ranks->degree));
  char* all = own + bytes;
  if (baton_gather_ranks(model.ranks, x, bytes, all)) return nullptr;
  for (int64_t t = 0; t < step.num_tokens; t++)
    for (int64_t i = 0; i < num_in; i++) {
      const int64_t rank = order[i] / num_in, at = order[i] % num_in;
      std::memcpy(own + (t * num_in + i) * width, all + rank * bytes + (t * num_in + at) * width, width);
    }
  return own;
}

}  // namespace

bool norm_heads_of_ranks(const Model& model, const Step& step, const Layer& layer, void* qkv) {
  thread_local Scratch memory;
  const Pool& pool = *step.pool;
  const int64_t rows = step.num_tokens, degree = model.ranks->degree, rank = model.ranks->rank, kind = model.kind;
  const int64_t q = model.shape->num_heads * pool.head_dim, k = pool.num_kv_heads * pool.head_dim;
  const int64_t copies = pool.num_kv_heads * degree / model.num_kv_heads;  // ranks that have the same heads of k
  const int64_t width = bytes_of(kind), stride = (q + 2 * k) * width, bytes = (q + k) * width;
  char *own = scratch(memory, rows * bytes * (1 + degree)), *all = own + rows * bytes;
  for (int64_t t = 0; t < rows; t++) std::memcpy(own + t * bytes, (char*)qkv + t * stride, bytes);
  if (baton_gather_ranks(model.ranks, own, rows * bytes, all)) return false;
  each_row(step, degree * q, [&](int64_t t) {
    thread_local Scratch memory;
    float* row = (float*)scratch(memory, degree * std::max(q, k) * 4);
    const auto normed = [&](const Norm& of, int64_t at, int64_t size, int64_t same) {
      float* end = row;
      for (int64_t r = 0; r < degree; r += same, end += size) read_row(kind, all + (r * rows + t) * bytes, at, size, end);
      norm(of, 0, end - row, float(model.eps), row);
      write_row(kind, row + rank / same * size, size, (char*)qkv + t * stride, at);
    };
    normed(layer.q_norm, 0, q, 1);
    normed(layer.k_norm, q, k, copies);
  });
  return true;
}

const void* inputs_of_all(const Model& model, const Step& step, int64_t num_in, const void* x) {
  thread_local Scratch memory;
  const int64_t row = num_in * bytes_of(model.kind), bytes = step.num_tokens * row, degree = model.ranks->degree;
  char* rows = scratch(memory, 2 * bytes * degree);
  char* all = rows + bytes * degree;
  if (baton_gather_ranks(model.ranks, x, bytes, all)) return nullptr;
  for (int64_t t = 0; t < step.num_tokens; t++)
    for (int64_t rank = 0; rank < degree; rank++)
      std::memcpy(rows + (t * degree + rank) * row, all + rank * bytes + t * row, row);
  return rows;
}

bool part_of_sum(const Model& model, const Step& step, const Linear* linear, const RowParallel& sum, const void* x,
                 void* part) {
  if (sum.order && !(x = inputs_in_order(model, step, linear->num_in, sum.order, x))) return false;
  const float* largest = nullptr;
  if (!model.ranks->fast && (linear->activations == INT8_PER_ROW || linear->activations == E4M3_PER_ROW))
    if (!(largest = largest_of_rows(model, step, *linear, x))) return false;
  baton_linear(linear, x, largest, part, step.num_tokens, step.num_threads);
  return true;
}

bool sum_linear(const Model& model, const Step& step, const Linear* linear, const RowParallel& sum, const void* x,
                void* to) {
  if (!model.ranks) {
    baton_linear(linear, x, nullptr, to, step.num_tokens, step.num_threads);
    return true;
  }
  thread_local Scratch memory;
  char* part = scratch(memory, step.num_tokens * model.hidden_size * 4);
  if (!part_of_sum(model, step, linear, sum, x, part)) return false;
  return !baton_sum_ranks(model.ranks, part, linear->y_kind, step.num_tokens, model.hidden_size, sum.bias, model.kind,
                          to, step.num_threads);
}

}  // namespace baton
