// Attention that reads the pool in place.
//
// One algorithm for chunks and decode tokens: queries that share a KV head are rows, in tiles of up to ROWS; KV is
// taken in spans of 64 absolute positions, unpacked once per tile, with a running maximum and sum (flash attention,
// arXiv 2205.14135). Every score adds over head_dim in order, every output over positions in order, and a span that a
// row does not see leaves its sums as they were; so a row has the same bits in any tile, batch, chunk, on any thread.
//
// Products are bf16 pairs added in fp32 (vdpbf16ps) where queries are bf16 and the stored elements fit into bf16, else
// fp32. Scales of int8 and int4 are applied to scores and weights, so that their elements stay exact.

#include "attention.h"
#include "attention_products.h"

namespace baton {
namespace {

constexpr int ROWS = 64;
constexpr int64_t SERIAL_WORK = 1 << 17;  // multiplications that cost less than waking a second thread
constexpr float UNSEEN = -1e30f;

// ---- elements as the products take them: float, or bf16 bits ----

template <int64_t F>
inline void expand(const uint8_t* row, int64_t size, float* to) {
  for (int64_t i = 0; i < size; i += 16) store16(to + i, stored16<F>(row, i));
}
template <int64_t F>
inline void expand(const uint8_t* row, int64_t size, uint16_t* to) {
  for (int64_t i = 0; i < size; i += 16) {
    if (F == FORM_BF16)
      std::memcpy(to + i, row + 2 * i, 32);
    else
      write16(BF16, to, i, stored16<F>(row, i));
  }
}

inline void take(int64_t kind, const void* from, int64_t index, int64_t size, float* to) {
  read_row(kind, from, index, size, to);
}
inline void take(int64_t, const void* from, int64_t index, int64_t size, uint16_t* to) {
  std::memcpy(to, (const uint16_t*)from + index, size * 2);
}

inline float as_float(float x) { return x; }
inline float as_float(uint16_t x) { return from_bf16(x); }

// ---- a span ----

template <class T>
struct Span {
  uint32_t* keys;    // transposed, [head_dim / (1 | 2)][64]
  uint32_t* values;  // [64 / (1 | 2)][head_dim]
  float key_scale[SPAN], key_zero[SPAN], value_scale[SPAN], value_zero[SPAN];
};

template <int64_t F>
inline void read_scales(const Pool& pool, int64_t block_id, int64_t row, int j, int count, float* scale, float* zero) {
  if (!has_scales(F)) return;
  const uint16_t* stored = pool.scales(block_id, row);
  constexpr int step = has_zeros(F) ? 2 : 1;
  for (int i = 0; i < count; i++) {
    scale[j + i] = from_fp16(stored[i * step]);
    if (has_zeros(F)) zero[j + i] = from_fp16(stored[i * step + 1]);
  }
}

inline void pair_up(const uint16_t* rows, int64_t size, uint32_t* to) {
  for (int j = 0; j < SPAN; j += 2)
    for (int64_t i = 0; i < size; i++)
      to[j / 2 * size + i] = rows[j * size + i] | uint32_t(rows[(j + 1) * size + i]) << 16;
}

// Asks for the rows of the next span while this one is computed: a head's rows in one block are a page or less, and the
// next block is far away, so that the processor's own prefetching begins again with each.
inline void prefetch(const Pool& pool, const Sequence& seq, int64_t layer, int64_t head, int64_t begin) {
  const int64_t end = std::min<int64_t>(begin + SPAN, seq.kv_len);
  for (int64_t position = begin; position < end; position = (position / pool.block_size + 1) * pool.block_size) {
    const int64_t offset = position % pool.block_size, count = std::min(pool.block_size - offset, end - position);
    for (int kind = 0; kind < pool.num_kinds; kind++) {
      const int64_t row = pool.row(layer, kind, head) + offset;
      const uint8_t* stored = pool.values(seq.block_ids[position / pool.block_size], row);
      for (int64_t i = 0; i < count * pool.row_bytes; i += 64) __builtin_prefetch(stored + i);
    }
  }
}

// Positions [begin, begin + 64) of one head, by way of `rows`; what is behind `kv_len` is zero.
template <int64_t F, class T>
void unpack(const Pool& pool, const Sequence& seq, int64_t layer, int64_t head, int64_t begin, T* rows, Span<T>& span) {
  const int64_t size = pool.head_dim, count = std::min<int64_t>(SPAN, seq.kv_len - begin);
  constexpr bool in_pairs = sizeof(T) == 2;
  for (int kind = 0; kind < 2; kind++) {
    T* to = kind && !in_pairs ? (T*)span.values : rows;
    float* scale = kind ? span.value_scale : span.key_scale;
    float* zero = kind ? span.value_zero : span.key_zero;
    for (int64_t j = 0; j < count;) {
      const int64_t position = begin + j, offset = position % pool.block_size;
      const int64_t run = std::min(pool.block_size - offset, count - j);
      const int64_t block_id = seq.block_ids[position / pool.block_size];
      const int64_t row = pool.row(layer, kind, head) + offset;
      const uint8_t* stored = pool.values(block_id, row);
      for (int64_t i = 0; i < run; i++) expand<F>(stored + i * pool.row_bytes, size, to + (j + i) * size);
      read_scales<F>(pool, block_id, row, j, run, scale, zero);
      j += run;
    }
    std::memset(to + count * size, 0, (SPAN - count) * size * sizeof(T));
    std::fill(scale + count, scale + SPAN, 0.0f);
    std::fill(zero + count, zero + SPAN, 0.0f);
    if (!kind)
      transpose((const uint32_t*)rows, size * sizeof(T) / 4, span.keys);
    else if constexpr (in_pairs)
      pair_up(rows, size, span.values);
  }
}

// ---- a row ----

// Of scores to the base of 2. Capped (cap over 0): what gives the exponent of a score's tanh.
struct Scale {
  float scale, cap;
};

struct Row {
  int64_t position;
  float query_sum;  // for zero points of keys
  float maximum, total, zeros;
};

inline void put(float* to, V16 x) { store16(to, x); }
inline void put(uint16_t* to, V16 x) { write16(BF16, to, 0, x); }

// scores [64] -> weights [64] relative to the new maximum; returns what is kept of the sums so far.
// Not inlined: the compiler must not join its operations in another way for another number of rows.
template <int64_t F, class T>
[[gnu::noinline]] float weigh(const float* scores, const Span<T>& span, int64_t begin, int64_t window, Scale to,
                              Row& row, T* weights) {
  const int64_t first = first_seen(window, row.position) - begin, last = row.position - begin;
  const int32_t from = int32_t(std::max<int64_t>(first, 0)), upto = int32_t(std::min<int64_t>(last, SPAN));
  V16 x[4], most = all16(UNSEEN);
  for (int i = 0; i < 4; i++) {
    x[i] = load16(scores + i * 16);
    if (has_scales(F)) x[i] = x[i] * load16(span.key_scale + i * 16);
    if (has_zeros(F)) x[i] = fma16(all16(row.query_sum), load16(span.key_zero + i * 16), x[i]);
    x[i] = x[i] * to.scale;
    if (to.cap > 0)  // tanh(x) = 1 - 2 / (exp(2 x) + 1), bounded where it is one already
      x[i] = (all16(1.0f) - all16(2.0f) / (power_of_two(min16(all16(126.0f), x[i])) + 1.0f)) * to.cap;
    x[i] = within16(x[i], from - 16 * i, upto - 16 * i, -INFINITY);
    most = max16(x[i], most);
  }
  const float maximum = std::max(row.maximum, max_of16(most));
  const float kept = power_of_two(all16(row.maximum - maximum))[0];
  V16 total{}, zeros{};
  for (int i = 0; i < 4; i++) {
    V16 p = power_of_two(x[i] - maximum);
    total = total + p;
    if (has_zeros(F)) zeros = fma16(p, load16(span.value_zero + i * 16), zeros);
    if (has_scales(F)) p = p * load16(span.value_scale + i * 16);
    put(weights + i * 16, p);
  }
  row.maximum = maximum;
  row.total = row.total * kept + sum16(total);
  if (has_zeros(F)) row.zeros = row.zeros * kept + sum16(zeros);
  return kept;
}

template <int64_t F, int R, class T>
void attend_rows(const T* q, const Span<T>& span, int64_t size, int64_t begin, int64_t window, Scale scale, Row* rows,
                 float* to) {
  alignas(64) float scores[R * SPAN];
  alignas(64) T weights[R * SPAN];
  float kept[R];
  score<R>(q, size, span.keys, scores);
  for (int r = 0; r < R; r++)
    kept[r] = weigh<F>(scores + r * SPAN, span, begin, window, scale, rows[r], weights + r * SPAN);
  int64_t i = 0;
  for (; i + 64 <= size; i += 64) mix<R, 4>(weights, span.values + i, size, kept, to + i);
  for (; i < size; i += 16) mix<R, 1>(weights, span.values + i, size, kept, to + i);
}

// ---- a tile ----

struct Call {
  const Pool& pool;
  const Shape& shape;
  int64_t layer;
  const void* q;
  int64_t q_stride;
  void* out;
};

// Rows [first, first + count) of one sequence and KV head: row r is head r % group of token r / group.
template <int64_t F, class T>
void attend_tile(const Call& call, const Sequence& seq, int64_t head, int64_t first, int count) {
  static thread_local Scratch memory;
  const Pool& pool = call.pool;
  const int64_t size = pool.head_dim, group = call.shape.num_heads / pool.num_kv_heads;
  const int64_t window = call.shape.windows[call.layer], words = SPAN * size;
  static_assert(ROWS == SPAN);
  uint32_t* parts = (uint32_t*)scratch(memory, 5 * words * 4);  // of head_dim x 64 each, 32 bits or less
  T *q = (T*)parts, *unpacked = (T*)(parts + words);
  float* sums = (float*)(parts + 2 * words);
  std::memset(sums, 0, count * size * sizeof(float));
  Row rows[ROWS];
  const float* sinks = call.shape.sinks ? call.shape.sinks + call.layer * call.shape.num_heads : nullptr;
  for (int r = 0; r < count; r++) {
    const int64_t token = (first + r) / group, which = head * group + (first + r) % group;
    take(call.shape.kind, call.q, (seq.query_start + token) * call.q_stride + which * size, size, q + r * size);
    rows[r] = {seq.kv_len - seq.query_len + token, 0, UNSEEN, 0, 0};
    if (sinks) rows[r].maximum = LOG2_E * sinks[which], rows[r].total = 1;
    if (has_zeros(F))
      for (int64_t d = 0; d < size; d++) rows[r].query_sum += as_float(q[r * size + d]);
  }
  Span<T> span;
  span.keys = parts + 3 * words, span.values = parts + 4 * words;
  const Shape& shape = call.shape;
  Scale scale{LOG2_E / std::sqrt(float(size)), 0};
  if (shape.scale > 0) scale.scale = LOG2_E * float(shape.scale);
  if (shape.softcap > 0) scale = {scale.scale * 2 / float(shape.softcap), LOG2_E * float(shape.softcap)};
  for (int64_t begin = first_seen(window, rows[0].position) / SPAN * SPAN; begin <= rows[count - 1].position; begin += SPAN) {
    unpack<F>(pool, seq, call.layer, head, begin, unpacked, span);
    prefetch(pool, seq, call.layer, head, begin + SPAN);
    int r = 0;
    const auto go = [&](auto attend, int step) {
      for (; r + step <= count; r += step)
        attend(q + r * size, span, size, begin, window, scale, rows + r, sums + r * size);
    };
    go(attend_rows<F, 6, T>, 6), go(attend_rows<F, 4, T>, 4), go(attend_rows<F, 2, T>, 2), go(attend_rows<F, 1, T>, 1);
  }
  for (int r = 0; r < count; r++) {
    const int64_t token = (first + r) / group, which = head * group + (first + r) % group;
    const int64_t to = ((seq.query_start + token) * call.shape.num_heads + which) * size;
    for (int64_t d = 0; d < size; d += 16)
      write16(call.shape.kind, call.out, to + d, (load16(sums + r * size + d) + rows[r].zeros) / rows[r].total);
  }
}

using Tile = void (*)(const Call&, const Sequence&, int64_t, int64_t, int);

Tile tile_for(int64_t form, [[maybe_unused]] int64_t kind) {
  return with_form(form, [&](auto known) -> Tile {
    constexpr int64_t F = known;
#ifdef BATON_VNNI_BF16
    if constexpr (fits_bf16(F))
      if (kind == BF16) return attend_tile<F, uint16_t>;
#endif
    return attend_tile<F, float>;
  });
}

}  // namespace
}  // namespace baton

using namespace baton;

void baton_attention(const Pool* pool, const Shape* shape, const Sequence* seqs, int64_t num_seqs, int64_t layer,
                     const void* q, int64_t q_stride, void* out, int64_t num_threads) {
  const Call call{*pool, *shape, layer, q, q_stride, out};
  const Tile attend = tile_for(pool->form, shape->kind);
  const int64_t group = shape->num_heads / pool->num_kv_heads;
  int64_t num_tiles = 0, work = 0;
  for (int64_t i = 0; i < num_seqs; i++) {
    num_tiles += (seqs[i].query_len * group + ROWS - 1) / ROWS;
    work += seqs[i].query_len * seqs[i].kv_len;
  }
  const int64_t num_items = num_tiles * pool->num_kv_heads;
  if (work * shape->num_heads * pool->head_dim < SERIAL_WORK) num_threads = 1;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
  for (int64_t item = 0; item < num_items; item++) {
    // Last tiles first: they see most.
    int64_t tile = num_tiles - 1 - item / pool->num_kv_heads;
    const Sequence* seq = seqs;
    for (;; seq++) {
      const int64_t own = (seq->query_len * group + ROWS - 1) / ROWS;
      if (tile < own) break;
      tile -= own;
    }
    const int64_t count = std::min<int64_t>(ROWS, seq->query_len * group - tile * ROWS);
    attend(call, *seq, item % pool->num_kv_heads, tile * ROWS, int(count));
  }
}
