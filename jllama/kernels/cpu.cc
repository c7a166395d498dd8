// Which instruction sets there are, and which of them this processor has.

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace jllama {
namespace {

bool always() { return true; }

#if defined(__x86_64__)

// Not every compiler knows the names of these features: bit `bit` of EAX (register 0) or ECX (2) of a leaf.
bool feature(unsigned leaf, unsigned subleaf, int which, int bit) {
  unsigned registers[4];
  return __get_cpuid_count(leaf, subleaf, &registers[0], &registers[1], &registers[2], &registers[3]) &&
         (registers[which] >> bit & 1);
}

// __builtin_cpu_supports asks the system too, which must save the registers.
bool avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && feature(1, 0, 2, 29); }

bool avx512() {
  return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool avx_vnni() { return avx2() && feature(7, 1, 0, 4); }
bool avx512_vnni() { return avx512() && feature(7, 0, 2, 11); }
bool avx512_bf16() { return avx512() && feature(7, 1, 0, 5); }

#elif defined(__aarch64__)

bool dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}

#endif

}  // namespace

const InstructionSet kInstructionSets[] = {
    {"generic", always, add_generic},
#if defined(__x86_64__)
    {"avx2", avx2, add_avx2},
    {"avx_vnni", avx_vnni, add_avx_vnni},
    {"avx512", avx512, add_avx512},
    {"avx512_vnni", avx512_vnni, add_avx512_vnni},
    {"avx512_bf16", avx512_bf16, add_avx512_bf16},
#elif defined(__aarch64__)
    {"neon", always, add_neon},
    {"dotprod", dotprod, add_neon_dotprod},
#endif
};
const int kInstructionSetCount = sizeof(kInstructionSets) / sizeof(kInstructionSets[0]);

Kernels kernels_up_to(const InstructionSet& last) {
  Kernels kernels{};
  for (const InstructionSet* set = kInstructionSets; set <= &last; ++set) {
    if (!set->supported()) continue;
    const Kernels before = kernels;
    set->add(kernels);
    const bool changed[] = {kernels.dot_float32 != before.dot_float32, kernels.dot_bfloat16 != before.dot_bfloat16,
                            kernels.dot_groups[0] != before.dot_groups[0], kernels.attend != before.attend};
    for (int i = 0; i < 4; ++i)
      if (changed[i]) kernels.sets[i] = static_cast<int>(set - kInstructionSets);
  }
  return kernels;
}

}  // namespace jllama
