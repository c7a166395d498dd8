// The kernels for any processor.

#include "vector_generic.h"

#include "attention.h"
#include "groups.h"

namespace {

typedef int8_t Bytes __attribute__((vector_size(8)));
typedef int16_t Words __attribute__((vector_size(16)));

// Two products of bytes fit into 16 bits: weights are within -128 .. 127 and x within -127 .. 127.
struct Int8 {
  struct Pair {
    Words low, high;
  };
  static Pair load(const int8_t* p) {
    Bytes parts[2];
    std::memcpy(parts, p, sizeof(parts));
    return {__builtin_convertvector(parts[0], Words), __builtin_convertvector(parts[1], Words)};
  }
  static Vector::Int add(Vector::Int sum, Pair w, Pair x) {
    const Words products = w.low * x.low + w.high * x.high;
    return sum + ((Vector::Int)products >> 16) + ((Vector::Int)products << 16 >> 16);
  }
};

// Bytes in groups, unpacked: see groups.h.
struct GroupBytes {
  struct Bytes {
    int8_t at[32];
  };
  struct Scales {
    float at[Vector::kWidth];
  };
  static constexpr int64_t kSpan = 32;
  static constexpr int32_t kRaised = 0;

  static Bytes nibbles(const uint8_t* p) {
    Bytes to;
    for (int j = 0; j < 16; ++j) to.at[j] = p[j] & 15, to.at[j + 16] = p[j] >> 4;
    return to;
  }
  static Bytes fifth(Bytes low, const uint8_t* p) {
    for (int j = 0; j < 32; ++j) low.at[j] |= (p[j / 8] >> (j % 8) & 1) << 4;
    return low;
  }
  static Bytes sixth(Bytes low, const uint8_t* p) {
    for (int j = 0; j < 32; ++j) low.at[j] |= (p[j % 8] >> (j / 8 * 2) & 3) << 4;
    return low;
  }
  static Bytes int8(const uint8_t* p) {
    Bytes to;
    std::memcpy(to.at, p, sizeof(to.at));
    return to;
  }

  // The exponent grows from 5 bits to 8; multiplying makes numbers of what has none.
  static float half(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, size = static_cast<uint32_t>(x & 0x7fff) << 13;
    float to;
    std::memcpy(&to, &size, sizeof(to));
    to *= 5.192296858534828e33f;  // 2^112
    uint32_t bits;
    std::memcpy(&bits, &to, sizeof(bits));
    bits |= sign | ((x & 0x7c00) == 0x7c00 ? 0x7f800000 : 0);
    std::memcpy(&to, &bits, sizeof(to));
    return to;
  }
  static Vector::Float halves(const uint16_t* p) { return Vector::Float{half(p[0]), half(p[1]), half(p[2]), half(p[3])}; }
  template <bool is_signed>
  static Vector::Float bytes(const uint8_t* p) {
    float each[Vector::kWidth];
    for (int i = 0; i < Vector::kWidth; ++i) each[i] = is_signed ? static_cast<int8_t>(p[i]) : p[i];
    return Vector::load(each);
  }
  static Scales scales(Vector::Float x) {
    Scales to;
    Vector::store(to.at, x);
    return to;
  }

  template <int64_t group>
  static Vector::Float add(Vector::Float sum, const Bytes& u, const int8_t* x, const Scales& scales, int64_t span) {
    for (int64_t g = 0; g < kSpan / group; ++g) {
      Vector::Int products{};
      for (int64_t i = g * group; i < (g + 1) * group; i += 16)
        products = Int8::add(products, Int8::load(u.at + i), Int8::load(x + i));
      sum += __builtin_convertvector(products, Vector::Float) * scales.at[span * (kSpan / group) + g];
    }
    return sum;
  }
};

}  // namespace

void jllama::add_generic(Kernels& kernels) {
  add_plain(kernels);
  add_groups<GroupBytes>(kernels);
}
