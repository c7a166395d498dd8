// Products of int8 for x86-64 processors with AVX-512 and its neural network instructions.

#include "vector_avx512.h"

#include "products.h"

namespace {

struct Int8 {
  using Weight = int8_t;
  using Element = int8_t;
  using Sum = __m512i;
  using Total = int32_t;
  static constexpr int64_t kWidth = 64;
  static constexpr int64_t kPiece = std::numeric_limits<int32_t>::max();  // whole rows: they are short
  // The instruction multiplies unsigned by signed bytes, so the weights are raised.
  static constexpr int32_t kRaised = 128;
  static __mmask64 mask(int64_t n) { return (1ull << n) - 1; }
  static __m512i zero() { return _mm512_setzero_si512(); }
  static __m512i raise(__m512i w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
  static __m512i weight(const int8_t* p) { return raise(_mm512_loadu_si512(p)); }
  static __m512i weight(const int8_t* p, int64_t n) { return raise(_mm512_maskz_loadu_epi8(mask(n), p)); }
  static __m512i element(const int8_t* p) { return _mm512_loadu_si512(p); }
  static __m512i element(const int8_t* p, int64_t n) { return _mm512_maskz_loadu_epi8(mask(n), p); }
  static __m512i add(__m512i sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, w, x); }
  static void totals(const __m512i* sum, int32_t* to) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[0], sum[1]), _mm512_unpackhi_epi32(sum[0], sum[1]));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[2], sum[3]), _mm512_unpackhi_epi32(sum[2], sum[3]));
    const __m512i s = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i t = _mm256_add_epi32(_mm512_castsi512_si256(s), _mm512_extracti64x4_epi64(s, 1));
    const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), all);
  }
};

}  // namespace

void jllama::add_avx512_vnni(Kernels& kernels) { kernels.dot_int8 = ::dot_int8<Int8>; }
