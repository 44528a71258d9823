// Turns: a rank puts down what it has, says so, waits until all have, and reads. What it puts down in the next turn goes to
// the other half of the memory, and in the turn after that all have read this one: so there is one wait a turn.
//
// A wait spins for some microseconds, then sleeps in the kernel. It ends when the rank has come, or when somebody says that
// a rank is lost; nobody measures time here: a thread of every process watches the others (baton/engine/ranks).
#include "ranks.h"

#include <chrono>

#ifdef __linux__
#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include <unistd.h>

namespace baton {
namespace {

constexpr int SPINS = 4000;  // about 40 us, more than two ranks of equal work are apart
constexpr int64_t SERIAL_ELEMENTS = 1 << 15;

using Word = std::atomic<uint32_t>;

struct Own {
  Word turn;
  Word sleepers;
  uint64_t beats;      // collectives.py counts them
  uint64_t waited_ns;  // for others, since the start; this rank alone writes it
};

Word& lost(const Ranks& ranks) { return *reinterpret_cast<Word*>(ranks.memory); }
Own& own_of(const Ranks& ranks, int64_t rank) { return *reinterpret_cast<Own*>(ranks.memory + LINE * (1 + rank)); }
char* said_by(const Ranks& ranks, int64_t rank) {
  return ranks.memory + LINE * (1 + ranks.degree) + ((ranks.turn & 1) * ranks.degree + rank) * ranks.capacity;
}

void pause_briefly() {
#ifdef __aarch64__
  asm volatile("yield");
#else
  _mm_pause();
#endif
}

void sleep_while(Word& word, uint32_t value) {
#ifdef __linux__
  const timespec most{0, 50000000};  // then looks whether a rank is lost
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
#else
  if (word.load() == value) usleep(50);
#endif
}

void wake_all([[maybe_unused]] Word& word) {
#ifdef __linux__
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

bool has_come(const Own& other, uint32_t turn) { return int32_t(other.turn.load() - turn) >= 0; }

bool wait_for(const Ranks& ranks, Own& other) {
  const uint32_t turn = uint32_t(ranks.turn);
  for (int spin = 0; spin < SPINS; ++spin) {
    if (has_come(other, turn)) return true;
    pause_briefly();
  }
  while (!has_come(other, turn)) {
    if (lost(ranks).load()) return false;
    const uint32_t seen = other.turn.load();
    ++other.sleepers;  // before the word is read again, by the kernel: one of the two sees the other
    if (int32_t(seen - turn) < 0) sleep_while(other.turn, seen);
    --other.sleepers;
  }
  return true;
}

// The next turn, in which `own` bytes are said.
bool meet(Ranks& ranks, const void* own, int64_t num_bytes) {
  ++ranks.turn;
  if (num_bytes) std::memcpy(said_by(ranks, ranks.rank), own, num_bytes);
  Own& mine = own_of(ranks, ranks.rank);
  mine.turn.store(uint32_t(ranks.turn));
  if (mine.sleepers.load()) wake_all(mine.turn);
  const auto begun = std::chrono::steady_clock::now();
  for (int64_t rank = 0; rank < ranks.degree; ++rank)
    if (rank != ranks.rank && !wait_for(ranks, own_of(ranks, rank))) return false;
  mine.waited_ns += (std::chrono::steady_clock::now() - begun).count();
  return true;
}

}  // namespace
}  // namespace baton

using namespace baton;

int64_t baton_sum_ranks(Ranks* ranks, const void* part, int64_t part_kind, int64_t num_rows, int64_t size,
                        const float* bias, int64_t kind, void* to, int64_t num_threads) {
  constexpr int64_t MAX_DEGREE = 8;
  const int64_t part_bytes = size * bytes_of(part_kind), width = bytes_of(kind);
  const int64_t most_rows = ranks->capacity / part_bytes;
  for (int64_t begin = 0; begin < num_rows; begin += most_rows) {
    const int64_t rows = std::min(most_rows, num_rows - begin);
    if (!meet(*ranks, static_cast<const char*>(part) + begin * part_bytes, rows * part_bytes)) return 1;
    const char* parts[MAX_DEGREE];
    for (int64_t rank = 0; rank < ranks->degree; ++rank) parts[rank] = said_by(*ranks, rank);
    char* const target = static_cast<char*>(to) + begin * size * width;
    const bool parallel = num_threads > 1 && rows * size > SERIAL_ELEMENTS;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (parallel)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < size; i += 16) {
        const auto part_of = [&](int64_t rank) { return read16(part_kind, parts[rank], row * size + i); };
        const V16 sum = sum_by_tree(0, ranks->degree, part_of);
        write16(kind, target, row * size + i, bias ? sum + load16(bias + i) : sum);
      }
  }
  return 0;
}

int64_t baton_gather_ranks(Ranks* ranks, const void* own, int64_t num_bytes, void* all) {
  for (int64_t begin = 0; begin < num_bytes; begin += ranks->capacity) {
    const int64_t count = std::min(ranks->capacity, num_bytes - begin);
    if (!meet(*ranks, static_cast<const char*>(own) + begin, count)) return 1;
    for (int64_t rank = 0; all && rank < ranks->degree; ++rank)
      std::memcpy(static_cast<char*>(all) + rank * num_bytes + begin, said_by(*ranks, rank), count);
  }
  return 0;
}

int64_t baton_tell_ranks(Ranks* ranks, void* data, int64_t num_bytes) {
  for (int64_t begin = 0; begin < num_bytes; begin += ranks->capacity) {
    const int64_t count = std::min(ranks->capacity, num_bytes - begin);
    char* const at = static_cast<char*>(data) + begin;
    if (!meet(*ranks, at, ranks->rank == 0 ? count : 0)) return 1;
    if (ranks->rank != 0) std::memcpy(at, said_by(*ranks, 0), count);
  }
  return 0;
}
