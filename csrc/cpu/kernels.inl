// The kernels of one instruction set, for the vectors of vector.inl, and the table of them.

namespace {

// Calls `body` with a null pointer of the element type that a value names.
template <typename F>
inline auto with_type(Type type, F body) {
  switch (type) {
    case Type::kHalf:
      return body(static_cast<Half*>(nullptr));
    case Type::kBfloat:
      return body(static_cast<Bfloat*>(nullptr));
    default:
      return body(static_cast<float*>(nullptr));
  }
}

// Calls `body` with a constant of the value.
template <typename F>
inline auto with_flag(bool value, F body) {
  return value ? body(std::true_type()) : body(std::false_type());
}

// Lines of 64 bytes that four vectors of an element type take.
template <typename T>
inline void fetch_four(const T* from) {
  constexpr int kLines = 4 * kWidth * sizeof(T) / 64;
  for (int k = 0; k < (kLines > 0 ? kLines : 1); ++k) fetch_ahead(from + k * (64 / sizeof(T)));
}

}  // namespace

#include "elementwise.inl"
#include "exponents.inl"
#include "norms.inl"
#include "step.inl"

namespace amp_wrapper::cpu {
const Kernels AMP_TABLE = {scale, copy, axpby, sum_of_squares, largest, exponents, refresh, scale_and_sum, adam, sgd};
}
