// What adapters add to the linear layers of a step, up (down x): of each adapter all its rows together, wherever they lie,
// so that its weights are read once.
//
// A sum has one order, whatever is beside it in the step: that of down 16 lanes along the inputs (of bf16 by pairs where
// there are products of pairs), that of up one rank after the other, both in fp32. What is added is rounded with what it is
// added to, once.
#include "fused.h"

namespace baton {
namespace {

constexpr int64_t TILE = 4;     // ranks, or vectors of outputs
constexpr int64_t INPUTS = 32;  // of a rank that lie side by side, those of the next rank behind them
constexpr int64_t AHEAD = 4096; // bytes, as far as weights are fetched: each is read once a step
#ifdef BATON_AVX512
constexpr int MAX_TILE_ROWS = 4;  // of a tile: 16 sums in 32 registers
#else
constexpr int MAX_TILE_ROWS = 1;
#endif
constexpr int64_t CHUNK = 32;             // rows of a task, which read the same ranks
constexpr int64_t SERIAL_WORK = 1 << 16;  // multiplications, of weights from memory: less than waking a second thread

// The rows of one adapter, and what down makes of them.
struct Run {
  const LowRank* pair;
  const int64_t* rows;
  int64_t num_rows;
  float* sums;  // [num_rows][rank]
};
// Ranks [rank, rank + TILE) of some rows.
struct Task {
  Run run;
  int64_t rank;
};

// Calls tile(first, std::integral_constant<int, count>) for 0 .. num_rows - 1.
template <class Tile>
void in_tiles(int64_t num_rows, Tile tile) {
  int64_t row = 0;
  if constexpr (MAX_TILE_ROWS == 4)
    for (; row + 4 <= num_rows; row += 4) tile(row, std::integral_constant<int, 4>());
  if constexpr (MAX_TILE_ROWS == 4)
    for (; row + 2 <= num_rows; row += 2) tile(row, std::integral_constant<int, 2>());
  for (; row < num_rows; row++) tile(row, std::integral_constant<int, 1>());
}

void fetch(const char* from, int64_t num_bytes) {
  for (int64_t line = 0; line < num_bytes; line += 64) __builtin_prefetch(from + AHEAD + line, 0, 2);
}

// Sums of a TILE of ranks; those behind the last rank, of zeros, are not kept.
template <int64_t KIND, int ROWS>
void go_down(const Task& task, const void* x, int64_t first) {
  constexpr int64_t WIDTH = bytes_of(KIND), BYTES = TILE * INPUTS * WIDTH;
  const LowRank& pair = *task.run.pair;
  const int64_t size = pair.num_in, num_blocks = (size + INPUTS - 1) / INPUTS;
  const char* weights = (const char*)pair.down + task.rank / TILE * num_blocks * BYTES;
  int64_t from[ROWS];
  for (int m = 0; m < ROWS; m++) from[m] = task.run.rows[first + m] * size;
  V16 sums[ROWS][TILE] = {};
  for (int64_t i = 0; i < size; i += INPUTS, weights += BYTES) {
    fetch(weights, BYTES);
#ifdef BATON_VNNI_BF16
    if constexpr (KIND == BF16) {
      const __mmask32 mask = size - i < INPUTS ? 0xffff : ~0u;
      __m512bh w[TILE];
#pragma GCC unroll 4
      for (int64_t r = 0; r < TILE; r++) w[r] = (__m512bh)_mm512_loadu_si512(weights + r * INPUTS * WIDTH);
#pragma GCC unroll 4
      for (int m = 0; m < ROWS; m++) {
        const __m512bh values = (__m512bh)_mm512_maskz_loadu_epi16(mask, (const uint16_t*)x + from[m] + i);
#pragma GCC unroll 4
        for (int64_t r = 0; r < TILE; r++) sums[m][r] = (V16)_mm512_dpbf16_ps((__m512)sums[m][r], w[r], values);
      }
      continue;
    }
#endif
    for (int64_t half = 0; half < INPUTS && i + half < size; half += 16) {
      V16 w[TILE];
#pragma GCC unroll 4
      for (int64_t r = 0; r < TILE; r++) w[r] = read16(KIND, weights, r * INPUTS + half);
#pragma GCC unroll 4
      for (int m = 0; m < ROWS; m++) {
        const V16 values = read16(KIND, x, from[m] + i + half);
#pragma GCC unroll 4
        for (int64_t r = 0; r < TILE; r++) sums[m][r] = fma16(w[r], values, sums[m][r]);
      }
    }
  }
  const int64_t num_ranks = std::min(TILE, pair.rank - task.rank);
  for (int m = 0; m < ROWS; m++)
    for (int64_t r = 0; r < num_ranks; r++) task.run.sums[(first + m) * pair.rank + task.rank + r] = sum16(sums[m][r]);
}

// Onto TILE vectors of outputs from `block` on, or as many as there are before `end`; of those behind it the last one
// again.
template <int64_t KIND, int ROWS>
void go_up(const Run& run, const Up& up, int64_t block, int64_t end, int64_t first, void* y) {
  const int64_t num_blocks = std::min(TILE, end - block);
  int64_t weights[TILE];
  for (int64_t v = 0; v < TILE; v++) weights[v] = (block + std::min(v, num_blocks - 1)) * up.rank * 16;
  const float* narrow = run.sums + first * run.pair->rank + up.first_rank;
  constexpr int64_t WIDTH = bytes_of(KIND);
  if (first == 0) fetch((const char*)up.values + weights[0] * WIDTH, std::min(AHEAD, num_blocks * up.rank * 16 * WIDTH));
  V16 sums[ROWS][TILE] = {};
  for (int64_t r = 0; r < up.rank; r++) {
    V16 w[TILE];
#pragma GCC unroll 4
    for (int64_t v = 0; v < TILE; v++) w[v] = read16(KIND, up.values, weights[v] + r * 16);
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++) {
      const V16 by = all16(narrow[m * run.pair->rank + r]);
#pragma GCC unroll 4
      for (int64_t v = 0; v < TILE; v++) sums[m][v] = fma16(w[v], by, sums[m][v]);
    }
  }
  for (int m = 0; m < ROWS; m++) {
    const int64_t at = run.rows[first + m] * run.pair->num_out + up.first_out + block * 16;
    for (int64_t v = 0; v < num_blocks; v++) write16(KIND, y, at + v * 16, read16(KIND, y, at + v * 16) + sums[m][v]);
  }
}

// Onto outputs [begin, end) of all rows of a run.
template <int64_t KIND>
void add_outputs(const Run& run, int64_t begin, int64_t end, void* y) {
  for (int64_t i = 0; i < run.pair->num_ups; i++) {
    const Up& up = run.pair->ups[i];
    const int64_t first = std::max(begin, up.first_out) - up.first_out, last = std::min(end - up.first_out, up.num_out);
    for (int64_t at = first; at < last; at += 16 * TILE)
      in_tiles(run.num_rows, [&](int64_t row, auto rows) {
        go_up<KIND, decltype(rows)::value>(run, up, at / 16, last / 16, row, y);
      });
  }
}

template <int64_t KIND>
void add_runs(const std::vector<Run>& runs, const std::vector<Task>& tasks, const void* x, void* y, int64_t num_threads) {
  const Task* const all = tasks.data();
  const int64_t num_tasks = int64_t(tasks.size()), num_out = runs[0].pair->num_out, tile = 16 * TILE;
  const int64_t num_turns = 4 * num_threads;  // of all threads, each among weights that lie together
  const int64_t neighbours = std::max<int64_t>(1, num_tasks / num_turns);
  const int64_t width = (num_out + num_turns * tile - 1) / (num_turns * tile) * tile;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#pragma omp for schedule(dynamic, neighbours)
    for (int64_t i = 0; i < num_tasks; i++)
      in_tiles(all[i].run.num_rows, [&](int64_t row, auto rows) { go_down<KIND, decltype(rows)::value>(all[i], x, row); });
#pragma omp for schedule(dynamic)
    for (int64_t begin = 0; begin < num_out; begin += width)
      for (const Run& run : runs) add_outputs<KIND>(run, begin, std::min(begin + width, num_out), y);
  }
}

}  // namespace

bool adapt(const Model& model, const Step& step, int64_t index, Adapted which, const void* x, void* y) {
  thread_local Scratch memory;
  thread_local std::vector<Run> runs;
  thread_local std::vector<Task> tasks;
  runs.clear(), tasks.clear();
  int64_t num_sums = 0, work = 0;
  for (int64_t i = 0; i < step.num_adapters; i++) {
    const AdapterRows& of = step.adapters[i];
    const LowRank& pair = of.layers[index * NUM_ADAPTED + which];
    if (!pair.down) continue;
    runs.push_back({&pair, of.rows, of.num_rows, nullptr});
    num_sums += of.num_rows * pair.rank, work += of.num_rows * pair.rank * (pair.num_in + pair.num_out);
  }
  if (runs.empty()) return true;
  if (model.ranks && (which == OUTPUT || which == DOWN))
    if (!(x = inputs_of_all(model, step, runs[0].pair->num_in / model.ranks->degree, x))) return false;
  float* sums = (float*)scratch(memory, num_sums * 4);
  for (Run& run : runs) {
    run.sums = sums, sums += run.num_rows * run.pair->rank;
    for (int64_t row = 0; row < run.num_rows; row += CHUNK)
      for (int64_t rank = 0; rank < run.pair->rank; rank += TILE)
        tasks.push_back({{run.pair, run.rows + row, std::min(CHUNK, run.num_rows - row), run.sums + row * run.pair->rank}, rank});
  }
  const int64_t num_threads = work < SERIAL_WORK ? 1 : step.num_threads;
  (model.kind == FP32 ? add_runs<FP32> : add_runs<BF16>)(runs, tasks, x, y, num_threads);
  return true;
}

}  // namespace baton
