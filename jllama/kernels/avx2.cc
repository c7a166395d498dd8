// The kernels for x86-64 processors with AVX2 and FMA.

#include "vector_avx2.h"

#include "attention.h"
#include "groups.h"

namespace {

// The instruction multiplies unsigned by signed bytes and adds pairs within 16 bits: the sign of a weight goes to x.
// Weights within -128 .. 127 and x within -127 .. 127 leave room for that.
struct Int8 : Integers<32> {
  using Sum = __m256i;
  static __m256i zero() { return _mm256_setzero_si256(); }
  static __m256i weight(const int8_t* p) { return load_int8(p); }
  static __m256i weight(const int8_t* p, int64_t n) { return load_int8(p, n); }
  static __m256i element(const int8_t* p) { return load_int8(p); }
  static __m256i element(const int8_t* p, int64_t n) { return load_int8(p, n); }
  static __m256i add(__m256i sum, __m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static void totals(const __m256i* sum, int32_t* to) { int_sums(sum, to); }
};

}  // namespace

void jllama::add_avx2(Kernels& kernels) {
  add_plain(kernels);
  kernels.dot_int8 = ::dot_int8<Int8>;
  add_groups<GroupBytes<Int8>>(kernels);
}
