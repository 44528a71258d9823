// Decode steps of the same sequences in one call: several, each of which reads the token that the one before has drawn, or
// one that also reads proposals and draws behind each as long as they are right. The bits are those of steps by themselves,
// whose kernels these are.
#include <chrono>

#include "../sampling/draw.h"
#include "embed.h"

namespace baton {
namespace {

// Python fills these: baton/engine/execute/multi_step.py.
struct Decoder {
  const Model* model;
  int64_t num_layers;
  const void* norm;  // before the head
  const Linear* head;
  const void* table;  // as embed() takes it
  double embedding_scale, logit_scale;
  const volatile int32_t* bell;  // not 0 once something waits
};
struct Decoding {
  int64_t token_id;    // its last
  int64_t num_tokens;  // with that one; its block table has room for proposals, and as many steps as may be done
  const int64_t* block_ids;
  const int64_t* stop_ids;  // that end it; none while they are banned
  int64_t num_stop_ids;
  int64_t has_penalties;  // what is drawn counts in row.changes, which has room for it
  const int64_t* draft_ids;  // proposals for what the first step draws
  int64_t num_drafts;
  float* logits;  // gets the row that each token is drawn from, as it was; null: none is asked for
  int64_t mask_words;  // from row.mask, of its last token, to that behind each proposal; 0 where there are none
  SampleRow row;
};

// Puts the mask behind the token that each sequence with one has drawn in its place; whether another may follow each.
using NextMasks = int64_t (*)();

// x times the embedding's scale, as torch multiplies tensors of one dtype.
void scale_rows(int64_t kind, double scale, int64_t count, char* x) {
  float factor = float(scale);
  if (kind == BF16) factor = from_bf16(to_bf16(factor));
  for (int64_t i = 0; i < count; i += 16) write16(kind, x, i, read16(kind, x, i) * factor);
}

// Logits in the head's dtype to fp32 `scores`, with room for whole vectors.
void widen(int64_t kind, float scale, const void* logits, int64_t at, int64_t size, float* scores) {
  for (int64_t i = 0; i < size; i += 16) {
    V16 wide{};
    if (size - i >= 16)
      wide = read16(kind, logits, at + i);
    else
      for (int64_t j = i; j < size; j++) wide[j - i] = read1(kind, logits, at + j);
    store16(scores + i, scale == 1 ? wide : wide * scale);
  }
}

void count(SampleRow& row, int64_t token_id) {
  const int32_t seen = row.repetition != 1 ? SEEN : 0;
  for (int64_t i = 0; i < row.num_changes; i++) {
    if (row.changes[i].token_id != token_id) continue;
    row.changes[i].count = (row.changes[i].count + 1) | seen;
    return;
  }
  row.changes[row.num_changes++] = {int32_t(token_id), 1 | seen, 0};
}

// Appends what is drawn. Whether the sequence ends with it.
bool append(Decoding& seq, int64_t token_id) {
  seq.token_id = token_id, seq.num_tokens++, seq.row.position++;
  if (seq.has_penalties) count(seq.row, token_id);
  return std::find(seq.stop_ids, seq.stop_ids + seq.num_stop_ids, token_id) != seq.stop_ids + seq.num_stop_ids;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace
}  // namespace baton

using namespace baton;

// Return how many steps were done, at most num_steps and at least one: none begins behind one that has ended a sequence,
// while the bell is not 0, where next_masks, if any, refuses one, or that would likely end more than budget_ns after the
// first began. A sequence is a row, also of adapters; with proposals, where num_steps is 1, a row more for each. `hidden`,
// if any, gets the rows of the first step before the last norm. What sequence s draws is drawn[s * width] and behind,
// num_drawn[s] tokens.
extern "C" int64_t baton_decode(const Decoder* decoder, const Pool* pool, Decoding* seqs, int64_t num_seqs,
                                const AdapterRows* adapters, int64_t num_adapters, int64_t num_steps,
                                int64_t budget_ns, NextMasks next_masks, void* hidden, int64_t* drawn, int64_t width,
                                int64_t* num_drawn, int64_t num_threads) {
  static thread_local Scratch memory;
  static thread_local std::vector<int64_t> token_ids, positions, slots, ended;
  static thread_local std::vector<Sequence> slices;
  const Model& model = *decoder->model;
  int64_t num_rows = num_seqs;
  for (int64_t s = 0; s < num_seqs; s++) num_rows += seqs[s].num_drafts;
  const int64_t kind = model.kind, size = bytes_of(kind), num_out = decoder->head->num_out;
  const int64_t bytes = model.hidden_size * size, num_scores = rounded_up(num_out, 16);
  char* x = scratch(memory, num_rows * (bytes + num_out * size) + num_seqs * num_scores * 4 + 256);
  char* logits = x + rounded_up(num_rows * bytes, LINE);
  char* scores = logits + rounded_up(num_rows * num_out * size, LINE);
  token_ids.resize(num_rows), positions.resize(num_rows), slots.resize(num_rows);
  slices.resize(num_seqs), ended.resize(num_seqs);
  // Of this thread: those that draw beside it have vectors of their own.
  int64_t* const ends = ended.data();
  const Sequence* const parts = slices.data();
  std::fill(num_drawn, num_drawn + num_seqs, 0);
  const int64_t begun_ns = now_ns();
  for (int64_t step = 0;; step++) {
    num_rows = 0;
    for (int64_t s = 0; s < num_seqs; s++) {
      const Decoding& seq = seqs[s];
      const int64_t first_row = num_rows, num_drafts = step ? 0 : seq.num_drafts;
      for (int64_t i = 0; i <= num_drafts; i++, num_rows++) {
        const int64_t at = seq.num_tokens - 1 + i;
        token_ids[num_rows] = i ? seq.draft_ids[i - 1] : seq.token_id, positions[num_rows] = at;
        slots[num_rows] = pool->slot(seq.block_ids, at);
      }
      slices[s] = {first_row, 1 + num_drafts, seq.num_tokens + num_drafts, seq.block_ids};
    }
    embed(decoder->table, *decoder->head, model.hidden_size, bytes, num_rows, token_ids.data(), x);
    if (decoder->embedding_scale != 1) scale_rows(kind, decoder->embedding_scale, num_rows * model.hidden_size, x);
    const Step now{pool, parts, num_seqs,    positions.data(), slots.data(), num_rows,
                   num_threads, x, adapters, num_adapters};
    baton_layers(&model, &now, 0, decoder->num_layers);
    if (hidden && !step) std::memcpy(hidden, x, num_rows * bytes);
    baton_norm(&model, x, decoder->norm, x, num_rows, num_threads);
    baton_linear(decoder->head, x, nullptr, logits, num_rows, num_threads);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && num_seqs * num_out > SERIAL_LOGITS)
    for (int64_t s = 0; s < num_seqs; s++) {
      float* own = (float*)scores + s * num_scores;
      for (int64_t i = 0; i < parts[s].query_len; i++) {
        widen(kind, float(decoder->logit_scale), logits, (parts[s].query_start + i) * num_out, num_out, own);
        if (seqs[s].logits) std::memcpy(seqs[s].logits + num_drawn[s] * num_out, own, num_out * 4);
        const int64_t token_id = draw(seqs[s].row, own, num_out);
        drawn[s * width + num_drawn[s]++] = token_id;
        ends[s] = append(seqs[s], token_id);
        seqs[s].row.mask += seqs[s].mask_words;
        if (ends[s] || i + 1 == parts[s].query_len || token_id != seqs[s].draft_ids[i]) break;
      }
    }
    const int64_t done = step + 1;
    if (done == num_steps || *decoder->bell || std::count(ended.begin(), ended.end(), 1)) return done;
    if ((now_ns() - begun_ns) * (done + 1) > budget_ns * done) return done;
    if (next_masks && !next_masks()) return done;
  }
}
