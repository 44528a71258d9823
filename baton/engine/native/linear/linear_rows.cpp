// Activations as the panels want them: quantized to int8 or e4m3, rounded to bf16, or as they are; in the weight's
// order, without its outlier columns.
#include "../common.h"

#ifdef BATON_VNNI_BF16
#include "bytes64/rows64.h"
#else
#include "bytes32/rows32.h"
#endif

namespace baton {

constexpr float TINY = 1e-30f;  // groups that are no larger count as zero: 127 / max would overflow

void prepare_row(const Linear& linear, const void* x, const float* given, int64_t row, const Rows& rows) {
  thread_local Scratch memory;
  const int64_t in = linear.padded_in, num_groups = linear.num_groups, activations = linear.activations;
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
    else round_bf16(values, in, to);
    std::fill_n(rows.scales + row * num_groups, num_groups, 1.0f);
    return;
  }
  const bool int8 = activations == INT8_PER_ROW || activations == INT8_PER_GROUP;
  const bool per_row = activations == INT8_PER_ROW || activations == E4M3_PER_ROW;
  const float top = int8 ? 127.0f : 448.0f;
  float scale = linear.input_scale, inverse = 1.0f / scale;  // of E4M3_STATIC
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t group = linear.group, begin = g * group, at = row * num_groups + g;
    if (activations != E4M3_STATIC && (g == 0 || !per_row)) {
      float max = !per_row ? largest(values + begin, group) : given ? given[row] : largest(values, in);
      scale = max / top, inverse = max <= TINY ? 0.0f : top / max;
    }
    rows.scales[at] = scale;
    if (int8) {
      const int32_t sum = quantize_int8(linear, values, begin, inverse, to);
      rows.starts[at] = -zero_of(linear) * sum, rows.shifts[at] = scale * float(sum);
    }
    else round_e4m3(values, begin, group, inverse, to);
  }
}

}  // namespace baton
