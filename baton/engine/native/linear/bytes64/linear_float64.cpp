// Floating-point weights: pairs of bf16 by vdpbf16ps, fp32 by fma, e4m3 widened to bf16 (exactly) on the way. One sum
// per output that takes the inputs in order; long inputs are cut in chunks that fit the cache, and a sum is put down
// between two chunks and taken up again, which changes no bit.
#include "../../common.h"

#ifdef BATON_VNNI_BF16
#include "linear64.h"

namespace baton {
namespace {

constexpr int64_t CHUNK_BYTES = 128 << 10;  // of a panel: with a chunk of rows and the next one it stays in a 1 MiB L2
constexpr int64_t MANY_ROWS = 128;          // whose chunks are twice as long: sums are put down half as often (3 %)
constexpr int64_t UNPACK_ROWS = 13;         // from here on an e4m3 panel is widened once instead of once per tile

// bf16 of the 128 non-negative e4m3 values: 4 exponent bits (bias 7), 3 of mantissa, subnormals below 2^-6.
struct E4M3Table {
  alignas(64) uint16_t values[128];
  E4M3Table() {
    for (int i = 0; i < 128; ++i) {
      int exponent = i >> 3, mantissa = i & 7;
      float value = exponent ? (8 + mantissa) * float(1 << exponent) / 1024.0f : mantissa / 512.0f;
      values[i] = i == 127 ? 0x7fc0 : to_bf16(value);
    }
  }
};
const E4M3Table TABLE;

struct Widen {
  __m512i t0, t1, t2, t3;
  Widen() {
    t0 = _mm512_load_si512(TABLE.values), t1 = _mm512_load_si512(TABLE.values + 32);
    t2 = _mm512_load_si512(TABLE.values + 64), t3 = _mm512_load_si512(TABLE.values + 96);
  }
  __m512i operator()(const uint8_t* from) const {  // 32 values
    __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    __m512i small = _mm512_permutex2var_epi16(t0, codes, t1), large = _mm512_permutex2var_epi16(t2, codes, t3);
    __mmask32 upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64));
    __m512i sign = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(128)), 8);
    return _mm512_or_si512(_mm512_mask_blend_epi16(upper, small, large), sign);
  }
};

// Inputs k0..k1 of a tile. GROUPED: a weight scale (and the row's) per group; otherwise the plain product.
template <int NUM_ROWS, int KIND, bool GROUPED>
void tile(const Linear& linear, const uint8_t* values, int64_t panel, const Rows& rows, int64_t row, int64_t k0,
          int64_t k1, Ahead& ahead, float* partial, void* y) {
  constexpr int STEP = KIND == W_F32 ? 1 : 2;                      // inputs a turn
  constexpr int64_t WIDTH = KIND == W_E4M3 ? 32 : 64;              // bytes of a vector's weights
  const int64_t group = GROUPED ? linear.group : k1 - k0;
  const char* x = rows.values + row * rows.stride;
  [[maybe_unused]] Widen widen;
  __m512 sums[NUM_ROWS][4];
#pragma GCC unroll 8
  for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) sums[m][v] = k0 ? _mm512_loadu_ps(partial + m * PANEL + 16 * v) : _mm512_setzero_ps();
  for (int64_t begin = k0; begin < k1; begin += group) {
    __m512 acc[NUM_ROWS][4];
#pragma GCC unroll 8
    for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) acc[m][v] = GROUPED ? _mm512_setzero_ps() : sums[m][v];
    const uint8_t* w = values + begin / STEP * 4 * WIDTH;
    for (int64_t k = begin; k < begin + group; k += STEP, w += 4 * WIDTH) {
      __m512i weights[4];
      ahead.fetch();
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        if constexpr (KIND == W_E4M3) weights[v] = widen(w + WIDTH * v);
        else weights[v] = _mm512_loadu_si512(w + WIDTH * v);
      }
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m) {
        const __m512i b = four_of(x + m * rows.stride + k / STEP * 4);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
          if constexpr (KIND == W_F32)
            acc[m][v] = _mm512_fmadd_ps(_mm512_castsi512_ps(weights[v]), _mm512_castsi512_ps(b), acc[m][v]);
          else acc[m][v] = _mm512_dpbf16_ps(acc[m][v], (__m512bh)weights[v], (__m512bh)b);
        }
      }
    }
    if constexpr (GROUPED) {
      int64_t g = begin / group, scale = (panel * linear.num_scales + g / linear.groups_per_scale) * PANEL;
      for (int m = 0; m < NUM_ROWS; ++m) {
        __m512 sx = _mm512_set1_ps(rows.scales[(row + m) * rows.num_groups + g]);
        for (int v = 0; v < 4; ++v)
          sums[m][v] = _mm512_fmadd_ps(_mm512_mul_ps(acc[m][v], sx),
                                       load_scales(linear.scales, linear.scale_kind, scale + 16 * v), sums[m][v]);
      }
    } else {
#pragma GCC unroll 8
      for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) sums[m][v] = acc[m][v];
    }
  }
  alignas(64) float last[NUM_ROWS * PANEL];
  const bool done = k1 == linear.padded_in, plain = linear.is_plain_leaf(), adds = done && linear.y_kind == ADDED_SUMS;
  float* to = !done ? partial : plain ? static_cast<float*>(y) + row * PANEL : last;
#pragma GCC unroll 8
  for (int m = 0; m < NUM_ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      float* at = to + m * PANEL + 16 * v;
      _mm512_storeu_ps(at, adds ? _mm512_add_ps(sums[m][v], _mm512_loadu_ps(at)) : sums[m][v]);
    }
  for (int m = 0; done && !plain && m < NUM_ROWS; ++m) finish_row(linear, panel, rows, row + m, last + m * PANEL, y);
}

template <int KIND, bool GROUPED>
void tiles(const Linear& linear, const uint8_t* values, const uint8_t* next, int64_t panel, const Rows& rows,
           int64_t chunk, float* partial, void* y) {
  constexpr int64_t BYTES = PANEL * (KIND == W_F32 ? 4 : KIND == W_BF16 ? 2 : 1);  // of an input
  const int64_t num_tiles = (rows.num_rows + MAX_ROWS - 1) / MAX_ROWS, in = linear.padded_in;
  for (int64_t k0 = 0; k0 < in; k0 += chunk) {
    int64_t k1 = std::min(in, k0 + chunk);
    Ahead ahead;
    // Tiles behind the first find the chunk in the cache: 8 rows on a core at 22.3 instead of 19 GB/s.
    if (num_tiles > 1 && (k1 < in || next)) {
      const uint8_t* from = k1 < in ? values + k1 * BYTES : next;
      ahead = {from, from + std::min(chunk, k1 < in ? in - k1 : in) * BYTES, num_tiles > 2 ? 64 : 128};
    }
    if (num_tiles == 1 && (KIND == W_E4M3 || rows.num_rows > 3)) {
      const uint8_t* from = values + OWN_AHEAD;
      ahead = {from, from + in * BYTES, KIND == W_E4M3 ? 128 : 256};
    }
    in_row_tiles(0, rows.num_rows, num_tiles, [&](int64_t row, auto count) {
      tile<decltype(count)::value, KIND, GROUPED>(linear, values, panel, rows, row, k0, k1, ahead, partial + row * PANEL, y);
    });
  }
}

}  // namespace

void float_panel(const Linear& linear, int64_t panel, const uint8_t* next, const Rows& rows, void* y, Scratch& memory) {
  const int64_t in = linear.padded_in, kind = linear.kind;
  const uint8_t* values = linear.values + panel * panel_bytes(linear, in);
#ifdef BATON_AMX
  if (kind == W_BF16) return bf16_tiles(linear, values, panel, rows, y);
#endif
  if (kind == W_E4M3) {
    if (rows.num_rows < UNPACK_ROWS) return tiles<W_E4M3, true>(linear, values, next, panel, rows, in, nullptr, y);
    uint8_t* wide = reinterpret_cast<uint8_t*>(scratch(memory, 2 * PANEL * in));
    Widen widen;
    for (int64_t i = 0; i < PANEL * in; i += 32) _mm512_store_si512(wide + 2 * i, widen(values + i));
    return tiles<W_BF16, true>(linear, wide, nullptr, panel, rows, in, nullptr, y);
  }
  // Few rows take the panel as it comes from memory, once.
  const int64_t chunk_bytes = rows.num_rows < MANY_ROWS ? CHUNK_BYTES : 2 * CHUNK_BYTES;
  int64_t chunk = rows.num_rows <= MAX_ROWS ? in : std::min(in, chunk_bytes / panel_bytes(linear, 1));
  float* partial = chunk == in ? nullptr : reinterpret_cast<float*>(scratch(memory, rows.num_rows * PANEL * 4));
  if (kind == W_F32) tiles<W_F32, false>(linear, values, next, panel, rows, chunk, partial, y);
  else tiles<W_BF16, false>(linear, values, next, panel, rows, chunk, partial, y);
}

}  // namespace baton

#endif
