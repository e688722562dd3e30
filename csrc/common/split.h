// A float as a 16-bit weight and a 16-bit remainder, and back; described in amp_wrapper/ops/split.py.
//
// Templates alone, over a policy M: one float (Single in step_prologue.h) or a vector of them (vector.inl). M has the types
// Floats, Ints and Words of one width, and half_bits and half_floats, which convert between float and float16. A weight stands
// in the low half of an int, a remainder is an int with its sign. Included after an instruction set is switched on, they are
// code for it; M then has internal linkage, and so have they.
#pragma once

#include "element.h"

namespace amp_wrapper {

template <typename M>
struct Parts {
  typename M::Ints weight;
  typename M::Ints remainder;
};

// Where float16 becomes subnormal, as the bits of a float.
constexpr std::int32_t kSmall = 0x38800000;

template <typename M>
AMP_INLINE Parts<M> split_master(typename M::Floats master, const Bfloat*) {
  using Ints = typename M::Ints;
  using Words = typename M::Words;
  const Ints bits = M::bits(master);
  const Ints zero = M::all(0);
  const auto nan = (bits & kMagnitude) > kExponent;
  // half away from zero: the remainder tells from which side a tie came
  const Ints upper = (Ints)(((Words)bits + 0x8000u) >> 16);
  const Ints quiet = (Ints)(((Words)bits >> 16) & 0x8000u) | 0x7fc0;
  const Ints lower = (Ints)((Words)bits << 16) >> 16;
  return {nan ? quiet : upper, nan ? zero : lower};
}

template <typename M>
AMP_INLINE typename M::Floats join_master(typename M::Ints weight, typename M::Ints remainder, const Bfloat*) {
  using Ints = typename M::Ints;
  using Words = typename M::Words;
  const Ints near = (Ints)((Words)weight << 16);
  const Ints joined = (Ints)((Words)near + (Words)remainder);
  // of a NaN, or of a zero or infinity that somebody wrote beside the remainder of another number
  const auto nan = (joined & kMagnitude) > kExponent;
  return M::floats(nan ? near : joined);
}

template <typename M>
AMP_INLINE Parts<M> split_master(typename M::Floats master, const Half*) {
  using Floats = typename M::Floats;
  using Ints = typename M::Ints;
  using Words = typename M::Words;
  const Ints bits = M::bits(master);
  const Ints zero = M::all(0);
  const Ints magnitude = bits & kMagnitude;
  const auto nan = magnitude > kExponent;
  const Ints rounded = M::half_bits(master);
  const Ints quiet = (Ints)(((Words)bits >> 16) & 0x8000u) | 0x7e00;
  const Ints near = M::bits(M::half_floats(rounded));
  // in magnitudes: a remainder below zero says that the master is nearer to zero than its weight
  const Floats distance = M::floats(magnitude) - M::floats(near & kMagnitude);
  // a sum with 1.5 * 2^23 rounds to a whole number, ties to even, and shows it in its low bits
  const Floats whole = distance * 0x1p39f + 12582912.0f;
  const Ints units = (Ints)((Words)M::bits(whole) - 0x4b400000u);
  const Ints delta = magnitude < kSmall ? units : bits - near;
  return {nan ? quiet : rounded, (near & kMagnitude) < kExponent ? delta : zero};
}

template <typename M>
AMP_INLINE typename M::Floats join_master(typename M::Ints weight, typename M::Ints remainder, const Half*) {
  using Floats = typename M::Floats;
  using Ints = typename M::Ints;
  const Ints near = M::bits(M::half_floats(weight));
  const Ints magnitude = near & kMagnitude;
  // 2^-14 itself is the weight of masters on both sides
  const auto small = magnitude + (remainder >> 31) < kSmall;
  const Floats sum = M::floats(magnitude) + M::to_floats(remainder) * 0x1p-39f;
  const Ints counted = (M::bits(sum) & kMagnitude) | (near & ~kMagnitude);
  const Ints finite = small ? counted : near + remainder;
  return M::floats(magnitude < kExponent ? finite : near);
}

}  // namespace amp_wrapper
