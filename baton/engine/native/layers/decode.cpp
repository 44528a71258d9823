// Several decode steps of the same sequences in one call: each reads the token that the one before has drawn. The bits
// are those of steps by themselves, whose kernels these are.
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
};
struct Decoding {
  int64_t token_id;    // its last
  int64_t num_tokens;  // with that one; its block table has room for as many steps as may be done
  const int64_t* block_ids;
  const int64_t* stop_ids;  // that end it; none while they are banned
  int64_t num_stop_ids;
  int64_t has_penalties;  // what is drawn counts in row.changes, which has room for it
  SampleRow row;
};

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
      for (int64_t j = i; j < size; j++)
        wide[j - i] = kind == FP32 ? ((const float*)logits)[at + j] : from_bf16(((const uint16_t*)logits)[at + j]);
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
// while *bell is not 0, or that would likely end more than budget_ns after the first began. A sequence is a row, also of
// adapters; drawn [num_seqs][num_steps].
extern "C" int64_t baton_decode(const Decoder* decoder, const Pool* pool, Decoding* seqs, int64_t num_seqs,
                                const AdapterRows* adapters, int64_t num_adapters, int64_t num_steps,
                                const volatile int32_t* bell, int64_t budget_ns, int64_t* drawn, int64_t num_threads) {
  static thread_local std::vector<char> memory;
  static thread_local std::vector<int64_t> token_ids, positions, slots, ended;
  static thread_local std::vector<Sequence> slices;
  const Model& model = *decoder->model;
  const int64_t kind = model.kind, width = kind == FP32 ? 4 : 2, num_out = decoder->head->num_out;
  const int64_t bytes = model.hidden_size * width, num_scores = (num_out + 15) / 16 * 16;
  char* x = scratch(memory, num_seqs * (bytes + num_out * width + num_scores * 4) + 256);
  char* logits = x + (num_seqs * bytes + 63) / 64 * 64;
  char* scores = logits + (num_seqs * num_out * width + 63) / 64 * 64;
  token_ids.resize(num_seqs), positions.resize(num_seqs), slots.resize(num_seqs), ended.resize(num_seqs);
  slices.resize(num_seqs);
  int64_t* const ends = ended.data();  // of this thread: those that draw beside it have vectors of their own
  const int64_t begun_ns = now_ns();
  for (int64_t step = 0;; step++) {
    for (int64_t s = 0; s < num_seqs; s++) {
      const Decoding& seq = seqs[s];
      const int64_t at = seq.num_tokens - 1;
      token_ids[s] = seq.token_id, positions[s] = at;
      slots[s] = seq.block_ids[at / pool->block_size] * pool->block_size + at % pool->block_size;
      slices[s] = {s, 1, seq.num_tokens, seq.block_ids};
    }
    embed(decoder->table, *decoder->head, model.hidden_size, bytes, num_seqs, token_ids.data(), x);
    if (decoder->embedding_scale != 1) scale_rows(kind, decoder->embedding_scale, num_seqs * model.hidden_size, x);
    const Step now{pool, slices.data(), num_seqs,    positions.data(), slots.data(), num_seqs,
                   num_threads, x, adapters, num_adapters};
    baton_layers(&model, &now, 0, decoder->num_layers);
    baton_norm(&model, x, decoder->norm, x, num_seqs, num_threads);
    baton_linear(decoder->head, x, nullptr, logits, num_seqs, num_threads);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && num_seqs * num_out > 1 << 15)
    for (int64_t s = 0; s < num_seqs; s++) {
      float* own = (float*)scores + s * num_scores;
      widen(kind, float(decoder->logit_scale), logits, s * num_out, num_out, own);
      const int64_t token_id = drawn[s * num_steps + step] = draw(seqs[s].row, own, num_out);
      ends[s] = append(seqs[s], token_id);
    }
    const int64_t done = step + 1;
    if (done == num_steps || *bell || std::count(ended.begin(), ended.end(), 1)) return done;
    if ((now_ns() - begun_ns) * (done + 1) > budget_ns * done) return done;
  }
}
