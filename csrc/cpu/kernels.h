// What the CPU ops call for one chunk, in one version for each instruction set.
#pragma once

#include <type_traits>

#include "../common/element.h"
#include "../common/functors.h"
#include "../common/planner.h"

namespace amp_wrapper::cpu {

// Elements of one parameter with all that an update reads and writes.
struct Piece {
  Type grad_type;
  const void* grad;
  Type param_type;
  void* param;
  // null for none
  Type partner_type;
  void* partner;
  // moments of Adam (and their maxima), momentum of SGD; null for what there is not
  Type state_types[3];
  void* states[3];
  std::int64_t count;
};

// Pointers need no alignment. `streams`: the target is written around the caches where it is aligned.
// `count` is at most kChunk where a sum is formed or elements are counted, and anything otherwise.
struct Kernels {
  // target = source * factor; returns whether a source element is not finite, where `checks` asks for it
  bool (*scale)(Type source_type, const void* source, Type target_type, void* target, std::int64_t count, float factor,
                bool checks, bool streams);
  // the same without a product, bit for bit where the types are equal
  void (*copy)(Type source_type, const void* source, Type target_type, void* target, std::int64_t count, bool streams);
  // target = x * a + y * b; bit 0 of the result: an x is not finite, bit 1: a y
  int (*axpby)(Type x_type, const void* x, Type y_type, const void* y, Type target_type, void* target, std::int64_t count,
               Axpby function, bool checks, bool streams);
  // the sum of squares in the order of planner.h; sets *nonfinite, or leaves it
  float (*sum_of_squares)(Type type, const void* data, std::int64_t count, bool* nonfinite);
  // the largest magnitude as an integer, above kExponent where there is a NaN
  std::int32_t (*largest)(Type type, const void* data, std::int64_t count);
  // adds the elements of each column, see functors.h; returns the largest finite magnitude as an integer
  std::int32_t (*exponents)(Type type, const void* data, std::int64_t count, std::uint32_t* columns);
  // master = weight where the weight is not the rounded master, bit for bit; returns whether there was one
  bool (*refresh)(Type weight_type, const void* weight, float* master, std::int64_t count);
  // scale and sum_of_squares of the source in one pass
  float (*scale_and_sum)(Type source_type, const void* source, Type target_type, void* target, std::int64_t count, float factor,
                         bool streams, bool* nonfinite);
  // one step of an optimizer; not called where the decision is to skip it
  void (*adam)(const Piece& piece, const float* row, const float* decision);
  void (*sgd)(const Piece& piece, const float* row, const float* decision);
};

extern const Kernels kDefault;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace amp_wrapper::cpu
