// How work is divided into tasks: products over outputs and rows, attention over rows, heads, tokens and slots. What
// a task computes doesn't depend on it, so that results have the same bits for any number of threads.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"

namespace jllama {
namespace {

constexpr int64_t kTaskBytes = 512 << 10;  // of the weights that a task multiplies, at most: they stay in its cache
constexpr int64_t kTaskRows = 64;          // of x, at least, where rows are divided
constexpr int64_t kTile = 4;               // outputs are divided into multiples of this

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Divides outputs and rows among the threads. As many tasks for each, few and long, because each begins with weights
// that were not fetched ahead.
void divide(Pool& pool, int64_t out, int64_t rows, int64_t row_bytes, const std::function<void(Span, Span)>& task) {
  if (out == 0 || rows == 0) return;
  const int64_t threads = std::max<int64_t>(1, pool.threads());
  const int64_t tasks = threads * pieces(std::max<int64_t>(1, out * row_bytes), threads * kTaskBytes);
  const int64_t outputs = pieces(pieces(out, tasks), kTile) * kTile, across = pieces(out, outputs);
  const int64_t down = std::clamp<int64_t>(4 * threads / across, 1, pieces(rows, kTaskRows));
  const int64_t height = pieces(pieces(rows, down), kTile) * kTile;
  pool.run(across * pieces(rows, height), [&](int64_t i) {
    const int64_t o = i % across * outputs, r = i / across * height;
    task({o, std::min(out, o + outputs)}, {r, std::min(rows, r + height)});
  });
}

// Runs task(row) for all rows: many on all threads, few on this one.
void each_row(Pool& pool, int64_t rows, int64_t bytes, const std::function<void(int64_t)>& task) {
  const int64_t step = std::max<int64_t>(1, (32 << 10) / std::max<int64_t>(1, bytes));
  const auto some = [&](int64_t i) {
    for (int64_t r = i * step; r < std::min(rows, (i + 1) * step); ++r) task(r);
  };
  if (rows <= 2 * step)
    for (int64_t i = 0; i < pieces(rows, step); ++i) some(i);
  else
    pool.run(pieces(rows, step), some);
}

// How many bytes of a row of weights a core has at hand: all, or a piece where many rows pass by.
int64_t piece(const Product& p, int64_t bytes) {
  return p.rows > kTile ? std::min(p.in * bytes, kPieceBytes) : p.in * bytes;
}

}  // namespace

void dot_float32(Pool& pool, const Kernels& kernels, Product p) {
  divide(pool, p.out, p.rows, piece(p, sizeof(float)),
         [&](Span outputs, Span rows) { kernels.dot_float32(p, outputs, rows); });
}

void dot_bfloat16(Pool& pool, const Kernels& kernels, Product p) {
  const auto* x = static_cast<const float*>(p.x);
  const int64_t size = p.in * kernels.bfloat16_bytes;
  std::unique_ptr<float[]> buffer(new float[pieces(p.rows * size, sizeof(float))]);
  auto* rounded = reinterpret_cast<char*>(buffer.get());
  each_row(pool, p.rows, p.in * sizeof(float),
           [&](int64_t r) { kernels.round_bfloat16(x + r * p.in, p.in, rounded + r * size); });
  p.x = rounded;
  divide(pool, p.out, p.rows, piece(p, sizeof(uint16_t)),
         [&](Span outputs, Span rows) { kernels.dot_bfloat16(p, outputs, rows); });
}

int64_t group_of(GroupKind kind) { return kind == kQ6_K ? 16 : 32; }

void dot_groups(Pool& pool, const Kernels& kernels, GroupKind kind, ProductGroups p, const float* x, bool fine) {
  p.each = fine ? 2 : 1;
  p.padded = pieces(p.in, kPad) * kPad;
  const int64_t group = group_of(kind), groups = p.padded / group, rows = p.each * p.rows;
  std::unique_ptr<int8_t[]> values(new int8_t[rows * p.padded]());
  std::unique_ptr<float[]> scale(new float[rows * groups]()), sum(new float[rows * groups]());
  each_row(pool, p.rows, p.in * sizeof(float), [&](int64_t row) {
    const auto round = [&](const float* from, int64_t r, float* rest) {
      kernels.round_groups(from, p.in, group, &values[r * p.padded], &scale[r * groups], &sum[r * groups], rest);
    };
    std::unique_ptr<float[]> rest(fine ? new float[p.in] : nullptr);
    round(x + row * p.in, row * p.each, rest.get());
    if (fine) round(rest.get(), row * p.each + 1, nullptr);
  });
  p.x = values.get();
  p.x_scale = scale.get();
  p.x_sum = sum.get();
  divide(pool, p.out, p.rows, kind == kQ8_0 || kind == kInt8 || kind == kQ80 ? p.in : p.in / 2,
         [&](Span outputs, Span rows) { kernels.dot_groups[kind](p, outputs, rows); });
}

namespace {

constexpr int64_t kQueries = 64;  // query rows of a task, about: a block of keys serves them all from a core's cache

// Tokens of one row and key head. Its tasks are all chunks together, or each chunk alone.
struct Item {
  Queries queries;
  Span chunks;
  float* partial;  // of each chunk, where they are apart
  std::atomic<int64_t> left{0};
};

void write_new(Pool& pool, const Kernels& kernels, const Attention& a, const NewTokens& new_tokens, void* k, void* v) {
  const int64_t h = a.width, heads = a.key_heads, t = a.tokens;
  const auto copy = [&](const float* from, void* cache, int64_t slot) {
    if (a.bfloat16)
      kernels.store_bfloat16(from, h, static_cast<uint16_t*>(cache) + slot * h);
    else
      std::memcpy(static_cast<float*>(cache) + slot * h, from, h * sizeof(float));
  };
  each_row(pool, new_tokens.rows * heads, t * h * 2 * sizeof(float), [&](int64_t i) {
    const int64_t row = i / heads, head = i % heads;
    const int64_t first = std::clamp<int64_t>(new_tokens.first[row], 0, a.slots - t);
    for (int64_t token = 0; token < t; ++token) {
      const int64_t from = ((row * t + token) * heads + head) * h, slot = i * a.slots + first + token;
      copy(new_tokens.k + from, k, slot);
      copy(new_tokens.v + from, v, slot);
    }
  });
}

}  // namespace

void attend(Pool& pool, const Kernels& kernels, Attention a, const NewTokens& new_tokens, void* k, void* v) {
  write_new(pool, kernels, a, new_tokens, k, v);
  a.k = k;
  a.v = v;
  const int64_t g = a.group(), height = std::max<int64_t>(1, kQueries / g), tiles = pieces(a.tokens, height);
  const int64_t n = new_tokens.rows * tiles * a.key_heads, size = 2 + a.width;
  // Where there are fewer items than threads can use, each chunk of the slots is a task.
  const bool apart = n < 4 * pool.threads();
  std::vector<Item> items(n);
  std::vector<std::pair<int64_t, int64_t>> tasks;  // item and chunk
  int64_t rows = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = i / (tiles * a.key_heads), tile = i / a.key_heads % tiles;
    const int64_t first = std::clamp<int64_t>(new_tokens.first[row], 0, a.slots - a.tokens);
    Item& item = items[i];
    item.queries = {row, i % a.key_heads, first, {tile * height, std::min(a.tokens, (tile + 1) * height)}};
    const int64_t seen = first + item.queries.tokens.begin + 1 - a.window;
    item.chunks = {std::max<int64_t>(0, seen) / kChunk, (first + item.queries.tokens.end - 1) / kChunk + 1};
    item.left = item.chunks.size();
    for (int64_t c = 0; apart && c < item.chunks.size(); ++c) tasks.emplace_back(i, c);
    if (!apart) tasks.emplace_back(i, 0);
    rows += (apart ? item.chunks.size() : 0) * item.queries.tokens.size() * g;
  }
  std::unique_ptr<float[]> partials(new float[rows * size]);
  rows = 0;
  for (Item& item : items) {
    item.partial = partials.get() + rows * size;
    rows += (apart ? item.chunks.size() : 0) * item.queries.tokens.size() * g;
  }
  pool.run(tasks.size(), [&](int64_t i) {
    Item& item = items[tasks[i].first];
    const int64_t count = item.queries.tokens.size() * g;
    if (apart) {
      const int64_t c = tasks[i].second;
      kernels.attend(a, item.queries, item.chunks.begin + c, item.partial + c * count * size);
      if (item.left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
      for (int64_t m = 1; m < item.chunks.size(); ++m)
        kernels.merge(item.partial, item.partial + m * count * size, count, a.width);
      kernels.finish(a, item.queries, item.partial);
    } else {
      std::unique_ptr<float[]> total(new float[2 * count * size]);
      kernels.attend(a, item.queries, item.chunks.begin, total.get());
      for (int64_t c = item.chunks.begin + 1; c < item.chunks.end; ++c) {
        kernels.attend(a, item.queries, c, total.get() + count * size);
        kernels.merge(total.get(), total.get() + count * size, count, a.width);
      }
      kernels.finish(a, item.queries, total.get());
    }
  });
}

}  // namespace jllama
