// Logits to tokens: penalties, a mask, then the likeliest, or temperature, filters and counter-based noise. The twin in
// torch is sampling/sampler.py, whose words hold here; the noise is that of sampling/noise.py in every bit.
#include "draw.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace baton {
namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;
// As NEAR of sampler.py: what comes this near to the best by rough noise, off by less than a hundredth of it, is compared
// in double precision.
constexpr float NEAR = 1e-3f;
constexpr float WHOLE = float(int64_t(1) << 40);

using U8 = uint64_t __attribute__((vector_size(64)));
using D8 = double __attribute__((vector_size(64)));
using F8 = float __attribute__((vector_size(32)));

template <class T>
T mixed(T x) {
  x ^= x >> 30, x *= MIX_1;
  x ^= x >> 27, x *= MIX_2;
  return x ^ x >> 31;
}

uint64_t noise_key(uint64_t seed, int64_t choice, int64_t position) {
  uint64_t key = mixed(seed + GOLDEN);
  for (const int64_t part : {choice, position}) key = mixed(key + GOLDEN * uint64_t(part + 1) + GOLDEN);
  return key;
}

double exact_noise(uint64_t key, int64_t token_id) {
  const double uniform = (double(mixed(key + GOLDEN * uint64_t(token_id + 1)) >> 11) + 0.5) * 0x1p-53;
  return -std::log(-std::log1p(-uniform));
}

// The natural logarithm of positive normal numbers, within 3e-7 of it or of 1.
V16 log16(V16 x) {
  const I16 bits = (I16)x, exponent = (bits - 0x3f3504f3) >> 23;  // of a mantissa from sqrt(1/2) to sqrt(2)
  const V16 mantissa = (V16)(bits - (exponent << 23));
  const V16 s = (mantissa - 1) / (mantissa + 1), square = s * s;
  V16 series = all16(2.0f / 9);
  for (const float c : {2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f}) series = fma16(series, square, all16(c));
  return fma16((V16)(exponent + (I16)all16(ROUNDER)) - ROUNDER, all16(0.693147181f), s * series);
}

// exp(x) for x <= 0, exactly 1 at 0, exactly 0 below -87; within one unit in the last place.
V16 exp16(V16 x) {
  const V16 shifted = fma16(max16(x, all16(-88.0f)), all16(LOG2_E), all16(ROUNDER)), whole = shifted - ROUNDER;
  V16 rest = fma16(whole, all16(-0.693359375f), max16(x, all16(-88.0f)));
  rest = fma16(whole, all16(2.12194440e-4f), rest);
  V16 y = all16(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = fma16(y, rest, all16(c));
  y = fma16(y * rest, rest, rest) + 1;
  const I16 power = (((I16)shifted - (I16)all16(ROUNDER)) + 127) << 23;
  y = y * (V16)power;
  return (V16)((I16)y & (I16)(x > all16(-87.0f)));
}

// Noise of tokens id to id + 15, within NEAR / 100 of the exact one.
V16 rough_noise(uint64_t key, uint64_t id) {
  const auto half = [&](uint64_t from, F8* uniform, F8* rest) {
    const U8 ids = from + U8{1, 2, 3, 4, 5, 6, 7, 8};
    const D8 exact = (__builtin_convertvector(mixed(ids * GOLDEN + key) >> 11, D8) + 0.5) * 0x1p-53;
    *uniform = __builtin_convertvector(exact, F8), *rest = __builtin_convertvector(1.0 - exact, F8);
  };
  struct {
    F8 low, high;
  } uniforms, rests;
  half(id, &uniforms.low, &rests.low);
  half(id + 8, &uniforms.high, &rests.high);
  V16 uniform, rest;
  std::memcpy(&uniform, &uniforms, sizeof uniform), std::memcpy(&rest, &rests, sizeof rest);
  // -log(1 - u): near 0 the difference has few bits left.
  const V16 series = uniform * fma16(uniform, fma16(uniform, all16(1 / 3.0f), all16(0.5f)), all16(1.0f));
  const I16 is_small = (I16)(uniform < all16(0.015625f));
  const V16 waited = (V16)(((I16)series & is_small) | ((I16)-log16(rest) & ~is_small));
  return -log16(waited);
}

int64_t likeliest(const float* scores, int64_t size) {
  float best = -INFINITY;
  int64_t i = 0;
  if (size >= 16) {
    V16 most = load16(scores);
    for (i = 16; i + 16 <= size; i += 16) most = max16(load16(scores + i), most);
    best = max_of16(most);
  }
  for (; i < size; i++) best = std::max(best, scores[i]);
  return std::min(std::find(scores, scores + size, best) - scores, size - 1);
}

// As penalize() of sampling/penalties.py, and the mask.
void change(const SampleRow& row, float* scores, int64_t size) {
  const float repetition = float(row.repetition), presence = float(row.presence), frequency = float(row.frequency);
  for (int64_t i = 0; i < row.num_changes; i++) {
    const Change& of = row.changes[i];
    if (of.token_id < 0 || of.token_id >= size) continue;
    float& score = scores[of.token_id];
    if (of.count & SEEN) score = score < 0 ? score * repetition : score / repetition;
    if (const int32_t count = of.count & (SEEN - 1)) score -= presence + frequency * float(count);
    score += of.added;
  }
  if (row.mask) baton_mask_logits(scores, row.mask, size);
}

// With noise over all of `size` scores, in which there is room for whole vectors.
int64_t draw_plain(uint64_t key, const float* scores, int64_t size) {
  static thread_local Scratch memory;
  float* rough = (float*)scratch(memory, rounded_up(size, 16) * 4);
  V16 most = all16(-INFINITY);
  for (int64_t i = 0; i < size; i += 16) {
    V16 noisy = load16(scores + i) + rough_noise(key, uint64_t(i));
    if (size - i < 16) noisy = within16(noisy, 0, int32_t(size - i - 1), -INFINITY);
    store16(rough + i, noisy);
    most = max16(noisy, most);
  }
  const float near = max_of16(most) - NEAR;
  int64_t best = 0;
  double highest = -INFINITY;
  for (int64_t i = 0; i < size; i += 16) {
    if (!(max_of16(load16(rough + i)) >= near)) continue;
    for (int64_t j = i; j < std::min(i + 16, size); j++)
      if (rough[j] >= near)
        if (const double score = double(scores[j]) + exact_noise(key, j); score > highest) highest = score, best = j;
  }
  return best;
}

struct Candidate {
  float score;
  int32_t token_id;
};
// Best first; of equal ones the higher id.
bool before(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score == b.score && a.token_id > b.token_id);
}

float probability(float score, float highest) { return exp16(all16(score - highest))[0]; }

// What top_k leaves: ties with the k-th are kept.
void cut_to_k(int64_t top_k, std::vector<Candidate>& all) {
  std::nth_element(all.begin(), all.begin() + top_k - 1, all.end(), before);
  const float worst = all[top_k - 1].score;
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Candidate& of) { return of.score < worst; }), all.end());
}

// In units of 2^-40 of the best one's probability, to masses [size]; returns their sum, which has no order.
int64_t weigh(const Candidate* from, int64_t size, float highest, int64_t* masses) {
  int64_t total = 0;
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t end = std::min(i + 16, size);
    V16 scores = all16(-INFINITY);
    for (int64_t j = i; j < end; j++) scores[j - i] = from[j].score - highest;
    const V16 found = exp16(scores) * WHOLE;
    for (int64_t j = i; j < end; j++) total += masses[j] = int64_t(found[j - i]);
  }
  return total;
}

// The best that hold `kept_mass` of all probability, in no order: see nucleus() of sampling/filters.py.
void cut_to_nucleus(float kept_mass, float highest, std::vector<Candidate>& all) {
  static thread_local std::vector<int64_t> masses;
  const int64_t size = int64_t(all.size());
  masses.resize(size);
  const int64_t total = weigh(all.data(), size, highest, masses.data());
  int64_t missing = std::max<int64_t>(1, int64_t(std::ceil(double(kept_mass) * double(total))));
  // Those within a distance of the best one that have enough of it; of a whole vocabulary they are few.
  for (const float distance : {4.0f, 8.0f, 16.0f, float(INFINITY)}) {
    int64_t mass = 0;
    for (int64_t i = 0; i < size; i++) mass += all[i].score >= highest - distance ? masses[i] : 0;
    if (mass < missing && distance < INFINITY) continue;
    const auto is_far = [&](const Candidate& of) { return of.score < highest - distance; };
    all.erase(std::remove_if(all.begin(), all.end(), is_far), all.end());
    break;
  }
  // Those before `begin` stay, which is too little; those from `end` on go. A sort of all took 10.6 ms of 152k flat logits, this 3.9.
  int64_t begin = 0, end = int64_t(all.size());
  while (end - begin > 1) {
    const int64_t middle = (begin + end) / 2;
    std::nth_element(all.begin() + begin, all.begin() + middle, all.begin() + end, before);
    const int64_t mass = weigh(all.data() + begin, middle - begin, highest, masses.data());
    if (mass >= missing) end = middle;
    else missing -= mass, begin = middle;
  }
  all.resize(end);
}

int64_t draw_filtered(const SampleRow& row, uint64_t key, const float* scores, int64_t size) {
  static thread_local std::vector<Candidate> left;
  left.resize(size);
  for (int64_t i = 0; i < size; i++) left[i] = {std::isnan(scores[i]) ? -INFINITY : scores[i], int32_t(i)};  // an order needs numbers
  const float highest = scores[likeliest(scores, size)];
  if (0 < row.top_k && row.top_k < size) cut_to_k(row.top_k, left);
  if (row.kept_mass < 1) cut_to_nucleus(float(row.kept_mass), highest, left);
  if (row.least_ratio > 0) {
    const float ratio = float(row.least_ratio), far = std::log(ratio) - 0.01f;  // most need no exponential
    const auto is_rare = [&](const Candidate& of) {
      return of.score - highest < far || !(probability(of.score, highest) >= ratio);
    };
    left.erase(std::remove_if(left.begin(), left.end(), is_rare), left.end());
  }
  if (left.empty()) return 0;
  const auto noisy = [&](const Candidate& of) { return double(of.score) + exact_noise(key, of.token_id); };
  Candidate best = *std::min_element(left.begin(), left.end(), before);
  double most = noisy(best);
  for (const Candidate& of : left)
    if (const double score = noisy(of); score > most) most = score, best = of;
  return best.token_id;
}

}  // namespace

int64_t draw(const SampleRow& row, const float* logits, int64_t size) {
  static thread_local Scratch memory;
  if (!row.num_changes && !row.mask && row.temperature == 0) return likeliest(logits, size);
  float* scores = (float*)scratch(memory, rounded_up(size, 16) * 4);
  std::memcpy(scores, logits, size * 4);
  change(row, scores, size);
  if (row.temperature == 0) return likeliest(scores, size);
  const float temperature = float(row.temperature);
  for (int64_t i = 0; i < size; i += 16) store16(scores + i, load16(scores + i) / temperature);
  const uint64_t key = noise_key(row.seed, row.choice, row.position);
  if (row.top_k > 0 || row.kept_mass < 1 || row.least_ratio > 0) return draw_filtered(row, key, scores, size);
  return draw_plain(key, scores, size);
}

}  // namespace baton

using namespace baton;

// A token of each row of logits [num_rows][size].
extern "C" void baton_draw(const SampleRow* rows, const float* logits, int64_t num_rows, int64_t size, int64_t* drawn,
                           int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && num_rows * size > SERIAL_LOGITS)
  for (int64_t i = 0; i < num_rows; i++) drawn[i] = draw(rows[i], logits + i * size, size);
}
