// Runs cases from a file through the kernels of each instruction set that the processor has, with one thread and with
// three, without XLA: for sanitizers and emulators. test_harness.py writes the cases and compiles this.
//
// A case is a list of int64: its kind, and what run() reads; then arrays, each an int64 of bytes and its data. The last
// two arrays are float32: the right values, and how far off a result may be.

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include "kernels.h"

namespace {

struct Threads : jllama::Pool {
  explicit Threads(int64_t n) : n_(n) {}
  int64_t threads() const override { return n_; }
  void run(int64_t n, const std::function<void(int64_t)>& task) override {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      for (int64_t i; (i = next.fetch_add(1)) < n;) task(i);
    };
    std::vector<std::thread> helpers;
    for (int64_t i = 1; i < n_; ++i) helpers.emplace_back(work);
    work();
    for (std::thread& helper : helpers) helper.join();
  }
  int64_t n_;
};

using Bytes = std::vector<char>;

struct Case {
  std::vector<int64_t> sizes;
  std::vector<Bytes> arrays;
};

template <class T>
T* data(Bytes& bytes) {
  return reinterpret_cast<T*>(bytes.data());
}

std::vector<float> run(const jllama::Kernels& kernels, int64_t threads, Case c) {
  Threads pool(threads);
  const auto& s = c.sizes;
  auto& a = c.arrays;
  std::vector<float> y(a.back().size() / sizeof(float), NAN);
  if (s[0] == 0 || s[0] == 1) {  // out, rows, in; w, x
    jllama::Product p{a[0].data(), a[1].data(), y.data(), s[1], s[2], s[3]};
    (s[0] == 0 ? jllama::dot_float32 : jllama::dot_bfloat16)(pool, kernels, p);
  } else if (s[0] == 2) {  // out, rows, in, kind, fine; the parts of the groups, x
    jllama::ProductGroups p{};
    p.w = {data<uint8_t>(a[0]), data<uint8_t>(a[1]),  data<uint8_t>(a[2]),
           data<uint8_t>(a[3]), data<uint16_t>(a[4]), data<uint16_t>(a[5])};
    p.y = y.data();
    p.out = s[1], p.rows = s[2], p.in = s[3];
    jllama::dot_groups(pool, kernels, static_cast<jllama::GroupKind>(s[4]), p, data<float>(a[6]), s[5]);
  } else {  // B, T, N, K, S, H, window, bfloat16; q, k, v, the caches, first; the scale of the scores is 0.3
    jllama::Attention t{};
    t.q = data<float>(a[0]), t.out = y.data();
    t.tokens = s[2], t.heads = s[3], t.key_heads = s[4], t.slots = s[5], t.width = s[6], t.window = s[7];
    t.bfloat16 = s[8], t.scale = 0.3f;
    jllama::attend(pool, kernels, t, {data<float>(a[1]), data<float>(a[2]), data<int32_t>(a[5]), s[1]}, a[3].data(),
                   a[4].data());
  }
  return y;
}

int64_t number(std::istream& in) {
  int64_t x = 0;
  in.read(reinterpret_cast<char*>(&x), sizeof(x));
  return x;
}

}  // namespace

int main(int, char** arguments) {
  std::ifstream in(arguments[1], std::ios::binary);
  int wrong = 0, cases = 0;
  while (in.peek() != EOF) {
    Case c;
    c.sizes.resize(number(in));
    for (int64_t& size : c.sizes) size = number(in);
    c.arrays.resize(number(in));
    for (Bytes& bytes : c.arrays) {
      bytes.resize(number(in));
      in.read(bytes.data(), bytes.size());
    }
    Bytes may = c.arrays.back();
    c.arrays.pop_back();
    ++cases;
    for (int i = 0; i < jllama::kInstructionSetCount; ++i) {
      const jllama::InstructionSet& set = jllama::kInstructionSets[i];
      if (!set.supported()) continue;
      const jllama::Kernels kernels = jllama::kernels_up_to(set);
      const std::vector<float> y = run(kernels, 1, c), again = run(kernels, 3, c);
      bool right = !y.empty() && std::memcmp(y.data(), again.data(), y.size() * sizeof(float)) == 0;
      for (size_t j = 0; j < y.size(); ++j)
        right &= std::fabs(y[j] - data<float>(c.arrays.back())[j]) <= data<float>(may)[j];
      if (right) continue;
      ++wrong;
      std::printf("case %d, kind %d: wrong with %s\n", cases, static_cast<int>(c.sizes[0]), set.name);
    }
  }
  std::printf("%d cases,", cases);
  for (int i = 0; i < jllama::kInstructionSetCount; ++i)
    if (jllama::kInstructionSets[i].supported()) std::printf(" %s", jllama::kInstructionSets[i].name);
  std::printf("\n");
  return wrong || !cases;
}
