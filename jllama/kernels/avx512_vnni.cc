// Products of int8 for x86-64 processors with AVX-512 and its neural network instructions.

#include "vector_avx512.h"

#include "groups.h"

namespace {

struct Int8 : Integers<64> {
  using Sum = __m512i;
  // The instruction multiplies unsigned by signed bytes, so the weights are raised.
  static constexpr int32_t kRaised = 128;
  static __mmask64 mask(int64_t n) { return (1ull << n) - 1; }
  static __m512i zero() { return _mm512_setzero_si512(); }
  static __m512i raise(__m512i w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
  // Masked loads of all bytes leave fetching ahead to us: with plain ones Zen 5 reads memory at two thirds of the speed.
  static __m512i load(const int8_t* p) {
    __mmask64 all = ~0ull;
    asm("" : "+k"(all));
    return _mm512_maskz_loadu_epi8(all, p);
  }
  static __m512i weight(const int8_t* p) { return raise(load(p)); }
  static __m512i weight(const int8_t* p, int64_t n) { return raise(_mm512_maskz_loadu_epi8(mask(n), p)); }
  static __m512i element(const int8_t* p) { return _mm512_loadu_si512(p); }
  static __m512i element(const int8_t* p, int64_t n) { return _mm512_maskz_loadu_epi8(mask(n), p); }
  static __m512i add(__m512i sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, w, x); }
  static void totals(const __m512i* sum, int32_t* to) { int_sums(sum, to); }
};

}  // namespace

void jllama::add_avx512_vnni(Kernels& kernels) {
  kernels.dot_int8 = ::dot_int8<Int8>;
  add_groups<GroupBytes<Int8>>(kernels);
}
