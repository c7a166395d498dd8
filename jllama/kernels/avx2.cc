// The kernels for x86-64 processors with AVX2 and FMA.

#include "vector_avx2.h"

#include "attention.h"
#include "groups.h"

namespace {

// The instruction multiplies unsigned by signed bytes and adds pairs within 16 bits: the sign of a weight goes to x.
// Weights within -128 .. 127 and x within -127 .. 127 leave room for that.
struct Int8 {
  static constexpr int32_t kRaised = 0;
  static __m256i weight(const int8_t* p) { return load_int8(p); }
  static __m256i add(__m256i sum, __m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};

}  // namespace

void jllama::add_avx2(Kernels& kernels) {
  add_plain(kernels);
  add_groups<GroupBytes<Int8>>(kernels);
}
