// The tiles of AMX: eight registers of up to 16 rows of 64 bytes, and sums of products of whole tiles. They are macros
// because an instruction names its registers. With BATON_EMULATED_TILES they are C++, for tests on processors without.
#pragma once

#include "../linear.h"

namespace baton {

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64;

// What ldtilecfg reads. 0..3: sums of the 64 outputs of a panel; 4 and 5: 64 bytes of each row, and the weights that
// meet them; 6 and 7: the same for the `rest` bytes of a group that fill no tile.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig(int64_t num_rows, int64_t rest) {
    auto set = [&](int tile, int64_t rows_, int64_t bytes_) { rows[tile] = rows_, bytes[tile] = bytes_; };
    for (int v = 0; v < 4; ++v) set(v, num_rows, TILE_BYTES);
    set(4, num_rows, TILE_BYTES), set(5, TILE_ROWS, TILE_BYTES);
    if (rest) set(6, num_rows, rest), set(7, rest / 4, TILE_BYTES);
  }
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace baton

#ifndef BATON_EMULATED_TILES

// To gcc they read no memory: what it has not written yet it must write before.
#define TILE_CONFIGURE(config)    \
  asm volatile("" ::: "memory");  \
  _tile_loadconfig(&(config))
#define TILE_RELEASE() _tile_release()
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_DOT_INT8(sums, rows, weights) _tile_dpbsud(sums, rows, weights)  // signed rows, unsigned weights
#define TILE_DOT_BF16(sums, rows, weights) _tile_dpbf16ps(sums, rows, weights)

#else

#include <cmath>
#include <cstdlib>

namespace baton {

struct EmulatedTiles {
  TileConfig config{0, 0};
  bool configured = false;
  alignas(64) uint8_t values[8][TILE_ROWS][TILE_BYTES];

  static void check(bool holds) {  // what raises #UD
    if (!holds) std::abort();
  }
  void configure(const TileConfig& to) {
    check(to.palette == 1 && !to.start_row);
    config = to, configured = true;
    std::memset(values, 0, sizeof values);
  }
  void zero(int tile) {
    check(configured && config.rows[tile]);
    std::memset(values[tile], 0, sizeof values[tile]);
  }
  void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int row = 0; row < config.rows[tile]; ++row)
      std::memcpy(values[tile][row], static_cast<const char*>(from) + row * stride, config.bytes[tile]);
  }
  void store(int tile, void* to, int64_t stride) const {
    check(configured && config.rows[tile]);
    for (int row = 0; row < config.rows[tile]; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, values[tile][row], config.bytes[tile]);
  }
  void check_shapes(int sums, int rows, int weights) const {
    check(configured && config.rows[sums] && config.rows[sums] == config.rows[rows]);
    check(config.rows[weights] && config.bytes[sums] == config.bytes[weights] &&
          config.bytes[rows] == 4 * config.rows[weights]);
  }
  void dot_int8(int sums, int rows, int weights) {
    check_shapes(sums, rows, weights);
    for (int m = 0; m < config.rows[sums]; ++m) {
      int32_t* to = reinterpret_cast<int32_t*>(values[sums][m]);
      const int8_t* x = reinterpret_cast<const int8_t*>(values[rows][m]);
      for (int k = 0; k < config.rows[weights]; ++k)
        for (int n = 0; n < 16; ++n)
          for (int i = 0; i < 4; ++i) to[n] += x[4 * k + i] * values[weights][k][4 * n + i];
    }
  }
  // Subnormal values are zero before and after.
  static float flushed(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }
  // Inputs of even and of odd number are summed apart from 0, then both are added, then the sum of before. A product of
  // two bf16 is exact in fp32.
  void dot_bf16(int sums, int rows, int weights) {
    check_shapes(sums, rows, weights);
    for (int m = 0; m < config.rows[sums]; ++m) {
      float* to = reinterpret_cast<float*>(values[sums][m]);
      const uint16_t* x = reinterpret_cast<const uint16_t*>(values[rows][m]);
      float halves[2][16] = {};
      for (int k = 0; k < config.rows[weights]; ++k) {
        const uint16_t* w = reinterpret_cast<const uint16_t*>(values[weights][k]);
        for (int odd = 0; odd < 2; ++odd)
          for (int n = 0; n < 16; ++n)
            halves[odd][n] = flushed(std::fma(flushed(from_bf16(x[2 * k + odd])), flushed(from_bf16(w[2 * n + odd])),
                                              halves[odd][n]));
      }
      for (int n = 0; n < 16; ++n) to[n] = flushed(to[n] + flushed(halves[0][n] + halves[1][n]));
    }
  }
};
inline thread_local EmulatedTiles emulated;

}  // namespace baton

#define TILE_CONFIGURE(config) baton::emulated.configure(config)
#define TILE_RELEASE() (baton::emulated.configured = false)
#define TILE_ZERO(tile) baton::emulated.zero(tile)
#define TILE_LOAD(tile, from, stride) baton::emulated.load(tile, from, stride)
#define TILE_STORE(tile, to, stride) baton::emulated.store(tile, to, stride)
#define TILE_DOT_INT8(sums, rows, weights) baton::emulated.dot_int8(sums, rows, weights)
#define TILE_DOT_BF16(sums, rows, weights) baton::emulated.dot_bf16(sums, rows, weights)

#endif
