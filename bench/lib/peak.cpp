// What the multipliers of this processor do at best on registers alone, on all threads given: vdpbf16ps and vpdpbusd
// where it is compiled for them, else vfmadd231ps, and vpmaddwd with vpaddd. Prints operations a second of each (a product
// and a sum are two), or nothing below AVX2.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

template <class Work>
double best_seconds(int num_threads, Work work) {
  double best = 1e9;
  for (int round = 0; round < 5; ++round) {
    const auto begun = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (int i = 0; i < num_threads; ++i) threads.emplace_back(work);
    for (auto& thread : threads) thread.join();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
  }
  return best;
}

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

#define SUMS(OP) /* 24 independent ones hide the latency of any such unit */ \
  ONE(OP, 0) ONE(OP, 1) ONE(OP, 2) ONE(OP, 3) ONE(OP, 4) ONE(OP, 5) ONE(OP, 6) ONE(OP, 7) \
  ONE(OP, 8) ONE(OP, 9) ONE(OP, 10) ONE(OP, 11) ONE(OP, 12) ONE(OP, 13) ONE(OP, 14) ONE(OP, 15) \
  ONE(OP, 16) ONE(OP, 17) ONE(OP, 18) ONE(OP, 19) ONE(OP, 20) ONE(OP, 21) ONE(OP, 22) ONE(OP, 23)
#define ONE(OP, I) OP " %%zmm31, %%zmm30, %%zmm" #I "\n"
#define TURN(OP) asm volatile("vpxord %%zmm30, %%zmm30, %%zmm30\nvpxord %%zmm31, %%zmm31, %%zmm31\n" SUMS(OP) ::: \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
  "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm30", "xmm31")

constexpr long TURNS = 20'000'000;  // 0.07 s at two a cycle

int main(int, char** arguments) {
  const int num_threads = std::atoi(arguments[1]);
  const double sums = 24.0 * TURNS * num_threads;
  const double bf16 = best_seconds(num_threads, [] { for (long i = 0; i < TURNS; ++i) TURN("vdpbf16ps"); });
  const double int8 = best_seconds(num_threads, [] { for (long i = 0; i < TURNS; ++i) TURN("vpdpbusd"); });
  std::printf("%g %g\n", sums * 64 / bf16, sums * 128 / int8);
}

#elif defined(__AVX2__)

#define USED "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm14", "xmm15"
#define ZERO "vpxor %%ymm14, %%ymm14, %%ymm14\nvpxor %%ymm15, %%ymm15, %%ymm15\n"
#define FMA(I) "vfmadd231ps %%ymm15, %%ymm14, %%ymm" #I "\n"
#define PAIRS(I, PRODUCTS) \
  "vpmaddwd %%ymm15, %%ymm14, %%ymm" #PRODUCTS "\nvpaddd %%ymm" #PRODUCTS ", %%ymm" #I ", %%ymm" #I "\n"

constexpr long TURNS = 30'000'000;

void sum_floats() {
  for (long i = 0; i < TURNS; ++i)
    asm volatile(ZERO FMA(0) FMA(1) FMA(2) FMA(3) FMA(4) FMA(5) FMA(6) FMA(7) FMA(8) FMA(9) FMA(10) FMA(11) ::: USED);
}

void sum_pairs() {
  for (long i = 0; i < TURNS; ++i)
    asm volatile(ZERO PAIRS(0, 6) PAIRS(1, 7) PAIRS(2, 8) PAIRS(3, 9) PAIRS(4, 10) PAIRS(5, 11) ::: USED);
}

int main(int, char** arguments) {
  const int num_threads = std::atoi(arguments[1]);
  const double turns = double(TURNS) * num_threads;
  std::printf("%g %g\n", turns * 12 * 16 / best_seconds(num_threads, sum_floats),
              turns * 6 * 32 / best_seconds(num_threads, sum_pairs));
}

#else

int main() {}

#endif
