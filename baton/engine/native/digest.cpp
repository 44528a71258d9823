// Copies of KV runs and sums of KV words for kvtransfer/memory/{blocks,digest}.py: what numpy does there, a whole range in one
// call, and in one pass over memory where both are wanted.
#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

// From here on stores go around the caches: a line that is only written need not be read first (seen: 64 MiB in runs of
// 2 MiB in 13 ms in place of 24), and 2 MiB are not read again before they have left the cache.
constexpr int64_t kStreamBytes = 1 << 20;

#ifdef __AVX512DQ__

// Bytes fetched ahead: beside sums of another thread 256 MiB were copied and summed at 10.5 to 12 GB/s in place of 8.5 to
// 9.2 (two cores of an Intel Xeon; 512 and 2048 ahead gave 9.0 to 10.3).
constexpr int64_t kAhead = 4096;

inline bool is_aligned(const char* at) { return (reinterpret_cast<uintptr_t>(at) & 63) == 0; }

void stream_copy(const char* from, char* to, int64_t num_bytes) {
  int64_t head = (64 - (reinterpret_cast<uintptr_t>(to) & 63)) & 63;
  if (num_bytes < head + 64) {
    std::memcpy(to, from, num_bytes);
    return;
  }
  std::memcpy(to, from, head);
  int64_t at = head;
  for (; at + 64 <= num_bytes; at += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
  std::memcpy(to + at, from + at, num_bytes - at);
}

template <bool copies, bool streams>
uint64_t sum_words(const char* from, char* to, const uint64_t* weights, int64_t num_words) {
  __m512i first = _mm512_setzero_si512(), second = first;
  int64_t i = 0;
  for (; i + 16 <= num_words; i += 16) {
    _mm_prefetch(from + 8 * i + kAhead, _MM_HINT_T0);
    _mm_prefetch(from + 8 * i + kAhead + 64, _MM_HINT_T0);
    const __m512i low = _mm512_loadu_si512(from + 8 * i), high = _mm512_loadu_si512(from + 8 * i + 64);
    if (copies && streams) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 8 * i), low);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 8 * i + 64), high);
    } else if (copies) {
      _mm512_storeu_si512(to + 8 * i, low);
      _mm512_storeu_si512(to + 8 * i + 64, high);
    }
    first = _mm512_add_epi64(first, _mm512_mullo_epi64(low, _mm512_loadu_si512(weights + i)));
    second = _mm512_add_epi64(second, _mm512_mullo_epi64(high, _mm512_loadu_si512(weights + i + 8)));
  }
  // Not _mm512_reduce_add_epi64: its sum is a signed one, which must not overflow.
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, _mm512_add_epi64(first, second));
  uint64_t sum = 0;
  for (uint64_t lane : lanes) sum += lane;
  for (; i < num_words; i++) {
    uint64_t word;
    std::memcpy(&word, from + 8 * i, 8);
    if (copies) std::memcpy(to + 8 * i, &word, 8);
    sum += word * weights[i];
  }
  return sum;
}

inline void fence() { _mm_sfence(); }

#else

#ifdef __x86_64__
inline bool is_aligned(const char* at) { return (reinterpret_cast<uintptr_t>(at) & 31) == 0; }

inline void stream_four(const char* from, char* to) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

void stream_copy(const char* from, char* to, int64_t num_bytes) {
  const int64_t head = std::min(num_bytes, int64_t(-reinterpret_cast<uintptr_t>(to) & 31));
  std::memcpy(to, from, head);
  int64_t at = head;
  for (; at + 32 <= num_bytes; at += 32) stream_four(from + at, to + at);
  std::memcpy(to + at, from + at, num_bytes - at);
}

inline void fence() { _mm_sfence(); }
#else
inline bool is_aligned(const char*) { return true; }
inline void stream_copy(const char* from, char* to, int64_t num_bytes) { std::memcpy(to, from, num_bytes); }
inline void stream_four(const char* from, char* to) { std::memcpy(to, from, 32); }
inline void fence() {}
#endif

template <bool copies, bool streams>
uint64_t sum_words(const char* __restrict from, char* __restrict to, const uint64_t* __restrict weights,
                   int64_t num_words) {
  uint64_t sum = 0;
  const auto product = [&](int64_t i) {
    uint64_t word;
    std::memcpy(&word, from + 8 * i, 8);
    return word * weights[i];
  };
  int64_t i = 0;
  if (copies && streams) {
    for (; i + 4 <= num_words; i += 4) {
      stream_four(from + 8 * i, to + 8 * i);
      sum += product(i) + product(i + 1) + product(i + 2) + product(i + 3);
    }
  }
  for (; i < num_words; i++) {
    if (copies) std::memcpy(to + 8 * i, from + 8 * i, 8);
    sum += product(i);
  }
  return sum;
}

#endif

}  // namespace

// out [block, unit, row, head] = sums of `num_words` words each, by weights from `starts[block]` on. Strides in bytes,
// for block, row, head and unit; `to` may be null. All arithmetic is modulo 2^64, so the order does not matter.
extern "C" void kv_word_sums(const char* from, const int64_t* from_ids, const int64_t* from_strides, char* to,
                             const int64_t* to_ids, const int64_t* to_strides, const int64_t* counts,
                             int64_t num_words, const uint64_t* weights, const int64_t* starts, uint64_t* out) {
  const bool is_large = counts[0] * counts[1] * counts[2] * counts[3] * num_words * 8 >= kStreamBytes;
  for (int64_t block = 0; block < counts[0]; block++) {
    const char* source = from + from_ids[block] * from_strides[0];
    char* target = to ? to + to_ids[block] * to_strides[0] : nullptr;
    const uint64_t* table = weights + starts[block];
    for (int64_t row = 0; row < counts[1]; row++)
      for (int64_t head = 0; head < counts[2]; head++)
        for (int64_t unit = 0; unit < counts[3]; unit++) {
          const char* words = source + row * from_strides[1] + head * from_strides[2] + unit * from_strides[3];
          char* place = to ? target + row * to_strides[1] + head * to_strides[2] + unit * to_strides[3] : nullptr;
          uint64_t sum;
          if (!to)
            sum = sum_words<false, false>(words, nullptr, table, num_words);
          else if (is_large && is_aligned(place))
            sum = sum_words<true, true>(words, place, table, num_words);
          else
            sum = sum_words<true, false>(words, place, table, num_words);
          out[((block * counts[3] + unit) * counts[1] + row) * counts[2] + head] = sum;
        }
  }
  if (to && is_large) fence();
}

// Runs of `num_bytes` [block, row, head] from one pool to another. Strides in bytes, for block, row and head.
extern "C" void kv_copy_runs(const char* from, const int64_t* from_ids, const int64_t* from_strides, char* to,
                             const int64_t* to_ids, const int64_t* to_strides, const int64_t* counts,
                             int64_t num_bytes) {
  const bool is_large = counts[0] * counts[1] * counts[2] * num_bytes >= kStreamBytes;
  for (int64_t block = 0; block < counts[0]; block++)
    for (int64_t row = 0; row < counts[1]; row++)
      for (int64_t head = 0; head < counts[2]; head++) {
        const char* source = from + from_ids[block] * from_strides[0] + row * from_strides[1] + head * from_strides[2];
        char* target = to + to_ids[block] * to_strides[0] + row * to_strides[1] + head * to_strides[2];
        if (is_large)
          stream_copy(source, target, num_bytes);
        else
          std::memcpy(target, source, num_bytes);
      }
  if (is_large) fence();
}
