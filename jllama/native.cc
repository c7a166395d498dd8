// The products and the attention of a decoding step, for x86-64 processors with AVX-512.
//
// XLA's CPU back end reads memory at a half to a third of its speed in products of few rows, and attends on one core.
// These kernels replace `_dot` of quant.py and the middle of `attention` of model.py, and are optional: both files
// keep the form that runs everywhere, and the tests compare the two. jax.ffi calls them with XLA's own threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// What native.py expects; to be raised with every change of the kernels' arguments, so that a library which was
// compiled from an older source is not used.
extern "C" int jllama_version() { return 1; }

// Whether this processor has what the kernels are compiled for. Stands before the pragma, so it runs on any.
extern "C" int jllama_supported() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma")
#include <immintrin.h>

namespace {

// Runs task(0) .. task(n - 1) on the calling thread and the pool's. A thread that wakes up late finds nothing left to
// do and goes; nobody waits for it, so a pool that is busy elsewhere can't block the caller.
template <class Task>
void parallel(ffi::ThreadPool& pool, int64_t n, const Task& task) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  auto work = [shared, n, &task] {
    for (int64_t i; (i = shared->next.fetch_add(1)) < n;) {
      task(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), n) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::function<void()>(work));
  work();
  while (shared->done.load(std::memory_order_acquire) < n) _mm_pause();
}

// How to multiply and add vectors of each type; a mask drops what lies behind the end of a row.
struct Float32 {
  using Weight = float;
  using Element = float;
  using Totals = __m128;
  using Sum = __m512;
  static constexpr int64_t kWidth = 16;
  static __m512 zero() { return _mm512_setzero_ps(); }
  static __mmask16 mask(int64_t n) { return n < kWidth ? (1u << n) - 1 : ~0u; }
  static __m512 load(__mmask16 mask, const float* p) { return _mm512_maskz_loadu_ps(mask, p); }
  static __m512 weight(__mmask16 mask, const float* p) { return load(mask, p); }
  static void store(float* p, __mmask16 mask, __m512 x) { _mm512_mask_storeu_ps(p, mask, x); }
  static __m512 add(__m512 sum, __m512 w, __m512 x) { return _mm512_fmadd_ps(w, x, sum); }
};

struct BFloat16 {
  using Weight = uint16_t;
  using Element = uint16_t;
  using Totals = __m128;
  using Sum = __m512;
  static constexpr int64_t kWidth = 32;
  static __m512 zero() { return _mm512_setzero_ps(); }
  static __mmask32 mask(int64_t n) { return n < kWidth ? (1u << n) - 1 : ~0u; }
  static __m512i load(__mmask32 mask, const uint16_t* p) { return _mm512_maskz_loadu_epi16(mask, p); }
  static __m512i weight(__mmask32 mask, const uint16_t* p) { return load(mask, p); }
  static __m512 add(__m512 sum, __m512i w, __m512i x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
};

struct Int8 {
  using Weight = int8_t;
  using Element = int8_t;
  using Totals = __m128i;
  using Sum = __m512i;
  static constexpr int64_t kWidth = 64;
  static __m512i zero() { return _mm512_setzero_si512(); }
  static __mmask64 mask(int64_t n) { return n < kWidth ? (1ull << n) - 1 : ~0ull; }
  static __m512i load(__mmask64 mask, const int8_t* p) { return _mm512_maskz_loadu_epi8(mask, p); }
  // The instruction multiplies unsigned by signed bytes: the weights are raised by 128, and 128 times the sum of the
  // row of x is taken off the result.
  static __m512i weight(__mmask64 mask, const int8_t* p) {
    return _mm512_xor_si512(load(mask, p), _mm512_set1_epi8(-128));
  }
  static __m512i add(__m512i sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, w, x); }
};

// Keys and values stored in bfloat16, multiplied in float32.
struct Widened : Float32 {
  using Weight = uint16_t;
  static __m512 weight(__mmask16 mask, const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
  }
  static void store(uint16_t* p, __mmask16 mask, __m512 x) {
    _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(x));
  }
};

// Adds up the lanes of four vectors: four sums.
inline __m128 lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 t = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
  return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}

inline __m128i lanes(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i s = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i t = _mm256_add_epi32(_mm512_castsi512_si256(s), _mm512_extracti64x4_epi64(s, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
}

constexpr int kAhead = 16 << 10;       // bytes of weights that are fetched ahead: it doubles the speed of one core
constexpr int kTaskBytes = 512 << 10;  // of the weights that a task multiplies, at most
constexpr int kOutputs = 4;            // of a tile
constexpr int kRows = 4;               // of a tile, at most: with more sums the compiler runs out of registers

// Multiplies R rows of x by `outputs` (at most kOutputs) rows of w, all `in` long: totals[r] holds row r's products.
template <class T, int R>
void tile(const typename T::Weight* w, int outputs, const typename T::Element* x, int64_t in,
          typename T::Totals* totals) {
  const typename T::Weight* rows[kOutputs];
  for (int o = 0; o < kOutputs; ++o) rows[o] = w + std::min(o, outputs - 1) * in;
  typename T::Sum sum[R][kOutputs];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int o = 0; o < kOutputs; ++o) sum[r][o] = T::zero();
  for (int64_t k = 0; k < in; k += T::kWidth) {
    const auto mask = T::mask(in - k);
    decltype(T::weight(mask, w)) weights[kOutputs];
#pragma GCC unroll 4
    for (int o = 0; o < kOutputs; ++o) {
      weights[o] = T::weight(mask, rows[o] + k);
      _mm_prefetch(reinterpret_cast<const char*>(rows[o] + k) + kAhead, _MM_HINT_T1);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const auto xs = T::load(mask, x + r * in + k);
#pragma GCC unroll 4
      for (int o = 0; o < kOutputs; ++o) sum[r][o] = T::add(sum[r][o], weights[o], xs);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) totals[r] = lanes(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}

template <class T>
constexpr decltype(&tile<T, 1>) kTile[] = {tile<T, 1>, tile<T, 2>, tile<T, 3>, tile<T, kRows>};

// Multiplies all rows of x by all rows of w; store(row, output, outputs, totals, rows) takes the results of a tile.
// The outputs of a task stay in its core's second-level cache while the rows of x pass by.
template <class T, class Store>
void multiply(ffi::ThreadPool& pool, const typename T::Weight* w, const typename T::Element* x, int64_t out,
              int64_t rows, int64_t in, const Store& store) {
  // As many tasks for each thread, few and long, because each begins with weights that were not fetched ahead.
  const int64_t threads = std::max<int64_t>(1, pool.num_threads()), bytes = out * in * sizeof(typename T::Weight);
  const int64_t tasks = threads * ((bytes - 1) / (threads * kTaskBytes) + 1);
  const int64_t outputs = ((out - 1) / tasks / kOutputs + 1) * kOutputs;
  parallel(pool, (out + outputs - 1) / outputs, [&](int64_t i) {
    const int64_t end = std::min(out, (i + 1) * outputs);
    for (int64_t r = 0; r < rows; r += kRows) {
      const int n = std::min<int64_t>(kRows, rows - r);
      for (int64_t o = i * outputs; o < end; o += kOutputs) {
        const int m = std::min<int64_t>(kOutputs, end - o);
        typename T::Totals totals[kRows];
        kTile<T>[n - 1](w + o * in, m, x + r * in, in, totals);
        store(r, o, m, totals, n);
      }
    }
  });
}

inline __mmask8 outputs_mask(int outputs) { return (1u << outputs) - 1; }

// y[r, o] = sum over i of w[o, i] * x[r, i], in float32.
template <class T>
void dot(ffi::ThreadPool& pool, const void* w, const void* x, float* y, int64_t out, int64_t rows, int64_t in) {
  multiply<T>(pool, static_cast<const typename T::Weight*>(w), static_cast<const typename T::Element*>(x), out, rows,
              in, [&](int64_t row, int64_t o, int outputs, const __m128* totals, int n) {
                for (int r = 0; r < n; ++r)
                  _mm_mask_storeu_ps(y + (row + r) * out + o, outputs_mask(outputs), totals[r]);
              });
}

// Rows of x as int8, each with its scale, and 128 times its sum, which Int8::weight adds to every product.
struct Rounded {
  Rounded(int64_t rows, int64_t in) : values(new int8_t[rows * in]), scale(rows), raised(rows) {}
  std::unique_ptr<int8_t[]> values;
  std::vector<float> scale;
  std::vector<int32_t> raised;
};

// Rounds a row to int8, as `quantize` of quant.py does, into row r of `to`; `rest` becomes what the rounding left.
void round_row(const float* x, int64_t in, Rounded& to, int64_t r, float* rest) {
  __m512 most = _mm512_setzero_ps();
  __mmask16 nan = 0;
  for (int64_t i = 0; i < in; i += 16) {
    const __m512 xs = Float32::load(Float32::mask(in - i), x + i);
    most = _mm512_max_ps(most, _mm512_abs_ps(xs));
    nan |= _mm512_cmp_ps_mask(xs, xs, _CMP_UNORD_Q);
  }
  const float scale = nan ? NAN : _mm512_reduce_max_ps(most) / 127.0f;
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < in; i += 16) {
    const __mmask16 mask = Float32::mask(in - i);
    const __m512 xs = Float32::load(mask, x + i);
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(xs, _mm512_set1_ps(inverse)));
    _mm512_mask_cvtsepi32_storeu_epi8(to.values.get() + r * in + i, mask, rounded);
    sum = _mm512_add_epi32(sum, rounded);
    if (rest) {
      const __m512 left = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(rounded), _mm512_set1_ps(scale), xs);
      _mm512_mask_storeu_ps(rest + i, mask, left);
    }
  }
  to.scale[r] = scale;
  to.raised[r] = 128 * _mm512_reduce_add_epi32(sum);
}

// The same with weights int8 times a scale for each output. x is rounded to int8; with `fine` what that left is rounded
// too, and stands as a row of its own behind each row.
void dot_int8(ffi::ThreadPool& pool, const int8_t* w, const float* w_scale, const float* x, float* y, int64_t out,
              int64_t rows, int64_t in, bool fine) {
  const int each = fine ? 2 : 1;
  Rounded rounded(each * rows, in);
  std::vector<float> rest(fine ? in : 0);
  for (int64_t r = 0; r < rows; ++r) {
    round_row(x + r * in, in, rounded, each * r, fine ? rest.data() : nullptr);
    if (fine) round_row(rest.data(), in, rounded, 2 * r + 1, nullptr);
  }
  multiply<Int8>(pool, w, rounded.values.get(), out, each * rows, in,
                 [&](int64_t row, int64_t o, int outputs, const __m128i* totals, int n) {
                   const __m128 scale = _mm_maskz_loadu_ps(outputs_mask(outputs), w_scale + o);
                   for (int r = 0; r < n; r += each) {
                     __m128 sum = _mm_setzero_ps();
                     for (int i = r; i < r + each; ++i) {
                       const __m128i exact = _mm_sub_epi32(totals[i], _mm_set1_epi32(rounded.raised[row + i]));
                       const __m128 scales = _mm_mul_ps(scale, _mm_set1_ps(rounded.scale[row + i]));
                       sum = _mm_fmadd_ps(_mm_cvtepi32_ps(exact), scales, sum);
                     }
                     _mm_mask_storeu_ps(y + (row + r) / each * out + o, outputs_mask(outputs), sum);
                   }
                 });
}

ffi::Error dot_of(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::AnyBuffer x, ffi::ResultBuffer<ffi::F32> y) {
  const auto run = w.element_type() == ffi::DataType::BF16 ? dot<BFloat16> : dot<Float32>;
  run(pool, w.untyped_data(), x.untyped_data(), y->typed_data(), w.dimensions()[0], x.dimensions()[0],
      w.dimensions()[1]);
  return ffi::Error::Success();
}

ffi::Error dot_int8_of(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> w, ffi::Buffer<ffi::F32> scale,
                       ffi::Buffer<ffi::F32> x, bool fine, ffi::ResultBuffer<ffi::F32> y) {
  dot_int8(pool, w.typed_data(), scale.typed_data(), x.typed_data(), y->typed_data(), w.dimensions()[0],
           x.dimensions()[0], w.dimensions()[1], fine);
  return ffi::Error::Success();
}

// exp(x) for x <= 0, to float32's precision: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // in this order NaN stays NaN
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040.0f);
  for (const float c : {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

constexpr int kSlots = 128;  // of the cache, attended to at a time: they stay in a core's caches

// Attends with up to kRows query heads q [rows, h] of one key head to slots first .. last of k and v [S, h].
template <class T>
void attend_head(const float* q, const typename T::Weight* k, const typename T::Weight* v, int64_t first, int64_t last,
                 int rows, int64_t h, float* out) {
  alignas(64) float scores[kRows][kSlots];
  float largest[kRows], total[kRows];
  std::fill(largest, largest + rows, -INFINITY);
  std::fill(total, total + rows, 0.0f);
  std::fill(out, out + rows * h, 0.0f);
  for (int64_t s = first; s <= last; s += kSlots) {
    const int n = std::min<int64_t>(kSlots, last + 1 - s);
    for (int i = 0; i < n; i += kOutputs) {
      __m128 totals[kRows];
      kTile<T>[rows - 1](k + (s + i) * h, std::min(kOutputs, n - i), q, h, totals);
      for (int r = 0; r < rows; ++r) _mm_store_ps(&scores[r][i], totals[r]);
    }
    for (int r = 0; r < rows; ++r) {
      __m512 most = _mm512_set1_ps(largest[r]);
      for (int i = 0; i < n; i += 16)
        most = _mm512_mask_max_ps(most, Float32::mask(n - i), most, _mm512_load_ps(&scores[r][i]));
      const float before = largest[r];
      largest[r] = _mm512_reduce_max_ps(most);
      __m512 sum = _mm512_setzero_ps();
      for (int i = 0; i < n; i += 16) {
        const __m512 below = _mm512_sub_ps(_mm512_load_ps(&scores[r][i]), _mm512_set1_ps(largest[r]));
        const __m512 p = _mm512_maskz_mov_ps(Float32::mask(n - i), exponential(below));
        _mm512_store_ps(&scores[r][i], p);
        sum = _mm512_add_ps(sum, p);
      }
      // What was summed so far was relative to a smaller largest score.
      const float shrink = before == -INFINITY ? 0.0f : std::exp(before - largest[r]);
      total[r] = total[r] * shrink + _mm512_reduce_add_ps(sum);
      for (int64_t at = 0; at < h; at += 64) {
        float* sums = out + r * h + at;
        __mmask16 mask[4];
        __m512 values[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          mask[j] = Float32::mask(std::max<int64_t>(0, h - at - 16 * j));
          values[j] = _mm512_mul_ps(Float32::load(mask[j], sums + 16 * j), _mm512_set1_ps(shrink));
        }
        for (int i = 0; i < n; ++i) {
          const __m512 p = _mm512_set1_ps(scores[r][i]);
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j)
            values[j] = _mm512_fmadd_ps(p, T::weight(mask[j], v + (s + i) * h + at + 16 * j), values[j]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) Float32::store(sums + 16 * j, mask[j], values[j]);
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int64_t i = 0; i < h; ++i) out[r * h + i] /= total[r];
}

template <class T>
void attend(ffi::ThreadPool& pool, const float* q, const float* new_k, const float* new_v, void* k, void* v,
            const int32_t* last, int64_t window, int64_t n, int64_t g, int64_t s, int64_t h, float* out) {
  parallel(pool, n, [&](int64_t i) {
    auto* keys = static_cast<typename T::Weight*>(k) + i * s * h;
    auto* values = static_cast<typename T::Weight*>(v) + i * s * h;
    // A slot that isn't there stands for the nearest one, as in XLA's updates: never for memory of something else.
    const int64_t end = std::clamp<int64_t>(last[i], 0, s - 1), first = std::max<int64_t>(0, end - window + 1);
    for (int64_t at = 0; at < h; at += 16) {
      const __mmask16 mask = Float32::mask(h - at);
      T::store(keys + end * h + at, mask, Float32::load(mask, new_k + i * h + at));
      T::store(values + end * h + at, mask, Float32::load(mask, new_v + i * h + at));
    }
    for (int64_t row = i * g; row < (i + 1) * g; row += kRows) {
      const int rows = std::min<int64_t>(kRows, (i + 1) * g - row);
      attend_head<T>(q + row * h, keys, values, first, end, rows, h, out + row * h);
    }
  });
}

ffi::Error attend_of(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> new_k,
                     ffi::Buffer<ffi::F32> new_v, ffi::AnyBuffer, ffi::AnyBuffer, ffi::Buffer<ffi::S32> last,
                     int64_t window, ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> k,
                     ffi::Result<ffi::AnyBuffer> v) {
  const auto run = k->element_type() == ffi::DataType::BF16 ? attend<Widened> : attend<Float32>;
  run(pool, q.typed_data(), new_k.typed_data(), new_v.typed_data(), k->untyped_data(), v->untyped_data(),
      last.typed_data(), window, q.dimensions()[0], q.dimensions()[1], k->dimensions()[1], q.dimensions()[2],
      out->typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jllama_dot, dot_of,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()              // w [out, in], float32 or bfloat16
                                  .Arg<ffi::AnyBuffer>()              // x [rows, in], the same
                                  .Ret<ffi::Buffer<ffi::F32>>());     // y [rows, out]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jllama_dot_int8, dot_int8_of,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S8>>()        // w [out, in]
                                  .Arg<ffi::Buffer<ffi::F32>>()       // its scales [out]
                                  .Arg<ffi::Buffer<ffi::F32>>()       // x [rows, in]
                                  .Attr<bool>("fine")                 // whether x is rounded in two steps
                                  .Ret<ffi::Buffer<ffi::F32>>());     // y [rows, out]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jllama_attend, attend_of,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()   // q [B*K, G, H], scaled
                                  .Arg<ffi::Buffer<ffi::F32>>()      // new k [B*K, 1, H]
                                  .Arg<ffi::Buffer<ffi::F32>>()      // new v, the same
                                  .Arg<ffi::AnyBuffer>()             // k [B*K, S, H], float32 or bfloat16
                                  .Arg<ffi::AnyBuffer>()             // v, the same
                                  .Arg<ffi::Buffer<ffi::S32>>()   // last [B*K], the newest slot
                                  .Attr<int64_t>("window")           // how many slots up to the last are seen
                                  .Ret<ffi::Buffer<ffi::F32>>()      // [B*K, G, H]
                                  .Ret<ffi::AnyBuffer>()             // k in its own memory
                                  .Ret<ffi::AnyBuffer>());           // v in its own memory
