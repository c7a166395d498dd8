// The products and the attention of a decoding step, for x86-64 processors with AVX-512.
//
// XLA's CPU back end reads memory at a half to a third of its speed in products of few rows, and attends on one core.
// These kernels replace `_dot` of quant.py and the middle of `attention` of model.py, and are optional: both files
// keep the form that runs everywhere, and the tests compare the two. jax.ffi calls them with XLA's own threads.

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// Whether this processor has what the kernels are compiled for. Stands before the pragma, so it runs on any.
extern "C" int jllama_supported() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
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
  using Result = float;
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
  using Result = float;
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
  using Result = int32_t;
  using Sum = __m512i;
  static constexpr int64_t kWidth = 64;
  static __m512i zero() { return _mm512_setzero_si512(); }
  static __mmask64 mask(int64_t n) { return n < kWidth ? (1ull << n) - 1 : ~0ull; }
  static __m512i load(__mmask64 mask, const int8_t* p) { return _mm512_maskz_loadu_epi8(mask, p); }
  // The instruction multiplies unsigned by signed bytes: the weights are raised by 128, and 128 times the sum of the
  // row of x is taken off the result.
  static __m512i weight(__mmask64 mask, const int8_t* p) { return _mm512_xor_si512(load(mask, p), _mm512_set1_epi8(-128)); }
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

constexpr int kAhead = 16 << 10;  // bytes of the weights that are fetched ahead: this doubles the speed of one core
constexpr int kOutputs = 4;       // of a tile
constexpr int kRows = 4;          // of a tile, at most: with more sums the compiler runs out of registers

// Computes y[r, o] for R rows of x and `outputs` (4 at most) rows of w, each row `in` long.
template <class T, int R>
void tile(const typename T::Weight* w, int outputs, const typename T::Element* x, const int32_t* raised, int64_t in,
          typename T::Result* y, int64_t y_stride) {
  const typename T::Weight* rows[kOutputs];
  for (int o = 0; o < kOutputs; ++o) rows[o] = w + std::min(o, outputs - 1) * in;
  typename T::Sum sum[R][kOutputs];
#pragma GCC unroll 8
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
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto xs = T::load(mask, x + r * in + k);
#pragma GCC unroll 4
      for (int o = 0; o < kOutputs; ++o) sum[r][o] = T::add(sum[r][o], weights[o], xs);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    typename T::Result out[kOutputs];
    auto total = lanes(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
    if constexpr (std::is_same_v<T, Int8>) {
      total = _mm_sub_epi32(total, _mm_set1_epi32(raised[r]));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), total);
    } else {
      _mm_storeu_ps(out, total);
    }
    for (int o = 0; o < outputs; ++o) y[r * y_stride + o] = out[o];
  }
}

template <class T>
constexpr decltype(&tile<T, 1>) kTile[] = {tile<T, 1>, tile<T, 2>, tile<T, 3>, tile<T, kRows>};

// y[r, o] = sum over i of w[o, i] * x[r, i]. Tasks take some outputs each, and within them some rows of x at a time,
// so that both stay in a core's second-level cache.
template <class T>
ffi::Error dot(ffi::ThreadPool& pool, const typename T::Weight* w, const typename T::Element* x,
               typename T::Result* y, int64_t out, int64_t rows, int64_t in) {
  const int64_t bytes = in * sizeof(typename T::Element);
  const int64_t outputs = std::max<int64_t>(kOutputs, (64 << 10) / bytes / kOutputs * kOutputs);
  std::vector<int32_t> raised;
  if constexpr (std::is_same_v<T, Int8>) {
    raised.resize(rows);
    for (int64_t r = 0; r < rows; ++r) {
      __m512i sum = T::zero();
      const __m512i ones = _mm512_set1_epi8(1);
      for (int64_t k = 0; k < in; k += T::kWidth)
        sum = T::add(sum, ones, T::load(T::mask(in - k), x + r * in + k));
      raised[r] = 128 * _mm512_reduce_add_epi32(sum);
    }
  }
  parallel(pool, (out + outputs - 1) / outputs, [&](int64_t i) {
    const int64_t end = std::min(out, (i + 1) * outputs);
    for (int64_t r = 0; r < rows; r += kRows) {
      const auto run = kTile<T>[std::min<int64_t>(kRows, rows - r) - 1];
      for (int64_t o = i * outputs; o < end; o += kOutputs)
        run(w + o * in, std::min<int64_t>(kOutputs, end - o), x + r * in, raised.data() + r, in, y + r * out + o, out);
    }
  });
  return ffi::Error::Success();
}

ffi::Error dot_of(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t out = w.dimensions()[0], in = w.dimensions()[1], rows = x.dimensions()[0];
  switch (w.element_type()) {
    case ffi::DataType::S8:
      return dot<Int8>(pool, w.typed_data<int8_t>(), x.typed_data<int8_t>(), y->typed_data<int32_t>(), out, rows, in);
    case ffi::DataType::BF16:
      return dot<BFloat16>(pool, static_cast<uint16_t*>(w.untyped_data()), static_cast<uint16_t*>(x.untyped_data()),
                           y->typed_data<float>(), out, rows, in);
    case ffi::DataType::F32:
      return dot<Float32>(pool, w.typed_data<float>(), x.typed_data<float>(), y->typed_data<float>(), out, rows, in);
    default:
      return ffi::Error::InvalidArgument("weights are float32, bfloat16 or int8");
  }
}

// exp(x) for x <= 0, to float32's precision: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
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
    for (int i = 0; i < n; i += kOutputs)
      kTile<T>[rows - 1](k + (s + i) * h, std::min(kOutputs, n - i), q, nullptr, h, &scores[0][i], kSlots);
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
        __m512 values[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const __mmask16 mask = Float32::mask(std::max<int64_t>(0, h - at - 16 * j));
          values[j] = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, out + r * h + at + 16 * j), _mm512_set1_ps(shrink));
        }
        for (int i = 0; i < n; ++i) {
          const __m512 p = _mm512_set1_ps(scores[r][i]);
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
            const __mmask16 mask = Float32::mask(std::max<int64_t>(0, h - at - 16 * j));
            values[j] = _mm512_fmadd_ps(p, T::weight(mask, v + (s + i) * h + at + 16 * j), values[j]);
          }
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const __mmask16 mask = Float32::mask(std::max<int64_t>(0, h - at - 16 * j));
          _mm512_mask_storeu_ps(out + r * h + at + 16 * j, mask, values[j]);
        }
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int64_t i = 0; i < h; ++i) out[r * h + i] /= total[r];
}

template <class T>
ffi::Error attend(ffi::ThreadPool& pool, const float* q, const float* new_k, const float* new_v, void* k, void* v,
                  const int32_t* last, int64_t window, int64_t n, int64_t g, int64_t s, int64_t h, float* out) {
  parallel(pool, n, [&](int64_t i) {
    auto* keys = static_cast<typename T::Weight*>(k) + i * s * h;
    auto* values = static_cast<typename T::Weight*>(v) + i * s * h;
    for (int64_t at = 0; at < h; at += 16) {
      const __mmask16 mask = Float32::mask(h - at);
      T::store(keys + last[i] * h + at, mask, Float32::load(mask, new_k + i * h + at));
      T::store(values + last[i] * h + at, mask, Float32::load(mask, new_v + i * h + at));
    }
    const int64_t end = last[i], first = std::max<int64_t>(0, end - window + 1);
    for (int64_t row = i * g; row < (i + 1) * g; row += kRows)
      attend_head<T>(q + row * h, keys, values, first, end, std::min<int64_t>(kRows, (i + 1) * g - row), h, out + row * h);
  });
  return ffi::Error::Success();
}

ffi::Error attend_of(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> new_k,
                     ffi::Buffer<ffi::F32> new_v, ffi::AnyBuffer, ffi::AnyBuffer, ffi::Buffer<ffi::S32> last,
                     int64_t window, ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> k,
                     ffi::Result<ffi::AnyBuffer> v) {
  const auto run = k->element_type() == ffi::DataType::BF16 ? attend<Widened> : attend<Float32>;
  return run(pool, q.typed_data(), new_k.typed_data(), new_v.typed_data(), k->untyped_data(), v->untyped_data(),
             last.typed_data(), window, q.dimensions()[0], q.dimensions()[1], k->dimensions()[1], q.dimensions()[2],
             out->typed_data());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jllama_dot, dot_of,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()   // w [out, in]
                                  .Arg<ffi::AnyBuffer>()   // x [rows, in], of w's type
                                  .Ret<ffi::AnyBuffer>());  // y [rows, out], float32 or int32

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
