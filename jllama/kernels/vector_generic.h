// Vectors of four, as GCC and Clang have them for any processor, for the algorithms in products.h and attention.h.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Vector {
  typedef float Float __attribute__((vector_size(16)));
  typedef int32_t Int __attribute__((vector_size(16)));
  static constexpr int64_t kWidth = 4;
  static constexpr int kRows = 2;

  static Float zero() { return set(0.0f); }
  static Float set(float x) { return Float{x, x, x, x}; }
  static Float load(const float* p) { return load(p, kWidth); }
  static Float load(const float* p, int64_t n) {
    Float x = zero();
    std::memcpy(&x, p, n * sizeof(float));
    return x;
  }
  static void store(float* p, Float x) { std::memcpy(p, &x, sizeof(x)); }
  static void store(float* p, Float x, int64_t n) { std::memcpy(p, &x, n * sizeof(float)); }
  static Float load(const uint16_t* p) {
    typedef uint32_t Bits __attribute__((vector_size(16)));
    return (Float)(Bits{p[0], p[1], p[2], p[3]} << 16);
  }
  static Float load(const uint16_t* p, int64_t n) {
    uint16_t some[kWidth] = {};
    std::memcpy(some, p, n * sizeof(uint16_t));
    return load(some);
  }
  static Float as_float(Int x) { return (Float)x; }
  static Int as_int(Float x) { return (Int)x; }

  static Float add(Float a, Float b) { return a + b; }
  static Float subtract(Float a, Float b) { return a - b; }
  static Float multiply(Float a, Float b) { return a * b; }
  static Float multiply_add(Float a, Float b, Float c) { return a * b + c; }
  static Float choose(Int mask, Float a, Float b) { return as_float((mask & as_int(a)) | (~mask & as_int(b))); }
  static Float max(Float a, Float b) { return choose(a > b, a, b); }  // b where one is NaN
  static float sum(Float x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  static float largest(Float x) {
    float most = x[0];
    for (int i = 1; i < kWidth; ++i) most = most > x[i] ? most : x[i];
    return most;
  }

  // The sums of the lanes of four vectors.
  static void sums(Float a, Float b, Float c, Float d, float* to) {
    to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
  }

  // x rounded to the nearest integer, ties to even: adding 1.5 * 2^23 leaves no room for a fraction. |x| < 2^22.
  static Float nearest(Float x) {
    const Float large = set(12582912.0f);
    return (x + large) - large;
  }
  // 2^n; n: integers within -126 .. 0.
  static Float power(Float n) { return as_float((__builtin_convertvector(n, Int) + 127) << 23); }
  // x where a >= b, else 0; x where a is NaN.
  static Float unless_less(Float x, Float a, Float b) { return as_float(as_int(x) & ~(a < b)); }

  // Rounds float32 to the nearest bfloat16, ties to even; NaN stays NaN.
  static uint16_t narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return (x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static void store(uint16_t* p, Float x) { store(p, x, kWidth); }
  static void store(uint16_t* p, Float x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) p[i] = narrow(x[i]);
  }

  static Float absolute(Float x) { return as_float(as_int(x) & 0x7fffffff); }
  static bool any_nan(Float x) {
    const Int nan = x != x;
    return nan[0] || nan[1] || nan[2] || nan[3];
  }
  // Stores n lanes, which are integers, as int8.
  static void store_int8(int8_t* p, Float x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) p[i] = static_cast<int8_t>(x[i]);
  }

  static void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
};

}  // namespace
