// Products of matrices, whatever the vectors: each file that includes this has a Vector of its own.
//
// A sum goes through pieces of `in`, and through each piece in vectors, from the first to the last, into the lanes of one
// vector; the pieces' totals are added in order. So it has the same bits in every tile, whatever other rows there are.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels.h"

// Clang unrolls short loops without being told.
#if defined(__clang__)
#define JLLAMA_UNROLL
#else
#define JLLAMA_UNROLL _Pragma("GCC unroll 8")
#endif

namespace {

using jllama::Product;
using jllama::Span;

// How to multiply and add vectors of float32 in float32, or those of a narrower type, widened.
template <class W, class X>
struct Plain {
  using Weight = W;
  using Element = X;
  using Sum = Vector::Float;
  using Total = float;
  static constexpr int64_t kWidth = Vector::kWidth;
  static constexpr int64_t kPiece = jllama::kPieceBytes / sizeof(X);
  static Sum zero() { return Vector::zero(); }
  static auto weight(const W* p) { return Vector::load(p); }
  static auto weight(const W* p, int64_t n) { return Vector::load(p, n); }
  static auto element(const X* p) { return Vector::load(p); }
  static auto element(const X* p, int64_t n) { return Vector::load(p, n); }
  static Sum add(Sum sum, Vector::Float w, Vector::Float x) { return Vector::multiply_add(w, x, sum); }
  static void totals(const Sum* sum, float* to) { Vector::sums(sum[0], sum[1], sum[2], sum[3], to); }
};

constexpr int64_t kAhead = 16 << 10;  // bytes of weights, at least, that are fetched ahead: it doubles a core's speed
constexpr int kOutputs = 4;           // of a tile
constexpr int kRows = Vector::kRows;  // of a tile, at most: as many as there are registers for their sums

// How far ahead of a piece that begins at k what is multiplied next, or soon after, lies.
template <class T>
int64_t ahead(int64_t in, int64_t k) {
  if (k + T::kPiece < in) return T::kPiece;
  const int64_t step = kOutputs * in, few = kAhead / static_cast<int64_t>(sizeof(typename T::Weight));
  return (few + step - 1) / step * step - k;
}

// Multiplies R rows of x by kOutputs rows of w, all `in` long: totals[r] holds row r's products. Fetches what lies
// `ahead` of the weights, if that is not 0.
template <class T, int R>
inline void run_tile(const typename T::Weight* const* w, const typename T::Element* const* x, int64_t in, int64_t ahead,
                 typename T::Total (*totals)[kOutputs]) {
  typename T::Sum sum[R][kOutputs];
JLLAMA_UNROLL
  for (int r = 0; r < R; ++r)
JLLAMA_UNROLL
    for (int o = 0; o < kOutputs; ++o) sum[r][o] = T::zero();
  int64_t k = 0;
  for (; k + T::kWidth <= in; k += T::kWidth) {
    decltype(T::element(x[0])) xs[R];
JLLAMA_UNROLL
    for (int r = 0; r < R; ++r) xs[r] = T::element(x[r] + k);
JLLAMA_UNROLL
    for (int o = 0; o < kOutputs; ++o) {
      const auto weight = T::weight(w[o] + k);
      if (ahead) Vector::prefetch(w[o] + k + ahead);
JLLAMA_UNROLL
      for (int r = 0; r < R; ++r) sum[r][o] = T::add(sum[r][o], weight, xs[r]);
    }
  }
  if (k < in) {
JLLAMA_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto xs = T::element(x[r] + k, in - k);
JLLAMA_UNROLL
      for (int o = 0; o < kOutputs; ++o) sum[r][o] = T::add(sum[r][o], T::weight(w[o] + k, in - k), xs);
    }
  }
JLLAMA_UNROLL
  for (int r = 0; r < R; ++r) T::totals(sum[r], totals[r]);
}

template <class T, int R = kRows>
inline void tile(int rows, const typename T::Weight* const* w, const typename T::Element* const* x, int64_t in,
                 int64_t ahead, typename T::Total (*totals)[kOutputs]) {
  if constexpr (R > 1)
    if (rows < R) return tile<T, R - 1>(rows, w, x, in, ahead, totals);
  if (ahead)
    run_tile<T, R>(w, x, in, ahead, totals);
  else
    run_tile<T, R>(w, x, in, 0, totals);
}

// The rows of a tile, as pointers: those that are missing stand for the last one.
template <class Value, int n>
struct Rows {
  const Value* at[n];
  Rows(const Value* values, int64_t first, int count, int64_t in, int64_t k) {
    for (int i = 0; i < n; ++i) at[i] = values + (first + std::min(i, count - 1)) * in + k;
  }
};

// Multiplies some rows of x by some rows of w; store(row, output, rows, outputs, totals, first) takes the results of a
// tile and a piece. Many rows of x pass by a piece of all weights, which stays in a core's second-level cache, as the
// piece of x does in the first-level one; few rows read the weights as they lie in memory.
template <class T, class Store>
void multiply(const void* w, const void* x, int64_t in, Span outputs, Span rows, const Store& store) {
  const auto* weights = static_cast<const typename T::Weight*>(w);
  const auto* elements = static_cast<const typename T::Element*>(x);
  const auto multiply_tile = [&](int64_t r, int64_t o, int64_t k) {
    const int n = std::min<int64_t>(kRows, rows.end - r), m = std::min<int64_t>(kOutputs, outputs.end - o);
    const Rows<typename T::Weight, kOutputs> ws(weights, o, m, in, k);
    const Rows<typename T::Element, kRows> xs(elements, r, n, in, k);
    typename T::Total totals[kRows][kOutputs];
    const int64_t length = std::min<int64_t>(T::kPiece, in - k);
    // Only the first rows wait for memory.
    tile<T>(n, ws.at, xs.at, length, r == rows.begin ? ahead<T>(in, k) : 0, totals);
    store(r, o, n, m, totals, k == 0);
  };
  if (rows.size() <= kRows) {
    for (int64_t o = outputs.begin; o < outputs.end; o += kOutputs)
      for (int64_t k = 0; k == 0 || k < in; k += T::kPiece) multiply_tile(rows.begin, o, k);
  } else {
    for (int64_t k = 0; k == 0 || k < in; k += T::kPiece)
      for (int64_t r = rows.begin; r < rows.end; r += kRows)
        for (int64_t o = outputs.begin; o < outputs.end; o += kOutputs) multiply_tile(r, o, k);
  }
}

template <class T>
void dot(const Product& p, Span outputs, Span rows) {
  multiply<T>(p.w, p.x, p.in, outputs, rows,
              [&](int64_t row, int64_t o, int n, int m, const float (*totals)[kOutputs], bool first) {
                for (int r = 0; r < n; ++r) {
                  float* y = p.y + (row + r) * p.out + o;
                  for (int i = 0; i < m; ++i) y[i] = first ? totals[r][i] : y[i] + totals[r][i];
                }
              });
}

// Stores float32 as another type.
template <class To>
void convert(const float* x, int64_t n, void* to) {
  To* values = static_cast<To*>(to);
  int64_t i = 0;
  for (; i + Vector::kWidth <= n; i += Vector::kWidth) Vector::store(values + i, Vector::load(x + i));
  if (i < n) Vector::store(values + i, Vector::load(x + i, n - i), n - i);
}

// Rounds float32 to what bfloat16 holds.
inline void round_in_place(const float* x, int64_t n, void* to) {
  float* values = static_cast<float*>(to);
  for (int64_t i = 0; i < n; i += Vector::kWidth) {
    const int64_t left = std::min<int64_t>(Vector::kWidth, n - i);
    uint16_t narrow[Vector::kWidth];
    Vector::store(narrow, Vector::load(x + i, left));
    Vector::store(values + i, Vector::load(narrow), left);
  }
}

// Rounds up to 32 elements to int8 with one scale, which it returns; `rest`, if there is one, becomes what that left.
inline float round_int8(const float* x, int64_t n, int8_t* to, float* rest) {
  auto most = Vector::zero();
  bool nan = false;
  for (int64_t i = 0; i < n; i += Vector::kWidth) {
    const auto xs = Vector::load(x + i, std::min(Vector::kWidth, n - i));
    most = Vector::max(most, Vector::absolute(xs));
    nan |= Vector::any_nan(xs);
  }
  const float scale = Vector::largest(most) / 127.0f;
  if (nan || !std::isfinite(scale)) {
    // The product becomes NaN whatever the weights are.
    std::memset(to, 0, n);
    if (rest) std::fill(rest, rest + n, 0.0f);
    return NAN;
  }
  const float inverse = scale >= std::numeric_limits<float>::min() ? 1.0f / scale : 0.0f;
  for (int64_t i = 0; i < n; i += Vector::kWidth) {
    const int64_t left = std::min(Vector::kWidth, n - i);
    const auto xs = Vector::load(x + i, left);
    const auto rounded = Vector::nearest(Vector::multiply(xs, Vector::set(inverse)));
    Vector::store_int8(to + i, rounded, left);
    if (rest) Vector::store(rest + i, Vector::multiply_add(rounded, Vector::set(-scale), xs), left);
  }
  return scale;
}

}  // namespace
