// The kernels for x86-64 processors with AVX-512 (F, BW, DQ, VL).

#include "vector_avx512.h"

#include "attention.h"
#include "groups.h"

namespace {

// The instruction multiplies unsigned by signed bytes and adds pairs within 16 bits: the sign of a weight goes to x.
// Weights within -128 .. 127 and x within -127 .. 127 leave room for that.
struct Int8 : Integers<64> {
  using Sum = __m512i;
  static __mmask64 mask(int64_t n) { return (1ull << n) - 1; }
  static __m512i zero() { return _mm512_setzero_si512(); }
  static __m512i weight(const int8_t* p) { return _mm512_loadu_si512(p); }
  static __m512i weight(const int8_t* p, int64_t n) { return _mm512_maskz_loadu_epi8(mask(n), p); }
  static __m512i element(const int8_t* p) { return weight(p); }
  static __m512i element(const int8_t* p, int64_t n) { return weight(p, n); }
  static __m512i add(__m512i sum, __m512i w, __m512i x) {
    const __m512i turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  static void totals(const __m512i* sum, int32_t* to) { int_sums(sum, to); }
};

}  // namespace

void jllama::add_avx512(Kernels& kernels) {
  add_plain(kernels);
  kernels.dot_int8 = ::dot_int8<Int8>;
  add_groups<GroupBytes<Int8>>(kernels);
}
