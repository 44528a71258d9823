// What attention is called with. Python fills these: baton/engine/attention/native.py, int64 each.
#pragma once

#include "../kv.h"

namespace baton {

struct Shape {
  int64_t num_heads, kind;
  double scale, softcap;  // of scores; 0: 1 / sqrt(head_dim), no cap
  const float* sinks;     // [layers][num_heads], a score of each head that has no value; null: none
  int64_t windows[];      // of each layer: positions a token sees, itself included; 0: all; below 0: its chunk of so many
};

// The first position that a token sees.
inline int64_t first_seen(int64_t window, int64_t position) {
  if (window < 0) return position / -window * -window;
  return window ? std::max<int64_t>(0, position - window + 1) : 0;
}

// Queries are rows [query_start, query_start + query_len) at positions [kv_len - query_len, kv_len).
struct Sequence {
  int64_t query_start, query_len, kv_len;
  const int64_t* block_ids;
};

}  // namespace baton

// q: rows of q_stride elements, out: rows of num_heads * head_dim, both of shape->kind.
extern "C" void baton_attention(const baton::Pool* pool, const baton::Shape* shape, const baton::Sequence* seqs,
                                int64_t num_seqs, int64_t layer, const void* q, int64_t q_stride, void* out,
                                int64_t num_threads);
