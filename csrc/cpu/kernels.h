// What the CPU ops call for one chunk, in one version for each instruction set.
#pragma once

#include "../common/element.h"
#include "../common/functors.h"
#include "../common/planner.h"
#include "../common/step_lists.h"

namespace amp_wrapper::cpu {

// Operands need no alignment; types are told apart at run time. `count` is at most kChunk.
struct Kernels {
  // target = source * factor; returns whether a source element is not finite. `streams`: a float32 target is written around the
  // caches
  bool (*scale)(Operand source, Operand target, std::int64_t count, float factor, bool streams);
  // y = x * a + y * b; returns whether an x is not finite
  bool (*axpby)(Operand x, Operand y, std::int64_t count, Axpby function);
  bool (*has_nonfinite)(Operand data, std::int64_t count);
  // in the order of planner.h; sets *nonfinite, or leaves it
  float (*sum_of_squares)(Operand data, std::int64_t count, bool* nonfinite);
  // one step of an optimizer, for the lists of step_lists.h; not called where the decision is to skip it
  void (*adam)(const Operand* lists, std::int64_t count, const float* row, const float* decision);
  void (*sgd)(const Operand* lists, std::int64_t count, const float* row, const float* decision);
};

extern const Kernels kDefault;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace amp_wrapper::cpu
