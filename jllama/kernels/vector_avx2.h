// Vectors of AVX2 with FMA for the algorithms in products.h and attention.h.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Vector {
  using Float = __m256;
  static constexpr int64_t kWidth = 8;
  static constexpr int kRows = 3;

  static Float zero() { return _mm256_setzero_ps(); }
  static Float set(float x) { return _mm256_set1_ps(x); }
  static __m256i mask(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static Float load(const float* p, int64_t n) { return _mm256_maskload_ps(p, mask(n)); }
  static void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
  static void store(float* p, Float x, int64_t n) { _mm256_maskstore_ps(p, mask(n), x); }
  static Float load(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static Float load(const uint16_t* p, int64_t n) {
    uint16_t some[kWidth] = {};
    std::memcpy(some, p, n * sizeof(uint16_t));
    return load(some);
  }

  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float subtract(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Float multiply(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float multiply_add(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static float sum(Float x) {
    float to[4];
    sums(x, x, x, x, to);
    return to[0];
  }
  static float largest(Float x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }

  // The sums of the lanes of four vectors.
  static void sums(Float a, Float b, Float c, Float d, float* to) {
    const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
  }

  // x rounded to the nearest integer, and 2^n; n: integers within -126 .. 0.
  static Float nearest(Float x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Float power(Float n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  // x where a >= b, else 0; x where a is NaN.
  static Float unless_less(Float x, Float a, Float b) { return _mm256_and_ps(x, _mm256_cmp_ps(a, b, _CMP_NLT_UQ)); }

  // Rounds float32 to the nearest bfloat16, ties to even; NaN stays NaN.
  static __m128i narrow(Float x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
  }
  static void store(uint16_t* p, Float x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
  static void store(uint16_t* p, Float x, int64_t n) {
    uint16_t all[kWidth];
    store(all, x);
    std::memcpy(p, all, n * sizeof(uint16_t));
  }

  static Float absolute(Float x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
  static bool any_nan(Float x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
  // Stores n lanes, which are integers, as int8.
  static void store_int8(int8_t* p, Float x, int64_t n) {
    const __m256i wide = _mm256_cvtps_epi32(x);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    int8_t all[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(all), _mm_packs_epi16(words, words));
    std::memcpy(p, all, n);
  }

  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
};

inline __m256i load_int8(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
// Bytes in groups, unpacked: see groups.h. `Ints` is what a file multiplies bytes with.
template <class Ints>
struct GroupBytes {
  using Bytes = __m256i;
  using Scales = __m256;
  static constexpr int64_t kSpan = 32;
  static constexpr int32_t kRaised = Ints::kRaised;

  static __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  // A group's 16 bytes twice, the second time shifted to its high nibbles.
  static __m256i nibbles(const uint8_t* p) {
    const __m256i twice = _mm256_broadcastsi128_si256(load16(p));
    return _mm256_and_si256(_mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
  }
  static __m256i fifth(__m256i low, const uint8_t* p) {
    uint32_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    // Byte j of 32 gets the byte with its bit, and keeps that bit alone.
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)),
                                               _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                                                  0x0303030303030303));
    const __m256i each = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, each), each);
    return _mm256_or_si256(low, _mm256_and_si256(set, _mm256_set1_epi8(16)));
  }
  static __m256i sixth(__m256i low, const uint8_t* p) {
    int64_t group;
    std::memcpy(&group, p, sizeof(group));
    const __m256i shifted = _mm256_srlv_epi64(_mm256_set1_epi64x(group), _mm256_setr_epi64x(0, 2, 4, 6));
    return _mm256_or_si256(low, _mm256_slli_epi16(_mm256_and_si256(shifted, _mm256_set1_epi8(3)), 4));
  }
  static __m256i int8(const uint8_t* p) { return Ints::weight(reinterpret_cast<const int8_t*>(p)); }

  static float half(uint16_t x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x))); }
  static __m256 halves(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  template <bool is_signed>
  static __m256 bytes(const uint8_t* p) {
    const __m128i all = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(all) : _mm256_cvtepu8_epi32(all));
  }
  static Scales scales(__m256 x) { return x; }

  template <int64_t group>
  static __m256 add(__m256 sum, __m256i u, const int8_t* x, __m256 scales, int64_t span) {
    const __m256i first = group == 32 ? _mm256_setzero_si256() : _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    const __m256i which = _mm256_add_epi32(first, _mm256_set1_epi32(static_cast<int>(span * (32 / group))));
    const __m256i products = Ints::add(_mm256_setzero_si256(), u, load_int8(x));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_permutevar8x32_ps(scales, which), sum);
  }
};

}  // namespace
