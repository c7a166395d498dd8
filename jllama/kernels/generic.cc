// The kernels for any processor.

#include "vector_generic.h"

#include "attention.h"

namespace {

typedef int8_t Bytes __attribute__((vector_size(8)));
typedef int16_t Words __attribute__((vector_size(16)));

// Two products of bytes fit into 16 bits: weights are within -128 .. 127 and x within -127 .. 127.
struct Int8 : Integers<16> {
  using Sum = Vector::Int;
  struct Pair {
    Words low, high;
  };
  static Vector::Int zero() { return Vector::Int{}; }
  static Pair weight(const int8_t* p) { return weight(p, kWidth); }
  static Pair weight(const int8_t* p, int64_t n) {
    Bytes parts[2] = {};
    std::memcpy(parts, p, n);
    return {__builtin_convertvector(parts[0], Words), __builtin_convertvector(parts[1], Words)};
  }
  static Pair element(const int8_t* p) { return weight(p); }
  static Pair element(const int8_t* p, int64_t n) { return weight(p, n); }
  static Vector::Int add(Vector::Int sum, Pair w, Pair x) {
    const Words products = w.low * x.low + w.high * x.high;
    return sum + ((Vector::Int)products >> 16) + ((Vector::Int)products << 16 >> 16);
  }
  static void totals(const Vector::Int* sum, int32_t* to) {
    for (int o = 0; o < kOutputs; ++o) to[o] = (sum[o][0] + sum[o][1]) + (sum[o][2] + sum[o][3]);
  }
};

}  // namespace

void jllama::add_generic(Kernels& kernels) {
  add_plain(kernels);
  kernels.dot_int8 = ::dot_int8<Int8>;
}
