// Attention to a chunk of the cache's slots, whatever the vectors: see products.h.
//
// Scores, exponentials and weighted sums go through the slots in blocks counted from slot 0, so that a token's result
// depends on nothing but its position, the window and what it sees.

#pragma once

#include "products.h"

namespace {

using jllama::Attention;
using jllama::kBlock;
using jllama::kChunk;
using jllama::Queries;

// exp(x) for x <= 0, to float32's precision: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. Below float32's smallest
// normal number it is 0.
inline Vector::Float exponential(Vector::Float x) {
  const auto least = Vector::set(-87.0f);
  const auto bounded = Vector::max(least, x);  // in this order NaN stays NaN
  const auto n = Vector::nearest(Vector::multiply(bounded, Vector::set(1.44269504f)));
  auto r = Vector::multiply_add(n, Vector::set(-0.693359375f), bounded);
  r = Vector::multiply_add(n, Vector::set(2.12194440e-4f), r);
  auto p = Vector::set(1.0f / 5040.0f);
  for (const float c : {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f})
    p = Vector::multiply_add(p, r, Vector::set(c));
  return Vector::unless_less(Vector::multiply(p, Vector::power(n)), x, least);
}

inline float exponential(float x) {
  alignas(64) float lanes[Vector::kWidth];
  Vector::store(lanes, exponential(Vector::set(x)));
  return lanes[0];
}

// Up to kRows query rows, what they see of a block, and their partial results.
struct Tile {
  int rows;
  const float* q[kRows];
  int from[kRows], to[kRows];  // slots of the block, the last one not included; empty if from >= to
  float* largest[kRows];
  float* total[kRows];
  float* sums[kRows];
};

// Turns the scores of row r in a block into exponentials, and returns what the sums before are to be multiplied with.
inline float weigh(const Tile& t, int r, float scale, float* scores) {
  constexpr int kWidth = Vector::kWidth;
  const int from = t.from[r] / kWidth * kWidth, to = (t.to[r] + kWidth - 1) / kWidth * kWidth;
  std::fill(scores + from, scores + t.from[r], -INFINITY);
  std::fill(scores + t.to[r], scores + to, -INFINITY);
  const float before = *t.largest[r];
  auto most = Vector::set(before);
  for (int i = from; i < to; i += kWidth) {
    const auto scaled = Vector::multiply(Vector::load(scores + i), Vector::set(scale));
    Vector::store(scores + i, scaled);
    most = Vector::max(most, scaled);
  }
  *t.largest[r] = Vector::largest(most);
  const float base = *t.largest[r] == -INFINITY ? 0.0f : *t.largest[r];
  auto sum = Vector::zero();
  for (int i = from; i < to; i += kWidth) {
    const auto p = exponential(Vector::subtract(Vector::load(scores + i), Vector::set(base)));
    Vector::store(scores + i, p);
    sum = Vector::add(sum, p);
  }
  const float shrink = before == -INFINITY ? 0.0f : exponential(before - base);
  *t.total[r] = *t.total[r] * shrink + Vector::sum(sum);
  return shrink;
}

// Adds the values of slots from .. to - 1, weighted, to the sums of R rows, which are multiplied with `shrink` first.
template <int R, class Value>
inline void add_to_rows(const Value* v, int64_t h, const float* const* weights, int from, int to, const float* shrink,
                        float* const* sums) {
  constexpr int64_t kWidth = Vector::kWidth;
  constexpr int kVectors = 4;
  int64_t at = 0;
  for (; at + kVectors * kWidth <= h; at += kVectors * kWidth) {
    Vector::Float values[R][kVectors];
JLLAMA_UNROLL
    for (int r = 0; r < R; ++r)
JLLAMA_UNROLL
      for (int j = 0; j < kVectors; ++j)
        values[r][j] = Vector::multiply(Vector::load(sums[r] + at + j * kWidth), Vector::set(shrink[r]));
    for (int i = from; i < to; ++i) {
      Vector::Float ps[R];
JLLAMA_UNROLL
      for (int r = 0; r < R; ++r) ps[r] = Vector::set(weights[r][i]);
JLLAMA_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        const auto value = Vector::load(v + i * h + at + j * kWidth);
JLLAMA_UNROLL
        for (int r = 0; r < R; ++r) values[r][j] = Vector::multiply_add(ps[r], value, values[r][j]);
      }
    }
JLLAMA_UNROLL
    for (int r = 0; r < R; ++r)
JLLAMA_UNROLL
      for (int j = 0; j < kVectors; ++j) Vector::store(sums[r] + at + j * kWidth, values[r][j]);
  }
  for (; at < h; at += kWidth) {
    const int64_t n = std::min(kWidth, h - at);
    for (int r = 0; r < R; ++r) {
      auto values = Vector::multiply(Vector::load(sums[r] + at, n), Vector::set(shrink[r]));
      for (int i = from; i < to; ++i)
        values = Vector::multiply_add(Vector::set(weights[r][i]), Vector::load(v + i * h + at, n), values);
      Vector::store(sums[r] + at, values, n);
    }
  }
}

// Adds the values to `rows` rows from row r on.
template <class Value, int R = kRows>
inline void add_values(const Tile& t, int r, int rows, const Value* v, int64_t h, const float (*weights)[kBlock],
                       int from, int to, const float* shrink) {
  if constexpr (R > 1)
    if (rows < R) return add_values<Value, R - 1>(t, r, rows, v, h, weights, from, to, shrink);
  const float* ws[R];
  for (int i = 0; i < R; ++i) ws[i] = weights[r + i];
  add_to_rows<R>(v, h, ws, from, to, shrink, t.sums + r);
}

// Attends with a tile to a block whose keys and values begin at k and v.
template <class Value>
void attend_block(const Tile& t, const Value* k, const Value* v, int64_t h, float scale) {
  alignas(64) float scores[kRows][kBlock];
  int from = kBlock, to = 0, common_from = 0, common_to = kBlock;
  for (int r = 0; r < t.rows; ++r) {
    common_from = std::max(common_from, t.from[r]);
    common_to = std::min(common_to, t.to[r]);
    if (t.from[r] >= t.to[r]) continue;
    from = std::min(from, t.from[r]);
    to = std::max(to, t.to[r]);
  }
  for (int i = from / kOutputs * kOutputs; i < to; i += kOutputs) {
    const Value* keys[kOutputs];
    for (int o = 0; o < kOutputs; ++o) keys[o] = k + std::min(i + o, to - 1) * h;
    float totals[kRows][kOutputs];
    tile<Plain<Value, float>>(t.rows, keys, t.q, h, ahead<Plain<Value, float>>(h, 0), totals);
    for (int r = 0; r < t.rows; ++r) std::memcpy(scores[r] + i, totals[r], sizeof(totals[r]));
  }
  float shrink[kRows];
  for (int r = 0; r < t.rows; ++r)
    if (t.from[r] < t.to[r]) shrink[r] = weigh(t, r, scale, scores[r]);
  constexpr float kSame = 1.0f;
  if (common_from < common_to) {
    // Each row's slots are added in order; in between those that all rows see, at the price of one.
    for (int r = 0; r < t.rows; ++r)
      if (t.from[r] < common_from) {
        add_values(t, r, 1, v, h, scores, t.from[r], common_from, shrink + r);
        shrink[r] = 1.0f;
      }
    add_values(t, 0, t.rows, v, h, scores, common_from, common_to, shrink);
    for (int r = 0; r < t.rows; ++r)
      if (common_to < t.to[r]) add_values(t, r, 1, v, h, scores, common_to, t.to[r], &kSame);
  } else {
    for (int r = 0; r < t.rows; ++r)
      if (t.from[r] < t.to[r]) add_values(t, r, 1, v, h, scores, t.from[r], t.to[r], shrink + r);
  }
}

template <class Value>
void attend(const Attention& a, const Queries& queries, int64_t chunk, float* partial) {
  const int64_t g = a.group(), h = a.width, size = 2 + h, rows = queries.tokens.size() * g;
  for (int64_t i = 0; i < rows; ++i) {
    std::fill(partial + i * size, partial + (i + 1) * size, 0.0f);
    partial[i * size] = -INFINITY;
  }
  const int64_t head = (queries.row * a.key_heads + queries.key_head) * a.slots * h;
  const Value* k = static_cast<const Value*>(a.k) + head;
  const Value* v = static_cast<const Value*>(a.v) + head;
  for (int64_t block = chunk * kChunk; block < std::min(a.slots, (chunk + 1) * kChunk); block += kBlock)
    for (int64_t i = 0; i < rows; i += kRows) {
      Tile t;
      t.rows = std::min<int64_t>(kRows, rows - i);
      bool any = false;
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = i + std::min(r, t.rows - 1), token = queries.tokens.begin + row / g;
        const int64_t last = queries.first + token;
        t.q[r] = a.q + ((queries.row * a.tokens + token) * a.heads + queries.key_head * g + row % g) * h;
        t.from[r] = std::clamp<int64_t>(std::max<int64_t>(0, last + 1 - a.window) - block, 0, kBlock);
        t.to[r] = std::clamp<int64_t>(last + 1 - block, 0, kBlock);
        t.largest[r] = partial + row * size;
        t.total[r] = t.largest[r] + 1;
        t.sums[r] = t.largest[r] + 2;
        any |= t.from[r] < t.to[r];
      }
      if (any) attend_block(t, k + block * h, v + block * h, h, a.scale);
    }
}

inline void attend_any(const Attention& a, const Queries& queries, int64_t chunk, float* partial) {
  (a.bfloat16 ? attend<uint16_t> : attend<float>)(a, queries, chunk, partial);
}

inline void merge(float* total, const float* partial, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; ++i, total += 2 + width, partial += 2 + width) {
    if (partial[0] == -INFINITY && partial[1] == 0.0f) continue;  // a row that sees nothing of this chunk
    const float most = std::max(total[0], partial[0]);
    const float before = total[0] == -INFINITY ? 0.0f : exponential(total[0] - most);
    const float after = exponential(partial[0] - most);
    total[0] = most;
    for (int64_t j = 1; j < 2 + width; ++j) total[j] = total[j] * before + partial[j] * after;
  }
}

inline void finish(const Attention& a, const Queries& queries, const float* total) {
  const int64_t g = a.group(), h = a.width;
  for (int64_t i = 0; i < queries.tokens.size() * g; ++i, total += 2 + h) {
    const int64_t token = queries.tokens.begin + i / g;
    float* out = a.out + ((queries.row * a.tokens + token) * a.heads + queries.key_head * g + i % g) * h;
    for (int64_t j = 0; j < h; ++j) out[j] = total[2 + j] / total[1];
  }
}

// The kernels that need nothing but a Vector.
inline void add_plain(jllama::Kernels& kernels) {
  kernels.dot_float32 = dot<Plain<float, float>>;
  kernels.dot_bfloat16 = dot<Plain<uint16_t, float>>;
  kernels.round_bfloat16 = round_in_place;
  kernels.bfloat16_bytes = sizeof(float);
  kernels.store_bfloat16 = convert<uint16_t>;
  kernels.attend = attend_any;
  kernels.merge = merge;
  kernels.finish = finish;
}

}  // namespace
