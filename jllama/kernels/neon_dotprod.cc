// Products of int8 for aarch64 processors with the dot product instructions.

#include "vector_neon.h"

#include "groups.h"

namespace {

struct Int8 : Integers<16> {
  using Sum = int32x4_t;
  static int32x4_t zero() { return vdupq_n_s32(0); }
  static int8x16_t weight(const int8_t* p) { return load_int8(p); }
  static int8x16_t weight(const int8_t* p, int64_t n) { return load_int8(p, n); }
  static int8x16_t element(const int8_t* p) { return load_int8(p); }
  static int8x16_t element(const int8_t* p, int64_t n) { return load_int8(p, n); }
  static int32x4_t add(int32x4_t sum, int8x16_t w, int8x16_t x) { return vdotq_s32(sum, w, x); }
  static void totals(const int32x4_t* sum, int32_t* to) { int_sums(sum, to); }
};

}  // namespace

void jllama::add_neon_dotprod(Kernels& kernels) {
  kernels.dot_int8 = ::dot_int8<Int8>;
  add_groups<GroupBytes<Int8>>(kernels);
}
