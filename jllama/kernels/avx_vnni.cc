// Products of int8 for x86-64 processors with AVX2 and the neural network instructions of 256 bits.

#include "vector_avx2.h"

#include "groups.h"

namespace {

struct Int8 {
  // The instruction multiplies unsigned by signed bytes, so the weights are raised.
  static constexpr int32_t kRaised = 128;
  static __m256i weight(const int8_t* p) { return _mm256_xor_si256(load_int8(p), _mm256_set1_epi8(-128)); }
  static __m256i add(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
};

}  // namespace

void jllama::add_avx_vnni(Kernels& kernels) {
  add_groups<GroupBytes<Int8>>(kernels);
}
