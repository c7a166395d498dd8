// Vectors of AVX-512 (F, BW, DQ, VL) for the algorithms in products.h and attention.h.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Vector {
  using Float = __m512;
  static constexpr int64_t kWidth = 16;
  static constexpr int kRows = 4;

  static Float zero() { return _mm512_setzero_ps(); }
  static Float set(float x) { return _mm512_set1_ps(x); }
  static __mmask16 mask(int64_t n) { return (1u << n) - 1; }
  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static Float load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(mask(n), p); }
  static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  static void store(float* p, Float x, int64_t n) { _mm512_mask_storeu_ps(p, mask(n), x); }
  static Float widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
  static Float load(const uint16_t* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Float load(const uint16_t* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(mask(n), p)); }

  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float subtract(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float multiply(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float multiply_add(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static float sum(Float x) { return _mm512_reduce_add_ps(x); }
  static float largest(Float x) { return _mm512_reduce_max_ps(x); }

  // The sums of the lanes of four vectors.
  static void sums(Float a, Float b, Float c, Float d, float* to) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 t = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
  }

  // x rounded to the nearest integer, and 2^n; n: integers within -126 .. 0.
  static Float nearest(Float x) { return _mm512_roundscale_ps(x, 0); }
  static Float power(Float n) { return _mm512_scalef_ps(set(1.0f), n); }
  // x where a >= b, else 0; x where a is NaN.
  static Float unless_less(Float x, Float a, Float b) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), x);
  }

  // Rounds float32 to the nearest bfloat16, ties to even; NaN stays NaN.
  static __m256i narrow(Float x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
  static void store(uint16_t* p, Float x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
  static void store(uint16_t* p, Float x, int64_t n) { _mm256_mask_storeu_epi16(p, mask(n), narrow(x)); }

  static Float absolute(Float x) { return _mm512_abs_ps(x); }
  static bool any_nan(Float x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
  // Stores n lanes, which are integers, as int8.
  static void store_int8(int8_t* p, Float x, int64_t n) {
    _mm512_mask_cvtsepi32_storeu_epi8(p, mask(n), _mm512_cvtps_epi32(x));
  }

  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
};

// Bytes in groups, unpacked: see groups.h. `Ints` is what a file multiplies bytes with.
template <class Ints>
struct GroupBytes {
  using Bytes = __m512i;
  using Scales = __m512;
  static constexpr int64_t kSpan = 64;
  static constexpr int32_t kRaised = Ints::kRaised;

  static __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  // A group's 16 bytes twice, the second time shifted to its high nibbles.
  static __m512i nibbles(const uint8_t* p) {
    const __m512i twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3),
                                                   _mm512_castsi256_si512(load32(p)));
    const __m512i shifted = _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
    return _mm512_and_si512(shifted, _mm512_set1_epi8(15));
  }
  static __m512i fifth(__m512i low, const uint8_t* p) {
    uint64_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return _mm512_or_si512(low, _mm512_maskz_mov_epi8(bits, _mm512_set1_epi8(16)));
  }
  static __m512i sixth(__m512i low, const uint8_t* p) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m512i four = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 0, 0, 1, 1, 1, 1),
                                                  _mm512_castsi128_si512(both));
    const __m512i shifted = _mm512_srlv_epi64(four, _mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6));
    const __m512i bits = _mm512_and_si512(shifted, _mm512_set1_epi8(3));
    return _mm512_or_si512(low, _mm512_slli_epi16(bits, 4));
  }
  static __m512i int8(const uint8_t* p) { return Ints::weight(reinterpret_cast<const int8_t*>(p)); }

  static float half(uint16_t x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x))); }
  static __m512 halves(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  template <bool is_signed>
  static __m512 bytes(const uint8_t* p) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(all) : _mm512_cvtepu8_epi32(all));
  }
  static Scales scales(__m512 x) { return x; }

  template <int64_t group>
  static __m512 add(__m512 sum, __m512i u, const int8_t* x, __m512 scales, int64_t span) {
    constexpr int kPer = 64 / group;  // groups of a span
    const __m512i first = group == 32 ? _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1)
                                      : _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i which = _mm512_add_epi32(first, _mm512_set1_epi32(static_cast<int>(span) * kPer));
    const __m512i products = Ints::add(_mm512_setzero_si512(), u, _mm512_loadu_si512(x));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), _mm512_permutexvar_ps(which, scales), sum);
  }
};

}  // namespace
