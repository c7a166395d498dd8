// Products of bfloat16 for x86-64 processors with AVX-512 and its bfloat16 instructions.

#include "vector_avx512.h"

#include "products.h"

namespace {

struct BFloat16 : Plain<uint16_t, uint16_t> {
  static constexpr int64_t kWidth = 32;
  static __m512i weight(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static __m512i weight(const uint16_t* p, int64_t n) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) - 1), p);
  }
  static __m512i element(const uint16_t* p) { return weight(p); }
  static __m512i element(const uint16_t* p, int64_t n) { return weight(p, n); }
  static __m512 add(__m512 sum, __m512i w, __m512i x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
};

}  // namespace

void jllama::add_avx512_bf16(Kernels& kernels) {
  kernels.dot_bfloat16 = ::dot<BFloat16>;
  kernels.round_bfloat16 = convert<uint16_t>;
  kernels.bfloat16_bytes = sizeof(uint16_t);
}
