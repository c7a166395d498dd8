// The kernels for x86-64 processors with AVX-512 (F, BW, DQ, VL).

#include "vector_avx512.h"

#include "attention.h"
#include "groups.h"

namespace {

// The instruction multiplies unsigned by signed bytes and adds pairs within 16 bits: the sign of a weight goes to x.
// Weights within -128 .. 127 and x within -127 .. 127 leave room for that.
struct Int8 {
  static constexpr int32_t kRaised = 0;
  static __m512i weight(const int8_t* p) { return _mm512_loadu_si512(p); }
  static __m512i add(__m512i sum, __m512i w, __m512i x) {
    const __m512i turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
};

}  // namespace

void jllama::add_avx512(Kernels& kernels) {
  add_plain(kernels);
  add_groups<GroupBytes<Int8>>(kernels);
}
