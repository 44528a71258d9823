// Tokens that a constraint leaves out: a bit for each logit.
#include "draw.h"

// mask has a word for each 32 of the `count` logits; those whose bit is not set become -inf.
extern "C" void baton_mask_logits(float* logits, const uint32_t* mask, int64_t count) {
  for (int64_t begin = 0; begin < count; begin += 32) {
    const uint32_t bits = mask[begin / 32];
    if (bits == 0xffffffff) continue;
    const int64_t width = count - begin < 32 ? count - begin : 32;
    float* part = logits + begin;
    if (width == 32) {
      for (int i = 0; i < 32; i++) part[i] = bits >> i & 1 ? part[i] : -INFINITY;
    } else {
      for (int i = 0; i < width; i++) part[i] = bits >> i & 1 ? part[i] : -INFINITY;
    }
  }
}
