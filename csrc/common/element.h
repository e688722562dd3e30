// The element types of the ops, and what each is as a float. Read by g++ and by nvcc; knows nothing of torch.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define AMP_INLINE __host__ __device__ __forceinline__
#else
#define AMP_INLINE inline
#endif

namespace amp_wrapper {

// kShort is the remainder of a split master (split.h), and of no meaning to other ops.
enum class Type : std::uint8_t { kFloat = 0, kHalf = 1, kBfloat = 2, kShort = 3 };

// Own structs: kernels move bits and compute in float, so torch's and CUDA's classes are not needed.
struct Half {
  std::uint16_t bits;
};
struct Bfloat {
  std::uint16_t bits;
};

AMP_INLINE constexpr int size_of(Type type) { return type == Type::kFloat ? 4 : 2; }

// Elements in memory; null for a list that has none here.
struct Operand {
  char* data;
  Type type;

  AMP_INLINE char* at(std::int64_t element) const { return data + element * size_of(type); }
};

// All bits of the exponent set: infinite or NaN. Masks are signed, since AVX compares signed integers.
constexpr std::int32_t kExponent = 0x7f800000;
constexpr std::int32_t kMagnitude = 0x7fffffff;

AMP_INLINE std::uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

AMP_INLINE float float_of(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

// The magnitude as an integer: it orders numbers as they are ordered, infinity above them and NaN above infinity.
AMP_INLINE std::int32_t magnitude_of(float value) { return static_cast<std::int32_t>(bits_of(value)) & kMagnitude; }
AMP_INLINE bool is_nonfinite(float value) { return magnitude_of(value) >= kExponent; }

AMP_INLINE float to_float(float value) { return value; }

AMP_INLINE float to_float(Bfloat value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }

AMP_INLINE float to_float(Half value) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(value.bits));
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest < 0x0400u) {
    // zero and subnormal numbers are multiples of 2^-24, all exact in float
    return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));
  }
  return float_of(sign | ((rest << 13) + 0x38000000u));
#endif
}

template <typename T>
AMP_INLINE T from_float(float value);

template <>
AMP_INLINE float from_float<float>(float value) {
  return value;
}

// to nearest, ties to even; any NaN becomes a quiet one
template <>
AMP_INLINE Bfloat from_float<Bfloat>(float value) {
  const std::uint32_t bits = bits_of(value);
  if (magnitude_of(value) > kExponent) return Bfloat{0x7fc0u};
  return Bfloat{static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
AMP_INLINE Half from_float<Half>(float value) {
#if defined(__CUDA_ARCH__)
  return Half{__half_as_ushort(__float2half_rn(value))};
#else
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  std::uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return Half{static_cast<std::uint16_t>(sign | 0x7e00u)};
  // 65520 lies halfway between the largest number and what would be the next, and the tie goes to infinity
  if (rest >= 0x477ff000u) return Half{static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (rest < 0x38800000u) {
    // below 2^-14 the result counts multiples of 2^-24, which is the unit in the last place of a float in [0.5, 1)
    const std::uint32_t shifted = bits_of(float_of(rest) + 0.5f);
    return Half{static_cast<std::uint16_t>(sign | (shifted - 0x3f000000u))};
  }
  rest += 0x00000fffu + ((rest >> 13) & 1u) - 0x38000000u;
  return Half{static_cast<std::uint16_t>(sign | (rest >> 13))};
#endif
}

}  // namespace amp_wrapper
