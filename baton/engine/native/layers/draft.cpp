// The greedy guesses of a draft, several passes in one call: it reads what it lacks of each sequence, names the likeliest
// next token, reads that, and so on. And those of heads, each of which guesses a token further on. Guesses only: no
// answer depends on a bit of this.
#include "embed.h"
#include "recurrent.h"

namespace baton {
namespace {

// Python fills these: baton/engine/speculation/proposers/native_draft.py.
struct Draft {
  const Model* model;
  int64_t num_layers;
  const void* norm;  // before the head
  const Linear* head;
  const void* table;  // [vocabulary][hidden_size] in the compute dtype; null: the rows of head's panels
  // Of a layer that reads its target's hidden rows; null in a model of its own.
  const Linear* project;
  const void *embedding_norm, *features_norm, *target_norm;
};
struct Unread {
  int64_t num_tokens;  // to be read, at least one
  int64_t num_rows;    // whose KV is there once they are read
  int64_t position;    // of the first, as it is rotated
  int64_t num_wanted;  // guesses, at most `width`: those behind them have no position of their own
  const int64_t* block_ids;
};

// Medusa-style heads, see baton/engine/speculation/proposers/medusa.py: y = skip z + leave silu(inner z + bias), its norm
// times `scale`, and the target's head.
struct Head {
  const Linear *enter, *leave;  // enter: skip's outputs, then inner's
  const void* scale;            // [hidden_size]
};
struct Heads {
  const Model* model;
  const Linear* output;
  const void *table, *target_norm, *ones;  // table as in Draft; ones [hidden_size]
  const Head* heads;
};

int64_t likeliest(int64_t kind, const char* logits, int64_t count) {
  V16 most = all16(-INFINITY);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) most = max16(read16(kind, logits, i), most);
  float best = max_of16(most);
  for (; i < count; i++) best = std::max(best, read1(kind, logits, i));
  for (int64_t j = 0; j < count; j++)
    if (read1(kind, logits, j) == best) return j;
  return 0;
}

// Rows of a and b, of `bytes` each, side by side -> to.
void join(const char* a, const char* b, int64_t num_rows, int64_t bytes, char* to) {
  for (int64_t t = 0; t < num_rows; t++) {
    std::memcpy(to + 2 * t * bytes, a + t * bytes, bytes);
    std::memcpy(to + (2 * t + 1) * bytes, b + t * bytes, bytes);
  }
}

// token_ids, and for a layer of its own features [rows][hidden_size], to x; `memory` holds 3 rows of each.
void enter(const Draft& draft, int64_t rows, const int64_t* token_ids, const void* features, bool are_hidden,
           char* memory, void* x, int64_t threads) {
  const Model& model = *draft.model;
  const int64_t size = model.hidden_size, bytes = size * bytes_of(model.kind);
  char* embedded = draft.project ? memory : (char*)x;
  embed(draft.table, *draft.head, size, bytes, rows, token_ids, embedded);
  if (!draft.project) return;
  char *joined = memory + rows * bytes, *normed = (char*)x;
  baton_norm(&model, embedded, draft.embedding_norm, embedded, rows, threads);
  if (are_hidden) {
    baton_norm(&model, features, draft.target_norm, normed, rows, threads);
    features = normed;
  }
  baton_norm(&model, features, draft.features_norm, normed, rows, threads);
  join(embedded, normed, rows, bytes, joined);
  baton_linear(draft.project, joined, nullptr, x, rows, threads);
}

}  // namespace
}  // namespace baton

using namespace baton;

// token_ids: those of `unread`, one after the other; hidden: the target's rows beside them, null for a model of
// its own. drafted [num_seqs][width].
extern "C" void baton_draft(const Draft* draft, const Pool* pool, const Unread* unread, int64_t num_seqs,
                            const int64_t* token_ids, const void* hidden, int64_t width, int64_t* drafted,
                            int64_t num_threads) {
  static thread_local Scratch memory;
  static thread_local std::vector<int64_t> positions, slots, guesses;
  static thread_local std::vector<Sequence> seqs;
  const Model& model = *draft->model;
  int64_t rows = 0;
  for (int64_t s = 0; s < num_seqs; s++) rows += unread[s].num_tokens;
  const int64_t bytes = model.hidden_size * bytes_of(model.kind), num_out = draft->head->num_out;
  const int64_t logit_bytes = num_out * bytes_of(model.kind);
  char* x = scratch(memory, 4 * rows * bytes + num_seqs * (bytes + logit_bytes));
  char *entering = x + rows * bytes, *features = entering + 3 * rows * bytes, *logits = features + num_seqs * bytes;
  positions.resize(rows), slots.resize(rows), guesses.resize(num_seqs), seqs.resize(num_seqs);
  for (int64_t pass = 0; pass < width; pass++) {
    int64_t row = 0;
    for (int64_t s = 0; s < num_seqs; s++) {
      const Unread& own = unread[s];
      const int64_t count = pass ? 1 : own.num_tokens, end = own.num_rows + pass;
      const int64_t first = own.position + (pass ? own.num_tokens + std::min(pass, own.num_wanted - 1) - 1 : 0);
      seqs[s] = {row, count, end, own.block_ids};
      for (int64_t i = 0; i < count; i++, row++) {
        const int64_t at = end - count + i;
        positions[row] = first + i;
        slots[row] = pool->slot(own.block_ids, at);
      }
    }
    enter(*draft, row, pass ? guesses.data() : token_ids, pass ? features : hidden, !pass, entering, x, num_threads);
    const Step step{pool, seqs.data(), num_seqs, positions.data(), slots.data(), row, num_threads, x};
    baton_layers(draft->model, &step, 0, draft->num_layers);
    for (int64_t s = 0; s < num_seqs; s++)  // the last row of each, to the front
      std::memmove(x + s * bytes, x + (seqs[s].query_start + seqs[s].query_len - 1) * bytes, bytes);
    baton_norm(draft->model, x, draft->norm, features, num_seqs, num_threads);
    baton_linear(draft->head, features, nullptr, logits, num_seqs, num_threads);
    for (int64_t s = 0; s < num_seqs; s++)
      guesses[s] = drafted[s * width + pass] = likeliest(model.kind, logits + s * logit_bytes, num_out);
  }
}

// hidden [num_seqs][hidden_size]: the target's rows that `token_ids` [num_seqs] were drawn from. drafted [num_seqs][width].
extern "C" void baton_heads(const Heads* all, const void* hidden, const int64_t* token_ids, int64_t num_seqs,
                            int64_t width, int64_t* drafted, int64_t num_threads) {
  static thread_local Scratch memory;
  const Model& model = *all->model;
  const int64_t kind = model.kind, size = model.hidden_size, num_out = all->output->num_out;
  const int64_t element = bytes_of(kind), bytes = size * element, rows_bytes = num_seqs * bytes;
  char* normed = scratch(memory, (7 + width) * rows_bytes + width * num_seqs * num_out * element);
  char *embedded = normed + rows_bytes, *joined = embedded + rows_bytes, *entered = joined + 2 * rows_bytes;
  char *inner = entered + 2 * rows_bytes, *features = inner + rows_bytes, *logits = features + width * rows_bytes;
  baton_norm(&model, hidden, all->target_norm, normed, num_seqs, num_threads);
  baton_norm(&model, normed, all->ones, normed, num_seqs, num_threads);
  embed(all->table, *all->output, size, bytes, num_seqs, token_ids, embedded);
  baton_norm(&model, embedded, all->ones, embedded, num_seqs, num_threads);
  join(normed, embedded, num_seqs, bytes, joined);
  for (int64_t h = 0; h < width; h++) {
    const Head& head = all->heads[h];
    char* y = features + h * rows_bytes;
    baton_linear(head.enter, joined, nullptr, entered, num_seqs, num_threads);
    for (int64_t s = 0; s < num_seqs; s++)
      for (int64_t i = 0; i < size; i += 16)
        write16(kind, inner, s * size + i, silu16(read16(kind, entered, (2 * s + 1) * size + i)));
    baton_linear(head.leave, inner, nullptr, y, num_seqs, num_threads);
    for (int64_t s = 0; s < num_seqs; s++)
      for (int64_t i = 0; i < size; i += 16)
        write16(kind, y, s * size + i, read16(kind, y, s * size + i) + read16(kind, entered, 2 * s * size + i));
    baton_norm(&model, y, head.scale, y, num_seqs, num_threads);
  }
  baton_linear(all->output, features, nullptr, logits, width * num_seqs, num_threads);
  for (int64_t h = 0; h < width; h++)
    for (int64_t s = 0; s < num_seqs; s++)
      drafted[s * width + h] = likeliest(kind, logits + (h * num_seqs + s) * num_out * element, num_out);
}
