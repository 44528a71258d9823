// How a token is drawn from a row of logits. Python fills these: baton/engine/sampling/native_sampler.py.
#pragma once

#include "../vector.h"

namespace baton {

constexpr int64_t SERIAL_LOGITS = 1 << 15;  // to draw from so many costs less than waking a second thread
constexpr int32_t SEEN = 1 << 30;  // in `count`: the repetition penalty meets it

// A token whose logit changes before the temperature: how often it is in the output, and what is added; -inf is a ban.
struct Change {
  int32_t token_id, count;
  float added;
};
struct SampleRow {
  double temperature;  // 0: the likeliest token
  double kept_mass, least_ratio;  // of all probability, what is left; of the likeliest token's, what a token needs
  double repetition, presence, frequency;
  int64_t top_k;  // 0: off
  uint64_t seed;
  int64_t choice, position;  // of the token that is drawn, in the whole sequence
  Change* changes;
  int64_t num_changes;
  const uint32_t* mask;  // a bit for each token; null: any may be drawn
};

// A token of `size` logits, which stay as they are. The first of those that are equal.
int64_t draw(const SampleRow& row, const float* logits, int64_t size);

}  // namespace baton

// Of logits, a bit for each whether it stays; the others become -inf.
extern "C" void baton_mask_logits(float* logits, const uint32_t* mask, int64_t count);
