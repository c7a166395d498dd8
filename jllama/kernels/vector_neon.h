// Vectors of aarch64's NEON for the algorithms in products.h and attention.h.

#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {

struct Vector {
  using Float = float32x4_t;
  static constexpr int64_t kWidth = 4;
  static constexpr int kRows = 4;

  static Float zero() { return vdupq_n_f32(0.0f); }
  static Float set(float x) { return vdupq_n_f32(x); }
  static Float load(const float* p) { return vld1q_f32(p); }
  static Float load(const float* p, int64_t n) {
    float some[kWidth] = {};
    std::memcpy(some, p, n * sizeof(float));
    return vld1q_f32(some);
  }
  static void store(float* p, Float x) { vst1q_f32(p, x); }
  static void store(float* p, Float x, int64_t n) {
    float all[kWidth];
    vst1q_f32(all, x);
    std::memcpy(p, all, n * sizeof(float));
  }
  static Float load(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
  static Float load(const uint16_t* p, int64_t n) {
    uint16_t some[kWidth] = {};
    std::memcpy(some, p, n * sizeof(uint16_t));
    return load(some);
  }

  static Float add(Float a, Float b) { return vaddq_f32(a, b); }
  static Float subtract(Float a, Float b) { return vsubq_f32(a, b); }
  static Float multiply(Float a, Float b) { return vmulq_f32(a, b); }
  static Float multiply_add(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static Float max(Float a, Float b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b where one is NaN
  static float sum(Float x) { return vaddvq_f32(x); }
  static float largest(Float x) { return vmaxvq_f32(x); }

  // The sums of the lanes of four vectors.
  static void sums(Float a, Float b, Float c, Float d, float* to) {
    vst1q_f32(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
  }

  // x rounded to the nearest integer, and 2^n; n: integers within -126 .. 0.
  static Float nearest(Float x) { return vrndnq_f32(x); }
  static Float power(Float n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
  }
  // x where a >= b, else 0; x where a is NaN.
  static Float unless_less(Float x, Float a, Float b) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vcltq_f32(a, b)));
  }

  // Rounds float32 to the nearest bfloat16, ties to even; NaN stays NaN.
  static uint16x4_t narrow(Float x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, quiet), 16);
  }
  static void store(uint16_t* p, Float x) { vst1_u16(p, narrow(x)); }
  static void store(uint16_t* p, Float x, int64_t n) {
    uint16_t all[kWidth];
    store(all, x);
    std::memcpy(p, all, n * sizeof(uint16_t));
  }

  static Float absolute(Float x) { return vabsq_f32(x); }
  static bool any_nan(Float x) { return vminvq_u32(vceqq_f32(x, x)) == 0; }
  // Stores n lanes, which are integers, as int8.
  static void store_int8(int8_t* p, Float x, int64_t n) {
    const int16x4_t words = vqmovn_s32(vcvtq_s32_f32(x));
    int8_t all[8];
    vst1_s8(all, vqmovn_s16(vcombine_s16(words, words)));
    std::memcpy(p, all, n);
  }

  static void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
};

// Bytes in groups, unpacked: see groups.h. `Ints` is what a file multiplies bytes with.
template <class Ints>
struct GroupBytes {
  struct Bytes {
    int8x16_t first, second;
  };
  struct Scales {
    float at[Vector::kWidth];
  };
  static constexpr int64_t kSpan = 32;
  static constexpr int32_t kRaised = 0;

  static Bytes nibbles(const uint8_t* p) {
    const uint8x16_t both = vld1q_u8(p);
    return {vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(both, 4))};
  }
  static int8x16_t with(int8x16_t low, uint8x16_t high) {
    return vreinterpretq_s8_u8(vorrq_u8(vreinterpretq_u8_s8(low), high));
  }
  // 16 elements' 5th bits, of two bytes.
  static uint8x16_t fifths(const uint8_t* p) {
    const uint8x16_t each = vcombine_u8(vcreate_u8(0x8040201008040201), vcreate_u8(0x8040201008040201));
    const uint8x16_t spread = vcombine_u8(vdup_n_u8(p[0]), vdup_n_u8(p[1]));
    return vandq_u8(vtstq_u8(spread, each), vdupq_n_u8(16));
  }
  static Bytes fifth(Bytes low, const uint8_t* p) { return {with(low.first, fifths(p)), with(low.second, fifths(p + 2))}; }
  static uint8x16_t sixths(uint8x8_t a, uint8x8_t b) {
    return vshlq_n_u8(vandq_u8(vcombine_u8(a, b), vdupq_n_u8(3)), 4);
  }
  static Bytes sixth(Bytes low, const uint8_t* p) {
    const uint8x8_t bits = vld1_u8(p);
    return {with(low.first, sixths(bits, vshr_n_u8(bits, 2))),
            with(low.second, sixths(vshr_n_u8(bits, 4), vshr_n_u8(bits, 6)))};
  }
  static Bytes int8(const uint8_t* p) {
    return {vld1q_s8(reinterpret_cast<const int8_t*>(p)), vld1q_s8(reinterpret_cast<const int8_t*>(p) + 16)};
  }

  static float32x4_t halves(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static float half(uint16_t x) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x))), 0); }
  template <bool is_signed>
  static float32x4_t bytes(const uint8_t* p) {
    float each[Vector::kWidth];
    for (int i = 0; i < Vector::kWidth; ++i) each[i] = is_signed ? static_cast<int8_t>(p[i]) : p[i];
    return vld1q_f32(each);
  }
  static Scales scales(float32x4_t x) {
    Scales to;
    vst1q_f32(to.at, x);
    return to;
  }

  template <int64_t group>
  static float32x4_t add(float32x4_t sum, Bytes u, const int8_t* x, const Scales& scales, int64_t span) {
    const int32x4_t first = Ints::add(vdupq_n_s32(0), u.first, vld1q_s8(x));
    if constexpr (group == 32) {
      const int32x4_t both = Ints::add(first, u.second, vld1q_s8(x + 16));
      return vfmaq_n_f32(sum, vcvtq_f32_s32(both), scales.at[span]);
    }
    const int32x4_t second = Ints::add(vdupq_n_s32(0), u.second, vld1q_s8(x + 16));
    sum = vfmaq_n_f32(sum, vcvtq_f32_s32(first), scales.at[2 * span]);
    return vfmaq_n_f32(sum, vcvtq_f32_s32(second), scales.at[2 * span + 1]);
  }
};

}  // namespace
