// Products with weights in groups, whatever the vectors: see products.h.
//
// What works on bytes is a class I of each file: Bytes is a vector of kSpan elements, or a few vectors; nibbles, fifth,
// sixth and int8 unpack them; halves, half, bytes and scales deal with scales; add<group> adds the products of a span.

#pragma once

#include "products.h"

namespace {

using jllama::Groups;
using jllama::ProductGroups;

// A kind of groups: its elements' low and high bits, the elements of a group, whether groups have scales of their own
// (256 elements share a d then) and an m, what stands for 0 where there is no m, and how many uint16_t a d takes.
template <class I, int low_bits, int high_bits, int group, bool own_scales, bool has_m, int zero, int wide = 1>
struct Kind {
  static constexpr int64_t kGroup = group;
  static constexpr int64_t kStep = Vector::kWidth * kGroup;  // elements whose scales fill a vector
  static constexpr int64_t kShare = own_scales ? 256 : group;

  static int64_t bytes(int64_t k) { return k * low_bits / 8; }  // of `values`, for k elements
  static int64_t high_bytes(int64_t k) { return k * high_bits / 8; }
  static int64_t scales(int64_t k) { return own_scales ? k / kGroup : 0; }
  static int64_t mins(int64_t k) { return has_m ? scales(k) : 0; }
  static int64_t ds(int64_t k) { return (k + kShare - 1) / kShare * wide; }
  static int64_t ms(int64_t k) { return has_m ? ds(k) : 0; }

  // The parts from row `o` on, and from element k of a row on, which begins a step.
  static Groups row(const Groups& w, int64_t o, int64_t in) {
    return {w.values + o * bytes(in), w.high + o * high_bytes(in), w.scales + o * scales(in),
            w.mins + o * mins(in),    w.d + o * ds(in),            w.m + o * ms(in)};
  }
  static Groups from(const Groups& w, int64_t k) {
    return {w.values + bytes(k), w.high + high_bytes(k),          w.scales + scales(k),
            w.mins + mins(k),    w.d + k / kShare * wide, w.m + (has_m ? k / kShare : 0)};
  }

  // The last elements of a row, in memory of a whole step.
  struct Tail {
    alignas(64) uint8_t values[kStep * low_bits / 8] = {};
    uint8_t high[kStep * high_bits / 8 + 1] = {};
    uint8_t scales[Vector::kWidth] = {}, mins[Vector::kWidth] = {};
    uint16_t d[Vector::kWidth * wide] = {}, m[Vector::kWidth] = {};
    Tail(const Groups& w, int64_t n) {
      std::memcpy(values, w.values, bytes(n));
      if (high_bits) std::memcpy(high, w.high, high_bytes(n));
      if (own_scales) std::memcpy(scales, w.scales, Kind::scales(n));
      if (own_scales && has_m) std::memcpy(mins, w.mins, Kind::mins(n));
      std::memcpy(d, w.d, ds(n) * sizeof(uint16_t));
      if (has_m) std::memcpy(m, w.m, ms(n) * sizeof(uint16_t));
    }
    Groups parts() const { return {values, high, scales, mins, d, m}; }
  };

  static typename I::Bytes unpack(const Groups& w, int64_t span) {
    const uint8_t* values = w.values + bytes(span * I::kSpan);
    [[maybe_unused]] const uint8_t* high = w.high + high_bytes(span * I::kSpan);
    if constexpr (low_bits == 8)
      return I::int8(values);
    else if constexpr (high_bits == 1)
      return I::fifth(I::nibbles(values), high);
    else if constexpr (high_bits == 2)
      return I::sixth(I::nibbles(values), high);
    else
      return I::nibbles(values);
  }

  // d or m of each of a step's groups.
  static Vector::Float shared(const uint16_t* p) {
    if constexpr (kStep <= kShare) return Vector::set(I::half(*p));
    float each[Vector::kWidth];
    for (int i = 0; i < Vector::kWidth; ++i) each[i] = I::half(p[i * kGroup / kShare]);
    return Vector::load(each);
  }

  // The weights of a step are a * u + b.
  static void scales_of(const Groups& w, Vector::Float& a, Vector::Float& b) {
    if constexpr (own_scales)
      a = Vector::multiply(shared(w.d), I::template bytes<group == 16>(w.scales));
    else if constexpr (wide == 2)
      std::memcpy(&a, w.d, sizeof(a));
    else
      a = I::halves(w.d);
    if constexpr (!has_m)
      b = Vector::multiply(a, Vector::set(-static_cast<float>(low_bits == 8 ? I::kRaised : zero)));
    else if constexpr (own_scales)
      b = Vector::multiply(Vector::multiply(shared(w.m), Vector::set(-1.0f)), I::template bytes<false>(w.mins));
    else
      b = I::halves(w.m);
    if constexpr (has_m && low_bits == 8) b = Vector::multiply_add(a, Vector::set(-static_cast<float>(I::kRaised)), b);
  }
};

// Adds the products of a step of one row of weights, or of some spans of it, with R rows of x.
template <class I, class K, int R>
inline void add_step(const Groups& w, const int8_t* const* x, const float* const* x_scale, const float* const* x_sum,
                     int64_t k, int64_t spans, Vector::Float* sum) {
  Vector::Float a, b;
  K::scales_of(w, a, b);
  typename I::Scales scales[R];
JLLAMA_UNROLL
  for (int r = 0; r < R; ++r) {
    scales[r] = I::scales(Vector::multiply(a, Vector::load(x_scale[r] + k / K::kGroup)));
    sum[r] = Vector::multiply_add(b, Vector::load(x_sum[r] + k / K::kGroup), sum[r]);
  }
JLLAMA_UNROLL
  for (int64_t v = 0; v < spans; ++v) {
    const auto u = K::unpack(w, v);
JLLAMA_UNROLL
    for (int r = 0; r < R; ++r)
      sum[r] = I::template add<K::kGroup>(sum[r], u, x[r] + k + v * I::kSpan, scales[r], v);
  }
}

// Multiplies R rows of x by `outputs` rows of w: totals[r] holds row r's products.
template <class I, class K, int R>
void group_tile(const ProductGroups& p, int64_t row, int64_t o, int outputs, bool fetch, float (*totals)[kOutputs]) {
  const int8_t* x[R];
  const float *x_scale[R], *x_sum[R];
  Vector::Float sum[kOutputs][R];
  for (int r = 0; r < R; ++r) {
    x[r] = p.x + (row + r) * p.padded;
    x_scale[r] = p.x_scale + (row + r) * p.padded / K::kGroup;
    x_sum[r] = p.x_sum + (row + r) * p.padded / K::kGroup;
    for (int i = 0; i < kOutputs; ++i) sum[i][r] = Vector::zero();
  }
  Groups w[kOutputs];
  for (int i = 0; i < kOutputs; ++i) w[i] = K::row(p.w, o + std::min(i, outputs - 1), p.in);
  const int64_t tile_bytes = kOutputs * K::bytes(p.in), ahead = (kAhead / tile_bytes + 1) * tile_bytes;
  int64_t k = 0;
  for (; k + K::kStep <= p.in; k += K::kStep)
    for (int i = 0; i < kOutputs; ++i) {
      const Groups from = K::from(w[i], k);
      for (int64_t at = 0; fetch && at < K::bytes(K::kStep); at += 64) Vector::prefetch(from.values + ahead + at);
      add_step<I, K, R>(from, x, x_scale, x_sum, k, K::kStep / I::kSpan, sum[i]);
    }
  for (int i = 0; k < p.in && i < kOutputs; ++i) {
    const typename K::Tail tail(K::from(w[i], k), p.in - k);
    add_step<I, K, R>(tail.parts(), x, x_scale, x_sum, k, (p.in - k + I::kSpan - 1) / I::kSpan, sum[i]);
  }
  for (int r = 0; r < R; ++r) Vector::sums(sum[0][r], sum[1][r], sum[2][r], sum[3][r], totals[r]);
}

template <class I, class K, int R = kRows>
void group_tile_of(int rows, const ProductGroups& p, int64_t row, int64_t o, int outputs, bool fetch,
                   float (*totals)[kOutputs]) {
  if constexpr (R > 1)
    if (rows < R) return group_tile_of<I, K, R - 1>(rows, p, row, o, outputs, fetch, totals);
  group_tile<I, K, R>(p, row, o, outputs, fetch, totals);
}

template <class I, class K>
void dot_groups(const ProductGroups& p, Span outputs, Span rows) {
  // Rows that are added up are rows of the same tile.
  const int64_t step = kRows / p.each * p.each, end = rows.end * p.each;
  for (int64_t r = rows.begin * p.each; r < end; r += step) {
    const int n = std::min(step, end - r);
    for (int64_t o = outputs.begin; o < outputs.end; o += kOutputs) {
      const int m = std::min<int64_t>(kOutputs, outputs.end - o);
      float totals[kRows][kOutputs];
      group_tile_of<I, K>(n, p, r, o, m, r == rows.begin * p.each, totals);
      for (int i = 0; i < n; i += p.each) {
        for (int j = 0; p.each == 2 && j < kOutputs; ++j) totals[i][j] += totals[i + 1][j];
        std::memcpy(p.y + (r + i) / p.each * p.out + o, totals[i], m * sizeof(float));
      }
    }
  }
}

inline void round_groups(const float* x, int64_t n, int64_t group, int8_t* to, float* scale, float* sum, float* rest) {
  for (int64_t k = 0; k < n; k += 32) {
    const float of_all = round_int8(x + k, std::min<int64_t>(32, n - k), to + k, rest ? rest + k : nullptr);
    for (int64_t g = k; g < k + 32; g += group) {
      int32_t total = 0;
      for (int64_t i = g; i < std::min(g + group, n); ++i) total += to[i];
      scale[g / group] = of_all;
      sum[g / group] = of_all * static_cast<float>(total);
    }
  }
}

template <class I>
void add_groups(jllama::Kernels& kernels) {
  kernels.dot_groups[jllama::kQ8_0] = dot_groups<I, Kind<I, 8, 0, 32, false, false, 0>>;
  kernels.dot_groups[jllama::kQ4_0] = dot_groups<I, Kind<I, 4, 0, 32, false, false, 8>>;
  kernels.dot_groups[jllama::kQ4_1] = dot_groups<I, Kind<I, 4, 0, 32, false, true, 0>>;
  kernels.dot_groups[jllama::kQ5_0] = dot_groups<I, Kind<I, 4, 1, 32, false, false, 16>>;
  kernels.dot_groups[jllama::kQ5_1] = dot_groups<I, Kind<I, 4, 1, 32, false, true, 0>>;
  kernels.dot_groups[jllama::kQ4_K] = dot_groups<I, Kind<I, 4, 0, 32, true, true, 0>>;
  kernels.dot_groups[jllama::kQ5_K] = dot_groups<I, Kind<I, 4, 1, 32, true, true, 0>>;
  kernels.dot_groups[jllama::kQ6_K] = dot_groups<I, Kind<I, 4, 2, 16, true, false, 32>>;
  kernels.dot_groups[jllama::kInt8] = dot_groups<I, Kind<I, 8, 0, 32, false, true, 0>>;
  kernels.dot_groups[jllama::kQ80] = dot_groups<I, Kind<I, 8, 0, 32, false, false, 0, 2>>;
  kernels.round_groups = round_groups;
}

}  // namespace
