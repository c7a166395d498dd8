// What the parts of the kernels say to each other: what is to be done, and the functions that an instruction set has.

#pragma once

#include <cstdint>
#include <functional>

namespace jllama {

// Threads that share work.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual int64_t threads() const = 0;
  // Runs task(0) .. task(n - 1) in any order and on any thread, and returns when all are done.
  virtual void run(int64_t n, const std::function<void(int64_t)>& task) = 0;
};

struct Span {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// y [rows, out] = x [rows, in] times w [out, in] transposed.
struct Product {
  const void* w;
  const void* x;  // rounded already to what w is multiplied with
  float* y;
  int64_t out, rows, in;
};

// Weights in groups, as GGUF has them: u a number of a few bits, weight = a * u + b with an a and a b for each group.
// The parts of a matrix, each with an axis [out, ...] of its own:
struct Groups {
  const uint8_t* values;  // int8, or the low 4 bits: byte j of 16 has those of elements j and j + 16 of 32
  const uint8_t* high;    // the 5th bit: bit j of 4 bytes is that of element j of 32; or bits 5 and 6: bits 2i and
                          // 2i + 1 of byte j of 8 are those of element j + 8i of 32
  const uint8_t* scales;  // what a group's d is multiplied with, where 256 elements share a d
  const uint8_t* mins;    // the same of m
  const uint16_t* d;      // float16; of kQ80 float32, each in two of these
  const uint16_t* m;      // float16
};
enum GroupKind { kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K, kInt8, kQ80, kGroupKinds };

constexpr int64_t kPad = 512;  // rows of x in groups are filled up with zeros to a multiple of this

// y [rows, out] = x times weights in groups. x is int8 with a scale for each 32 elements, and has `each` rows for one of y,
// which are added up: where there are two, the second is what rounding left of the first.
struct ProductGroups {
  Groups w;
  const int8_t* x;        // [each * rows, padded]
  const float* x_scale;   // [each * rows, padded / group], group: 16 or 32, that of the weights
  const float* x_sum;     // [each * rows, padded / group], the sum of a group's elements, times its scale
  float* y;
  int64_t out, rows, in, padded;
  int each;
};

constexpr int64_t kPieceBytes = 4 << 10;  // of a row of x, multiplied at a time
constexpr int64_t kBlock = 128;           // slots of a cache, attended to at a time: they stay in a core's caches
constexpr int64_t kChunk = 4 * kBlock;    // slots whose attention is one partial result

// Attention of T new tokens a row, the first at slot first[b], to a cache that holds them already.
struct Attention {
  const float* q;  // [B, T, N, H]
  const void* k;   // [B*K, S, H], bfloat16 or float32
  const void* v;
  bool bfloat16;
  float* out;                                        // [B, T, N, H]
  int64_t tokens, heads, key_heads, slots, width;    // T, N, K, S, H
  int64_t window;                                    // how many slots up to its own a token sees
  float scale;                                       // of the scores

  int64_t group() const { return heads / key_heads; }
};

// The query rows of some tokens of one row and key head: row i is query head i % G of token tokens.begin + i / G.
struct Queries {
  int64_t row, key_head, first;  // first: the slot of token 0
  Span tokens;
};

// What some slots give a query row is a partial result: the largest score, the sum of the exponentials relative to
// it, and the sum of the values weighted with these. It takes 2 + H numbers.
struct Kernels {
  void (*dot_float32)(const Product&, Span outputs, Span rows);
  void (*dot_bfloat16)(const Product&, Span outputs, Span rows);
  // Rounds to bfloat16 what dot_bfloat16 takes, which is bfloat16_bytes wide.
  void (*round_bfloat16)(const float* x, int64_t n, void* to);
  int64_t bfloat16_bytes;
  void (*dot_groups[kGroupKinds])(const ProductGroups&, Span outputs, Span rows);
  // Rounds a row to int8 with a scale for each 32 elements; scales and sums are those of groups of `group`. `rest`, if
  // there is one, becomes what the rounding left.
  void (*round_groups)(const float* x, int64_t n, int64_t group, int8_t* to, float* scale, float* sum, float* rest);
  // Stores keys and values in a cache of bfloat16.
  void (*store_bfloat16)(const float* x, int64_t n, void* to);
  // The partial results of each query row and chunk `chunk` of the slots.
  void (*attend)(const Attention&, const Queries&, int64_t chunk, float* partial);
  // Adds partial results of `rows` query rows to those of the chunks before.
  void (*merge)(float* total, const float* partial, int64_t rows, int64_t width);
  // Writes what the queries' partial results of all chunks come to.
  void (*finish)(const Attention&, const Queries&, const float* total);
  // Which of the instruction sets products of float32, bfloat16 and groups and attention are of.
  int sets[4];
};

// An instruction set: what it adds stands in the place of what those before it do.
struct InstructionSet {
  const char* name;
  bool (*supported)();  // whether this processor has it, and all that it builds on
  void (*add)(Kernels&);
};

// Those of this kind of processor that were compiled, from the plainest on.
extern const InstructionSet kInstructionSets[];
extern const int kInstructionSetCount;

// The kernels of all instruction sets up to `last` that this processor has.
Kernels kernels_up_to(const InstructionSet& last);

void add_generic(Kernels&);
void add_avx2(Kernels&);
void add_avx_vnni(Kernels&);
void add_avx512(Kernels&);
void add_avx512_vnni(Kernels&);
void add_avx512_bf16(Kernels&);
void add_neon(Kernels&);
void add_neon_dotprod(Kernels&);

// The three products, over all threads.
void dot_float32(Pool&, const Kernels&, Product);
void dot_bfloat16(Pool&, const Kernels&, Product);  // x: float32

int64_t group_of(GroupKind);  // elements that share a scale
// `fine`: whether what rounding x leaves is rounded and multiplied too; x* and `each` are filled in here.
void dot_groups(Pool&, const Kernels&, GroupKind, ProductGroups, const float* x, bool fine);

// Writes new keys and values [B, T, K, H] to the caches at each row's slots, and attends.
struct NewTokens {
  const float* k;
  const float* v;
  const int32_t* first;  // [B]
  int64_t rows;          // B
};
void attend(Pool&, const Kernels&, Attention, const NewTokens&, void* k, void* v);

}  // namespace jllama
