// The kernels for x86-64 processors with AVX-512 (F, BW, DQ, VL).

#include "vector_avx512.h"

#include "attention.h"

jllama::Kernels jllama::avx512_kernels() {
  return {dot<Plain<float, float>>, nullptr, nullptr, round_bfloat16, round_int8, attend_any, merge, finish};
}
