// Rows of the embedding, for native code that runs passes one after the other.
#pragma once

#include "fused.h"

namespace baton {

// Row token_id of what the head multiplies by, out of its panels (linear.h).
inline void unpack_row(const Linear& head, int64_t token_id, int64_t size, char* to) {
  const int64_t width = head.kind == W_F32 ? 1 : 2;  // inputs that are side by side
  const uint32_t* words = (const uint32_t*)head.values + token_id / PANEL * (head.padded_in / width) * PANEL;
  for (int64_t i = 0; i < size / width; i++) std::memcpy(to + 4 * i, words + i * PANEL + token_id % PANEL, 4);
}

// Rows of `table`, [vocabulary][size] in the compute dtype, of `bytes` each; null: those of head's panels.
inline void embed(const void* table, const Linear& head, int64_t size, int64_t bytes, int64_t num_rows,
                  const int64_t* token_ids, char* to) {
  for (int64_t t = 0; t < num_rows; t++) {
    if (table)
      std::memcpy(to + t * bytes, (const char*)table + token_ids[t] * bytes, bytes);
    else
      unpack_row(head, token_ids[t], size, to + t * bytes);
  }
}

}  // namespace baton
