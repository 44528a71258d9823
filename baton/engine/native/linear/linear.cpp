// One call per linear layer: prepare the rows, then share out the panels. Which thread takes which panel, and how many
// there are, changes no bit.
#include <atomic>

#include "linear.h"

using namespace baton;

namespace {
constexpr int64_t SERIAL_WORK = 1 << 18;  // multiplications that cost less than waking a second thread (about 5 us)
}

// x [num_rows][num_in] -> y [num_rows][num_out], both of linear->x_kind, rows without gaps.
extern "C" void baton_linear(const Linear* linear, const void* x, void* y, int64_t num_rows, int64_t num_threads) {
  thread_local std::vector<char> memory;
  const int64_t num_groups = linear->num_groups(), stride = stride_of(linear->padded_in * bytes_of_x(*linear));
  const int64_t per_group = num_rows * num_groups * 4;
  char* at = scratch(memory, num_rows * stride + 3 * per_group + num_rows * linear->num_outliers * 4);
  auto take = [&](int64_t num_bytes) { return at += num_bytes, at - num_bytes; };
  Rows rows{num_rows, stride, take(num_rows * stride), reinterpret_cast<float*>(take(per_group)),
            reinterpret_cast<int32_t*>(take(per_group)), reinterpret_cast<float*>(take(per_group)),
            reinterpret_cast<float*>(at)};
  const bool integers = linear->kind == U8 || linear->kind == U4;
  const int64_t num_panels = linear->num_panels();
  if (num_rows * linear->num_out * linear->padded_in < SERIAL_WORK) num_threads = 1;
  std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    thread_local std::vector<char> own;
    if (num_rows == 1) {
#pragma omp single
      prepare_row(*linear, x, 0, rows);
    } else {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < num_rows; ++row) prepare_row(*linear, x, row, rows);
    }
    // A panel is taken before the one ahead of it is multiplied, which fetches it meanwhile.
    for (int64_t panel = taken++, next; panel < num_panels; panel = next) {
      next = taken++;
      const int64_t ahead = next < num_panels ? next : panel;
      if (integers) int_panel(*linear, panel, ahead, rows, y, own);
      else float_panel(*linear, panel, ahead, rows, y, own);
    }
  }
}

// Of floating point, what decides bits besides the source: bf16 by pairs (vdpbf16ps), in linear layers by tiles of 32 inputs
// (AMX), or all by fma in fp32.
extern "C" const char* baton_products() {
#if defined(BATON_AMX)
  return "bf16-tiles";
#elif defined(BATON_VNNI_BF16)
  return "bf16-pairs";
#else
  return "fp32";
#endif
}

// What all kernels keep, of all threads.
extern "C" int64_t baton_scratch_bytes() { return baton::scratch_bytes; }
