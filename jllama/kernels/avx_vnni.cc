// Products of int8 for x86-64 processors with AVX2 and the neural network instructions of 256 bits.

#include "vector_avx2.h"

#include "groups.h"

namespace {

struct Int8 : Integers<32> {
  using Sum = __m256i;
  // The instruction multiplies unsigned by signed bytes, so the weights are raised.
  static constexpr int32_t kRaised = 128;
  static __m256i zero() { return _mm256_setzero_si256(); }
  static __m256i raise(__m256i w) { return _mm256_xor_si256(w, _mm256_set1_epi8(-128)); }
  static __m256i weight(const int8_t* p) { return raise(load_int8(p)); }
  static __m256i weight(const int8_t* p, int64_t n) { return raise(load_int8(p, n)); }
  static __m256i element(const int8_t* p) { return load_int8(p); }
  static __m256i element(const int8_t* p, int64_t n) { return load_int8(p, n); }
  static __m256i add(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
  static void totals(const __m256i* sum, int32_t* to) { int_sums(sum, to); }
};

}  // namespace

void jllama::add_avx_vnni(Kernels& kernels) {
  kernels.dot_int8 = ::dot_int8<Int8>;
  add_groups<GroupBytes<Int8>>(kernels);
}
