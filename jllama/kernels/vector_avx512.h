// Vectors of AVX-512 (F, BW, DQ, VL) for the algorithms in products.h and attention.h.

#pragma once

#include <immintrin.h>

#include <cstdint>

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

// The sums of the lanes of four vectors of integers.
inline void int_sums(const __m512i* sum, int32_t* to) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[0], sum[1]), _mm512_unpackhi_epi32(sum[0], sum[1]));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[2], sum[3]), _mm512_unpackhi_epi32(sum[2], sum[3]));
  const __m512i s = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i t = _mm256_add_epi32(_mm512_castsi512_si256(s), _mm512_extracti64x4_epi64(s, 1));
  const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), all);
}

}  // namespace
