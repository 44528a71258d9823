// Activations as the panels want them: quantized to int8 or e4m3, rounded to bf16, or as they are; in the weight's
// order, without its outlier columns.
#include "linear.h"

#if defined(BATON_AVX512) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)

namespace baton {
namespace {

constexpr float TINY = 1e-30f;  // groups that are no larger count as zero: 127 / max would overflow

__mmask16 mask_of(int64_t left) { return left >= 16 ? 0xffff : (1u << left) - 1; }

// fp32 [padded_in] of one row of x, zeros behind it.
void load_row(const Linear& linear, const void* x, int64_t row, float* to) {
  const int64_t n = linear.num_in;
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 mask = mask_of(n - i);
    __m512 values = linear.x_kind == X_BF16 ? load16_bf16(static_cast<const uint16_t*>(x) + row * n + i, mask)
                                          : _mm512_maskz_loadu_ps(mask, static_cast<const float*>(x) + row * n + i);
    _mm512_mask_storeu_ps(to + i, mask, values);
  }
  std::fill(to + n, to + linear.padded_in, 0.0f);
}

// Largest magnitude by its bits, so that a NaN is the largest of all and comes out as the scale.
float largest(const float* x, int64_t n) {
  __m512i top = _mm512_setzero_si512();
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int64_t i = 0; i < n; i += 16) {
    __m512 values = _mm512_maskz_loadu_ps(mask_of(n - i), x + i);
    top = _mm512_max_epu32(top, _mm512_and_si512(_mm512_castps_si512(values), magnitude));
  }
  uint32_t bits = _mm512_reduce_max_epu32(top);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void round_bf16(const float* x, int64_t n, uint16_t* to) {
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 mask = mask_of(n - i);
    store16_bf16(to + i, _mm512_maskz_loadu_ps(mask, x + i), mask);
  }
}

// Round to nearest even of x * inverse; returns the sum of the integers.
int32_t quantize_int8(const float* x, int64_t n, float inverse, int8_t* to) {
  __m512i sum = _mm512_setzero_si512();
  const __m512 factor = _mm512_set1_ps(inverse);
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 mask = mask_of(n - i);
    __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), factor));
    sum = _mm512_mask_add_epi32(sum, mask, sum, q);
    _mm_mask_storeu_epi8(to + i, mask, _mm512_cvtsepi32_epi8(q));
  }
  return _mm512_reduce_add_epi32(sum);
}

// x / scale rounded to e4m3 (nearest even, saturating), as bf16: its 4 significant bits fit.
void round_e4m3(const float* x, int64_t n, float inverse, uint16_t* to) {
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 mask = mask_of(n - i);
    __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), _mm512_set1_ps(inverse));
    __m512 exponent = _mm512_max_ps(_mm512_getexp_ps(v), _mm512_set1_ps(-6.0f));
    __m512 eighths = _mm512_scalef_ps(v, _mm512_sub_ps(_mm512_set1_ps(3.0f), exponent));
    v = _mm512_scalef_ps(_mm512_roundscale_ps(eighths, 0), _mm512_sub_ps(exponent, _mm512_set1_ps(3.0f)));
    v = _mm512_max_ps(_mm512_set1_ps(-448.0f), _mm512_min_ps(_mm512_set1_ps(448.0f), v));
    store16_bf16(to + i, v, mask);
  }
}

}  // namespace

void prepare_row(const Linear& linear, const void* x, int64_t row, const Rows& rows) {
  thread_local std::vector<char> memory;
  const int64_t in = linear.padded_in, num_groups = linear.num_groups(), activations = linear.activations;
  char* to = rows.values + row * rows.stride;
  float* values = reinterpret_cast<float*>(scratch(memory, 8 * in));
  load_row(linear, x, row, values);
  for (int64_t i = 0; i < linear.num_outliers; ++i) {
    float& taken = values[linear.outlier_columns[i]];
    rows.outliers[row * linear.num_outliers + i] = taken;
    taken = 0.0f;
  }
  if (linear.order) {
    float* ordered = values + in;
    for (int64_t i = 0; i < linear.num_in; ++i) ordered[i] = values[linear.order[i]];
    std::fill(ordered + linear.num_in, ordered + in, 0.0f);
    values = ordered;
  }
  if (activations == AS_THEY_COME) {
    if (linear.kind == W_F32) std::memcpy(to, values, 4 * in);
    else round_bf16(values, in, reinterpret_cast<uint16_t*>(to));
    std::fill_n(rows.scales + row * num_groups, num_groups, 1.0f);
    return;
  }
  const bool int8 = activations == INT8_PER_ROW || activations == INT8_PER_GROUP;
  const bool per_row = activations == INT8_PER_ROW || activations == E4M3_PER_ROW;
  const int32_t zero = linear.kind == U4 ? -8 : -128;
  const float top = int8 ? 127.0f : 448.0f;
  float scale = linear.input_scale, inverse = 1.0f / scale;  // of E4M3_STATIC
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t group = linear.group, begin = g * group, at = row * num_groups + g;
    if (activations != E4M3_STATIC && (g == 0 || !per_row)) {
      float max = per_row ? largest(values, in) : largest(values + begin, group);
      scale = max / top, inverse = max <= TINY ? 0.0f : top / max;
    }
    rows.scales[at] = scale;
    if (int8) {
      const int32_t sum = quantize_int8(values + begin, group, inverse, reinterpret_cast<int8_t*>(to) + begin);
      rows.starts[at] = zero * sum, rows.shifts[at] = scale * float(sum);
    }
    else round_e4m3(values + begin, group, inverse, reinterpret_cast<uint16_t*>(to) + begin);
  }
}

}  // namespace baton

#endif
