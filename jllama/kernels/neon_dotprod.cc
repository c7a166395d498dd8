// Products of int8 for aarch64 processors with the dot product instructions.

#include "vector_neon.h"

#include "groups.h"

namespace {

struct Int8 {
  static int32x4_t add(int32x4_t sum, int8x16_t w, int8x16_t x) { return vdotq_s32(sum, w, x); }
};

}  // namespace

void jllama::add_neon_dotprod(Kernels& kernels) {
  add_groups<GroupBytes<Int8>>(kernels);
}
