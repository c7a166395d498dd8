// The kernels as XLA calls them: every shape and dtype is checked, and XLA's own threads do the work.

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ffi = xla::ffi;

namespace {

using Shape = ffi::Span<const int64_t>;
using jllama::Kernels;
using Any = ffi::AnyBuffer;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using ResultF32 = ffi::ResultBuffer<ffi::F32>;

// XLA's threads. One that wakes up late finds nothing left to do and goes; nobody waits for it, so that a pool which is
// busy elsewhere can't block the caller.
class XlaPool : public jllama::Pool {
 public:
  explicit XlaPool(ffi::ThreadPool& pool) : pool_(pool) {}
  int64_t threads() const override { return pool_.num_threads(); }
  void run(int64_t n, const std::function<void(int64_t)>& task) override {
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
    const int64_t helpers = std::min<int64_t>(threads(), n) - 1;
    for (int64_t i = 0; i < helpers; ++i) pool_.Schedule(std::function<void()>(work));
    work();
    // A helper is done in microseconds, or has lost its core: then this one is better given to it.
    for (int64_t spins = 0; shared->done.load(std::memory_order_acquire) < n; ++spins)
      if (spins < 4096)
        pause();
      else
        std::this_thread::yield();
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  ffi::ThreadPool& pool_;
};

// The kernels in use: chosen once, before any of them runs.
Kernels chosen{};

const Kernels& kernels() { return chosen; }

std::string shape_of(const std::vector<int64_t>& dimensions) {
  std::string text = "[";
  for (size_t i = 0; i < dimensions.size(); ++i) text += (i ? ", " : "") + std::to_string(dimensions[i]);
  return text + "]";
}

ffi::Error wrong(const std::string& what, const std::string& expected, Shape found) {
  return ffi::Error::InvalidArgument("jllama: " + what + " has the shape " + shape_of({found.begin(), found.end()}) + ": expected " + expected);
}

bool is(Shape found, std::initializer_list<int64_t> expected) {
  return found.size() == expected.size() && std::equal(found.begin(), found.end(), expected.begin());
}

// The shape of a stack of layers; a single one's has no axis for them.
std::vector<int64_t> stack(Shape dimensions, size_t axes) {
  std::vector<int64_t> shape(dimensions.begin(), dimensions.end());
  if (shape.size() + 1 == axes) shape.insert(shape.begin(), 1);
  return shape;
}

Shape span(const std::vector<int64_t>& shape) { return {shape.data(), shape.size()}; }

// The layer's number, brought to one that there is, as XLA's own indexing does.
int64_t layer_of(const S32& layer, int64_t layers) {
  return std::clamp<int64_t>(layer.typed_data()[0], 0, layers - 1);
}

// What is wrong with the shapes of a product, if anything.
ffi::Error check(Shape w, const S32& layer, Shape x, Shape y) {
  if (w.size() != 3 || w[0] < 1) return wrong("w", "[L, out, in]", w);
  if (layer.element_count() != 1) return wrong("layer", "one number", layer.dimensions());
  if (x.size() != 2 || x[1] != w[2]) return wrong("x", "[rows, " + std::to_string(w[2]) + "]", x);
  if (!is(y, {x[0], w[1]})) return wrong("y", "[" + std::to_string(x[0]) + ", " + std::to_string(w[1]) + "]", y);
  return ffi::Error::Success();
}

ffi::Error dot(ffi::ThreadPool threads, Any w, S32 layer, F32 x, ResultF32 y) {
  const auto shape = stack(w.dimensions(), 3);
  if (ffi::Error error = check(span(shape), layer, x.dimensions(), y->dimensions()); error.failure()) return error;
  const auto* data = static_cast<const char*>(w.untyped_data());
  const int64_t at = layer_of(layer, shape[0]) * shape[1] * shape[2];
  jllama::Product p{nullptr, x.typed_data(), y->typed_data(), shape[1], x.dimensions()[0], shape[2]};
  XlaPool pool(threads);
  if (w.element_type() == ffi::DataType::F32) {
    p.w = data + at * 4;
    jllama::dot_float32(pool, kernels(), p);
  } else if (w.element_type() == ffi::DataType::BF16) {
    p.w = data + at * 2;
    jllama::dot_bfloat16(pool, kernels(), p);
  } else {
    return ffi::Error::InvalidArgument("jllama: w is of another dtype: expected float32 or bfloat16");
  }
  return ffi::Error::Success();
}

// What each kind of groups is made of: bits of values and high, elements that share a d, whether there are scales, m, and
// the bytes of a d.
struct GroupShape {
  int64_t bits, high_bits, share;
  bool scales, m;
  size_t d;
};
constexpr GroupShape kGroupShapes[jllama::kGroupKinds] = {
    {8, 0, 32, false, false, 2}, {4, 0, 32, false, false, 2}, {4, 0, 32, false, true, 2},
    {4, 1, 32, false, false, 2}, {4, 1, 32, false, true, 2},  {4, 0, 256, true, true, 2},
    {4, 1, 256, true, true, 2},  {4, 2, 256, true, false, 2}, {8, 0, 32, false, true, 2},
    {8, 0, 32, false, false, 4}};

ffi::Error dot_groups(ffi::ThreadPool threads, Any values, Any high, Any scales, Any mins, Any d,
                      ffi::Buffer<ffi::F16> m, S32 layer, F32 x, int64_t kind, bool fine, ResultF32 y) {
  if (kind < 0 || kind >= jllama::kGroupKinds)
    return ffi::Error::InvalidArgument("jllama: groups of kind " + std::to_string(kind) + ": expected 0 to 9");
  const GroupShape& shape = kGroupShapes[kind];
  const int64_t group = jllama::group_of(static_cast<jllama::GroupKind>(kind));
  const auto vs = stack(values.dimensions(), 3);
  if (vs.size() != 3 || vs[0] < 1) return wrong("values", "[L, out, bytes]", values.dimensions());
  const std::vector<int64_t> w{vs[0], vs[1], vs[2] * 8 / shape.bits};
  if (ffi::Error error = check(span(w), layer, x.dimensions(), y->dimensions()); error.failure()) return error;
  const int64_t in = w[2];
  if (in % shape.share) return wrong("x", "a multiple of " + std::to_string(shape.share) + " columns", x.dimensions());
  const auto at = layer_of(layer, w[0]);
  const auto part = [&](const char* name, const auto& buffer, bool there, int64_t columns, size_t bytes,
                        const void** data) -> ffi::Error {
    if (!there) return ffi::Error::Success();
    if (!is(span(stack(buffer.dimensions(), 3)), {w[0], w[1], columns}))
      return wrong(name, shape_of({w[0], w[1], columns}), buffer.dimensions());
    if (ffi::ByteWidth(buffer.element_type()) != bytes)
      return ffi::Error::InvalidArgument(std::string("jllama: ") + name + " is of another dtype");
    *data = static_cast<const char*>(buffer.untyped_data()) + at * w[1] * columns * bytes;
    return ffi::Error::Success();
  };
  jllama::ProductGroups p{};
  const void* parts[6] = {};
  for (const ffi::Error& error :
       {part("values", values, true, vs[2], 1, &parts[0]),
        part("high", high, shape.high_bits, in * shape.high_bits / 8, 1, &parts[1]),
        part("scales", scales, shape.scales, in / group, 1, &parts[2]),
        part("mins", mins, shape.scales && shape.m, in / group, 1, &parts[3]),
        part("d", d, true, in / shape.share, shape.d, &parts[4]), part("m", m, shape.m, in / shape.share, 2, &parts[5])})
    if (error.failure()) return error;
  const auto bytes = [&](int i) { return static_cast<const uint8_t*>(parts[i]); };
  const auto halves = [&](int i) { return static_cast<const uint16_t*>(parts[i]); };
  p.w = {bytes(0), bytes(1), bytes(2), bytes(3), halves(4), halves(5)};
  p.y = y->typed_data();
  p.out = w[1], p.rows = x.dimensions()[0], p.in = in;
  XlaPool pool(threads);
  jllama::dot_groups(pool, kernels(), static_cast<jllama::GroupKind>(kind), p, x.typed_data(), fine);
  return ffi::Error::Success();
}

ffi::Error attend(ffi::ThreadPool threads, F32 q, F32 new_k, F32 new_v, Any, Any, S32 first, S32 layer, int64_t window,
                  float scale, ResultF32 out, ffi::Result<Any> k, ffi::Result<Any> v) {
  const auto qs = q.dimensions();
  const auto cs = stack(k->dimensions(), 4);
  if (qs.size() != 4) return wrong("q", "[B, T, N, H]", qs);
  const int64_t b = qs[0], t = qs[1], n = qs[2], h = qs[3];
  const auto ks = new_k.dimensions();
  if (ks.size() != 4 || !is(ks, {b, t, ks[2], h}) || ks[2] < 1 || n % ks[2] != 0)
    return wrong("k", "[B, T, K, H] with the B, T and H of q, whose heads are a multiple of K", ks);
  const int64_t n_kv = ks[2];
  if (!is(new_v.dimensions(), {b, t, n_kv, h})) return wrong("v", "that of k", new_v.dimensions());
  if (cs.size() != 4 || cs[0] < 1 || cs[1] != b * n_kv || cs[3] != h) return wrong("k_cache", "[L, B*K, S, H]", k->dimensions());
  if (stack(v->dimensions(), 4) != cs) return wrong("v_cache", "that of k_cache", v->dimensions());
  if (cs[2] < t) return wrong("k_cache", "at least " + std::to_string(t) + " slots", k->dimensions());
  if (!is(first.dimensions(), {b})) return wrong("first", "[B]", first.dimensions());
  if (layer.element_count() != 1) return wrong("layer", "one number", layer.dimensions());
  if (!is(out->dimensions(), {b, t, n, h})) return wrong("out", "that of q", out->dimensions());
  if (window < 1)
    return ffi::Error::InvalidArgument("jllama: the window is " + std::to_string(window) + ": expected 1 or more");
  const auto dtype = k->element_type();
  if (v->element_type() != dtype || (dtype != ffi::DataType::F32 && dtype != ffi::DataType::BF16))
    return ffi::Error::InvalidArgument(
        "jllama: the caches are of other dtypes: expected float32 or bfloat16, both the same");
  if (q.element_count() == 0) return ffi::Error::Success();

  jllama::Attention a{};
  a.q = q.typed_data();
  a.bfloat16 = dtype == ffi::DataType::BF16;
  a.out = out->typed_data();
  a.tokens = t, a.heads = n, a.key_heads = n_kv, a.slots = cs[2], a.width = h;
  a.window = window, a.scale = scale;
  const int64_t at = layer_of(layer, cs[0]) * cs[1] * cs[2] * cs[3] * (a.bfloat16 ? 2 : 4);
  XlaPool pool(threads);
  jllama::attend(pool, kernels(), a, {new_k.typed_data(), new_v.typed_data(), first.typed_data(), b},
                 static_cast<char*>(k->untyped_data()) + at, static_cast<char*>(v->untyped_data()) + at);
  return ffi::Error::Success();
}

}  // namespace

// The sources of this library, by their hash: another one is not used.
extern "C" const char* jllama_source() { return JLLAMA_SOURCE; }

extern "C" int jllama_ffi_major() { return XLA_FFI_API_MAJOR; }
extern "C" int jllama_ffi_minor() { return XLA_FFI_API_MINOR; }

// Chooses the best kernels for this processor, of instruction sets up to one of the name, if it is not empty. Returns
// whether there is one of that name.
extern "C" int jllama_choose(const char* last) {
  for (int i = jllama::kInstructionSetCount - 1; i >= 0; --i)
    if (!*last || jllama::kInstructionSets[i].name == std::string(last)) {
      chosen = jllama::kernels_up_to(jllama::kInstructionSets[i]);
      return 1;
    }
  return 0;
}

// Name i of the instruction sets, from the plainest on, null behind the last; and whether this processor has it.
extern "C" const char* jllama_instruction_set(int i) {
  return i < jllama::kInstructionSetCount ? jllama::kInstructionSets[i].name : nullptr;
}
extern "C" int jllama_supported(int i) { return jllama::kInstructionSets[i].supported(); }

// Which instruction set the kernels in use are of: those of float32, bfloat16, groups and attention, by number.
extern "C" int jllama_used(int i) {
  return chosen.sets[i];
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jllama_dot, dot,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()    // w [L, out, in], float32 or bfloat16
                                  .Arg<S32>()    // layer
                                  .Arg<F32>()    // x [rows, in]
                                  .Ret<F32>());  // y [rows, out]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jllama_dot_groups, dot_groups,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()                     // values, and the other parts of Groups in kernels.h,
                                  .Arg<Any>()                     // each [L, out, n]; any shape where a kind lacks them
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<ffi::Buffer<ffi::F16>>()
                                  .Arg<S32>()                     // layer
                                  .Arg<F32>()                     // x [rows, in]
                                  .Attr<int64_t>("kind")          // GroupKind
                                  .Attr<bool>("fine")             // whether x is rounded in two steps
                                  .Ret<F32>());                   // y [rows, out]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jllama_attend, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()               // q [B, T, N, H]
                                  .Arg<F32>()               // new k [B, T, K, H]
                                  .Arg<F32>()               // new v, the same
                                  .Arg<Any>()               // k [L, B*K, S, H], float32 or bfloat16
                                  .Arg<Any>()               // v, the same
                                  .Arg<S32>()               // first [B]
                                  .Arg<S32>()               // layer
                                  .Attr<int64_t>("window")  // how many slots up to its own a token sees
                                  .Attr<float>("scale")     // of the scores
                                  .Ret<F32>()               // [B, T, N, H]
                                  .Ret<Any>()               // k in its own memory
                                  .Ret<Any>());             // v in its own memory
