// Products of int8 for x86-64 processors with AVX-512 and its neural network instructions.

#include "vector_avx512.h"

#include "groups.h"

namespace {

struct Int8 {
  // The instruction multiplies unsigned by signed bytes, so the weights are raised.
  static constexpr int32_t kRaised = 128;
  // Masked loads of all bytes leave fetching ahead to us: with plain ones Zen 5 reads memory at two thirds of the speed.
  static __m512i weight(const int8_t* p) {
    __mmask64 all = ~0ull;
    asm("" : "+k"(all));
    return _mm512_xor_si512(_mm512_maskz_loadu_epi8(all, p), _mm512_set1_epi8(-128));
  }
  static __m512i add(__m512i sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, w, x); }
};

}  // namespace

void jllama::add_avx512_vnni(Kernels& kernels) {
  add_groups<GroupBytes<Int8>>(kernels);
}
