// The kernels for aarch64 processors, all of which have NEON.

#include "vector_neon.h"

#include "attention.h"
#include "groups.h"

namespace {

// Two products of bytes fit into 16 bits: weights are within -128 .. 127 and x within -127 .. 127.
struct Int8 {
  static int32x4_t add(int32x4_t sum, int8x16_t w, int8x16_t x) {
    return vpadalq_s16(sum, vmlal_high_s8(vmull_s8(vget_low_s8(w), vget_low_s8(x)), w, x));
  }
};

}  // namespace

void jllama::add_neon(Kernels& kernels) {
  add_plain(kernels);
  add_groups<GroupBytes<Int8>>(kernels);
}
