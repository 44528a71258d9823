// Ranks of one host that compute a step together, over memory that all of them map.
#pragma once

#include "vector.h"

namespace baton {

// Python fills it: baton/engine/parallel/collectives.py.
struct Ranks {
  char* memory;  // a line of 64 bytes that says whether all is over, one for each rank, and [2][degree][capacity]
  int64_t rank, degree, capacity;  // capacity: bytes that a rank can say in one turn
  int64_t turn;                    // that this rank has come to
  int64_t fast;                    // sums add parts that are rounded, and experts are weighed before they are added
};

}  // namespace baton

extern "C" {

// Rows of part_kind that every rank has a part of, added in fp32 by the tree of ranks ((0 + 1) + (2 + 3)), then `bias` (null:
// none), rounded once: `to`, of `kind`, has the sum on every rank; it may be `part` where it is no wider. A row is whole
// vectors, and no longer than the capacity. Not 0: a rank is lost.
int64_t baton_sum_ranks(baton::Ranks* ranks, const void* part, int64_t part_kind, int64_t num_rows, int64_t size,
                        const float* bias, int64_t kind, void* to, int64_t num_threads);

// What every rank has, num_bytes each, one after the other in `all`; null: this rank does not want it. Not 0: as above.
int64_t baton_gather_ranks(baton::Ranks* ranks, const void* own, int64_t num_bytes, void* all);

// num_bytes of the first rank, on all of them. Not 0: as above.
int64_t baton_tell_ranks(baton::Ranks* ranks, void* data, int64_t num_bytes);
}
