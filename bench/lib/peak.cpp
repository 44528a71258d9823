// What the multipliers of this processor do at best: vdpbf16ps and vpdpbusd on registers alone, on all threads given.
// Prints operations a second of each (a product and a sum are two), or nothing where the processor has neither.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

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

int main(int, char** arguments) {
  const int num_threads = std::atoi(arguments[1]);
  const double sums = 24.0 * TURNS * num_threads;
  const double bf16 = best_seconds(num_threads, [] { for (long i = 0; i < TURNS; ++i) TURN("vdpbf16ps"); });
  const double int8 = best_seconds(num_threads, [] { for (long i = 0; i < TURNS; ++i) TURN("vpdpbusd"); });
  std::printf("%g %g\n", sums * 64 / bf16, sums * 128 / int8);
}

#else

int main() {}

#endif
