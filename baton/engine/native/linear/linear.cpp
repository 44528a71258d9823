// One call per linear layer: prepare the rows, then share out the panels. Which thread takes which panel, and how many
// there are, changes no bit.
#include <atomic>

#include "linear.h"

#ifdef BATON_VNNI_BF16
#include "bytes64/linear64.h"
#else
#include "bytes32/linear32.h"
#endif

using namespace baton;

namespace {

constexpr int64_t SERIAL_WORK = 1 << 18;  // multiplications that cost less than waking a second thread (about 5 us)
// A thread takes neighbouring panels, so that what the processor fetches beyond the end of one is not lost: one row of 8192 x
// 2048 int4 on two threads at 47 instead of 34 GB/s (AVX2), of int8 at 57 instead of 50.
constexpr int64_t RUN_BYTES = 1 << 19;
constexpr int64_t MIN_RUNS = 4;      // of a thread, where there are panels enough
constexpr int64_t MAX_RUN_ROWS = 16;  // of more a panel takes so long that threads end together only if they take one

int64_t bytes_of_scale(const Linear& linear) { return linear.scale_kind == S_FP32 ? 4 : 2; }
bool in_parts(const Linear& linear) { return linear.num_leaves > 1 && !adds_leaves(linear); }
const void* moved(const void* from, int64_t bytes) { return from ? static_cast<const char*>(from) + bytes : nullptr; }

void multiply(const Linear& linear, int64_t panel, const uint8_t* next, const Rows& rows, void* y, Scratch& memory) {
  const bool integers = linear.kind == U8 || linear.kind == U4;
  (integers ? int_panel : float_panel)(linear, panel, next, rows, y, memory);
}

// One leaf of the first panel as a weight of its own, of 64 outputs and without bias, and its inputs of the rows.
struct Leaf {
  Linear linear;
  Rows rows;
};

Leaf leaf_of(const Linear& linear, const Rows& rows, int64_t leaf) {
  const int64_t in = linear.padded_in / linear.num_leaves, groups = linear.num_groups / linear.num_leaves;
  const int64_t first = leaf * groups, scale = first / linear.groups_per_scale;
  Leaf own{linear, rows};
  own.linear.values += leaf * panel_bytes(linear, in);
  own.linear.num_out = PANEL, own.linear.num_in = own.linear.padded_in = in, own.linear.bias = nullptr;
  own.linear.num_groups = groups, own.linear.num_leaves = 1;
  own.linear.num_scales = (groups + linear.groups_per_scale - 1) / linear.groups_per_scale;
  own.linear.y_kind = leaf % 2 ? ADDED_SUMS : SUMS;
  const int64_t at = scale * PANEL * bytes_of_scale(linear);
  own.linear.scales = moved(linear.scales, at), own.linear.offsets = moved(linear.offsets, at);
  own.rows.values += leaf * in * bytes_of_x(linear);
  own.rows.scales += first, own.rows.starts += first, own.rows.shifts += first;
  const int32_t *columns = linear.outlier_columns, *behind = columns + linear.num_outliers;
  const int32_t* outlier = std::lower_bound(columns, behind, leaf * in);
  own.linear.num_outliers = std::lower_bound(outlier, behind, (leaf + 1) * in) - outlier;
  own.linear.outlier_values += (outlier - columns) * PANEL;
  own.rows.outliers += outlier - columns;
  return own;
}

// The leaves of a panel. A second one adds its sums to its neighbour's; a pair, and what it belongs to, is added to the
// one before as soon as both are there.
void multiply_leaves(const Linear& linear, const Leaf* leaves, int64_t panel, const uint8_t* next, const Rows& rows, void* y,
                     Scratch& memory, Scratch& memory_of_sums) {
  const int64_t size = rows.num_rows * PANEL, leaf_bytes = panel_bytes(linear, leaves[0].linear.padded_in);
  const int64_t scale_bytes = panel * linear.num_scales * PANEL * bytes_of_scale(linear);
  float* const sums = reinterpret_cast<float*>(scratch(memory_of_sums, 3 * size * 4));
  float* to = sums;
  for (int64_t leaf = 0; leaf < linear.num_leaves; ++leaf) {
    Linear own = leaves[leaf].linear;
    own.values += panel * linear.num_leaves * leaf_bytes;
    own.scales = moved(own.scales, scale_bytes), own.offsets = moved(own.offsets, scale_bytes);
    own.outlier_values += panel * linear.num_outliers * PANEL;
    const uint8_t* ahead = leaf + 1 < linear.num_leaves ? own.values + leaf_bytes : next;
    multiply(own, 0, ahead, leaves[leaf].rows, to, memory);
    if (leaf % 2 == 0) continue;
    for (int64_t pair = leaf / 2; pair & 1; pair >>= 1, to -= size)
      for (int64_t i = 0; i < size; ++i) to[i - size] += to[i];
    to += size;
  }
  Linear whole = linear;
  whole.num_outliers = 0;
  for (int64_t row = 0; row < rows.num_rows; ++row) finish_row(whole, panel, rows, row, sums + row * PANEL, y);
}

// A product with its rows as the kernels want them, and its places among the rows and panels of all.
struct Prepared {
  Product product;
  Rows rows;
  const Leaf* leaves;
  int64_t first_row, first_panel;

  const uint8_t* values(int64_t panel) const {
    const Linear& linear = *product.linear;
    return linear.values + (panel - first_panel) * panel_bytes(linear, linear.padded_in);
  }
};

int64_t bytes_of_rows(const Linear& linear, int64_t num_rows) {
  const int64_t stride = stride_of(linear.padded_in * bytes_of_x(linear));
  return rounded_up(num_rows * (stride + (3 * linear.num_groups + linear.num_outliers) * 4), LINE);
}

Rows rows_at(const Linear& linear, int64_t num_rows, char* at) {
  const int64_t num_groups = linear.num_groups, stride = stride_of(linear.padded_in * bytes_of_x(linear));
  const int64_t per_group = num_rows * num_groups * 4;
  auto take = [&](int64_t num_bytes) { return at += num_bytes, at - num_bytes; };
  return {num_rows, stride, num_groups, linear.num_outliers, take(num_rows * stride),
          reinterpret_cast<float*>(take(per_group)), reinterpret_cast<int32_t*>(take(per_group)),
          reinterpret_cast<float*>(take(per_group)), reinterpret_cast<float*>(at)};
}

}  // namespace

void baton::multiply_all(const Product* products, int64_t num_products, int64_t num_threads) {
  thread_local Scratch memory;
  thread_local std::vector<Prepared> prepared;
  thread_local std::vector<Leaf> leaves;
  int64_t num_bytes = 0, num_leaves = 0, work = 0, weight_bytes = 0;
  for (int64_t i = 0; i < num_products; ++i) {
    const Linear& linear = *products[i].linear;
    num_bytes += bytes_of_rows(linear, products[i].num_rows);
    num_leaves += in_parts(linear) ? linear.num_leaves : 0;
    work += products[i].num_rows * linear.num_out * linear.padded_in;
    weight_bytes += linear.num_panels() * panel_bytes(linear, linear.padded_in);
  }
  char* at = scratch(memory, num_bytes);
  prepared.clear(), leaves.clear(), leaves.reserve(num_leaves);
  int64_t num_rows = 0, num_panels = 0;
  for (int64_t i = 0; i < num_products; ++i) {
    const Linear& linear = *products[i].linear;
    const Rows rows = rows_at(linear, products[i].num_rows, at);
    prepared.push_back({products[i], rows, leaves.data() + leaves.size(), num_rows, num_panels});
    for (int64_t leaf = 0; in_parts(linear) && leaf < linear.num_leaves; ++leaf)
      leaves.push_back(leaf_of(linear, rows, leaf));
    at += bytes_of_rows(linear, rows.num_rows), num_rows += rows.num_rows, num_panels += linear.num_panels();
  }
  const Prepared *const first = prepared.data(), *const last = first + num_products - 1;
  if (work < SERIAL_WORK) num_threads = 1;
  const auto prepare = [=](int64_t row) {
    const Prepared* own = first;
    while (own < last && row >= own[1].first_row) ++own;
    prepare_row(*own->product.linear, own->product.x, own->product.largest, row - own->first_row, own->rows);
  };
  const int64_t run_of_bytes = RUN_BYTES * num_panels / std::max<int64_t>(1, weight_bytes);
  const int64_t longest = num_rows > MAX_RUN_ROWS ? 1 : num_panels / (MIN_RUNS * num_threads);
  const int64_t run = std::max<int64_t>(1, std::min(run_of_bytes, longest));
  std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    thread_local Scratch own_memory, own_sums;
    if (num_rows == 1) {
#pragma omp single
      prepare(0);
    } else {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < num_rows; ++row) prepare(row);
    }
    // A run is taken before the last panel of the one before is multiplied, which fetches its first meanwhile.
    const Prepared *own = first, *then = first;
    for (int64_t panel = run * taken++, next; panel < num_panels; panel = next, own = then) {
      next = (panel + 1) % run ? panel + 1 : run * taken++;
      while (own < last && panel >= own[1].first_panel) ++own;
      for (then = own; then < last && next >= then[1].first_panel;) ++then;
      const uint8_t* ahead = next < num_panels ? then->values(next) : nullptr;
      const Linear& linear = *own->product.linear;
      const int64_t of_own = panel - own->first_panel;
      if (in_parts(linear))
        multiply_leaves(linear, own->leaves, of_own, ahead, own->rows, own->product.y, own_memory, own_sums);
      else multiply(linear, of_own, ahead, own->rows, own->product.y, own_memory);
    }
  }
}

extern "C" void baton_linear(const Linear* linear, const void* x, const float* largest, void* y, int64_t num_rows,
                             int64_t num_threads) {
  const Product product{linear, x, largest, y, num_rows};
  multiply_all(&product, 1, num_threads);
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
