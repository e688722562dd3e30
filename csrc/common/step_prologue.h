// The prologue of an optimizer step: whether it is taken, and what each parameter needs to know. Described in
// amp_wrapper/ops. The only place with double precision: a few numbers for each parameter.
#pragma once

#include <cmath>

#include "functors.h"
#include "optimizer_update.h"

namespace amp_wrapper {

constexpr int kHyper = 7;
enum class Kind : std::int32_t { kAdam = 0, kSgd = 1 };

// One float as what split.h and optimizer_update.h work on.
struct Single {
  using Floats = float;
  using Ints = std::int32_t;
  using Words = std::uint32_t;

  static AMP_INLINE float all(float value) { return value; }
  static AMP_INLINE std::int32_t all(std::int32_t value) { return value; }
  static AMP_INLINE std::int32_t bits(float value) { return static_cast<std::int32_t>(bits_of(value)); }
  static AMP_INLINE float floats(std::int32_t bits) { return float_of(static_cast<std::uint32_t>(bits)); }
  static AMP_INLINE float to_floats(std::int32_t value) { return static_cast<float>(value); }
  static AMP_INLINE std::int32_t half_bits(float value) { return from_float<Half>(value).bits; }
  static AMP_INLINE float half_floats(std::int32_t bits) { return to_float(Half{static_cast<std::uint16_t>(bits)}); }
#if defined(__CUDA_ARCH__)
  static AMP_INLINE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  static AMP_INLINE float divide(float a, float b) { return __fdiv_rn(a, b); }
  static AMP_INLINE float sqrt(float value) { return __fsqrt_rn(value); }
#else
  static AMP_INLINE float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
  static AMP_INLINE float divide(float a, float b) { return a / b; }
  static AMP_INLINE float sqrt(float value) { return std::sqrt(value); }
#endif
};

// Fractions of 62 bits, cut off after each product: powers of the betas are the same integers on every device.
constexpr std::int64_t kOne = std::int64_t{1} << 62;

AMP_INLINE std::int64_t product_of(std::int64_t a, std::int64_t b) {
  constexpr std::int64_t kLow = (std::int64_t{1} << 31) - 1;
  const std::int64_t a_high = a >> 31;
  const std::int64_t a_low = a & kLow;
  const std::int64_t b_high = b >> 31;
  const std::int64_t b_low = b & kLow;
  return a_high * b_high + ((a_high * b_low + a_low * b_high + (a_low * b_low >> 31)) >> 31);
}

AMP_INLINE std::int64_t power_of(std::int64_t base, std::int64_t exponent) {
  std::int64_t result = kOne;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result = product_of(result, base);
    base = product_of(base, base);
  }
  return result;
}

// 1 - beta ** count
AMP_INLINE double correction_of(double beta, std::int64_t count) {
  // betas that no constructor takes give something rather than wrap; NaN is 0
  const double whole = beta > 0.0 ? (beta < 1.0 ? beta : 1.0) : 0.0;
  const std::int64_t power = power_of(static_cast<std::int64_t>(whole * 0x1p62), count);
  return static_cast<double>(kOne - power) * 0x1p-62;
}

// The root of a number from 0 to 1, rounded once to float32, whatever root the device has.
AMP_INLINE float root_of(double value) {
  float root = static_cast<float>(sqrt(value));
  const float above = float_of(bits_of(root) + 1u);
  double middle = (static_cast<double>(root) + static_cast<double>(above)) * 0.5;
  if (value > middle * middle) root = above;
  const float below = root > 0.0f ? float_of(bits_of(root) - 1u) : root;
  middle = (static_cast<double>(root) + static_cast<double>(below)) * 0.5;
  return value < middle * middle ? below : root;
}

// How many steps were taken, as an integer that power_of() takes.
AMP_INLINE std::int64_t count_of(float steps) {
  // NaN is 0
  if (!(steps > 0.0f)) return 0;
  return static_cast<std::int64_t>(steps < 4294967040.0f ? steps : 4294967040.0f);
}

// The row of one parameter, and its step count, which grows where the step is taken; null for SGD, which needs none. `rate`
// stands in for the lr, or is null.
AMP_INLINE void fill_row(Kind kind, const double* hyper, const float* rate, float* steps, bool taken, float* row) {
  const double lr = rate == nullptr ? hyper[0] : static_cast<double>(*rate);
  for (int i = 0; i < kRow; ++i) row[i] = 0.0f;
  if (kind == Kind::kAdam) {
    *steps += taken ? 1.0f : 0.0f;
    const std::int64_t count = count_of(*steps);
    const double decay = hyper[4];
    row[kSign] = hyper[5] != 0.0 ? -1.0f : 1.0f;
    row[kDecay] = static_cast<float>(hyper[6] != 0.0 ? 1.0 - lr * decay : decay);
    row[kRest1] = static_cast<float>(1.0 - hyper[1]);
    row[kBeta2] = static_cast<float>(hyper[2]);
    row[kRest2] = static_cast<float>(1.0 - hyper[2]);
    row[kRoot] = root_of(correction_of(hyper[2], count));
    row[kEps] = static_cast<float>(hyper[3]);
    row[kRate] = static_cast<float>(-(lr / correction_of(hyper[1], count)));
    row[kDecoupled] = static_cast<float>(hyper[6]);
    return;
  }
  row[kSign] = hyper[5] != 0.0 ? -1.0f : 1.0f;
  row[kDecay] = static_cast<float>(hyper[4]);
  row[kMomentum] = static_cast<float>(hyper[1]);
  row[kRest] = static_cast<float>(1.0 - hyper[2]);
  row[kNesterov] = static_cast<float>(hyper[3]);
  row[kSgdRate] = static_cast<float>(-lr);
}

// The decision of one step. Pointers are null for what is not there.
struct Decide {
  const float* found_inf;
  const float* learned;
  const float* norm;
  float* scale;
  std::int32_t* growth_tracker;
  std::int32_t* hysteresis_tracker;
  std::int64_t* counts;
  ScaleUpdate rule;
  bool moves;
  bool clips;
  float max_norm;
  // infinite for none
  float clip_value;

  // What every parameter has to know. Reads nothing that operator() writes.
  AMP_INLINE bool skips() const { return found_inf != nullptr && *found_inf > 0.0f; }

  AMP_INLINE void operator()(float* decision) const {
    const float nothing = float_of(0x7fc00000u);
    const bool skip = skips();
    const float flag = skip ? 1.0f : 0.0f;
    const float signal = learned == nullptr ? flag : *learned;
    const float inverse = scale == nullptr ? 1.0f : Single::divide(1.0f, *scale);
    const float length = norm == nullptr ? 0.0f : *norm * inverse;
    float coefficient = 1.0f;
    if (norm != nullptr && clips) {
      coefficient = Single::divide(1.0f, length + 1e-6f) * max_norm;
      if (coefficient > 1.0f) coefficient = 1.0f;
    }
    decision[kSkip] = flag;
    decision[kInverse] = inverse;
    decision[kCoefficient] = coefficient;
    decision[kLimit] = clip_value;
    decision[kNorm] = norm == nullptr || skip ? nothing : length;
    if (moves) rule(scale, growth_tracker, hysteresis_tracker, signal);
    decision[kScale] = scale == nullptr ? nothing : *scale;
    if (counts != nullptr) {
      counts[0] += 1;
      counts[1] += skip ? 1 : 0;
      counts[2] = skip ? counts[2] + 1 : 0;
    }
    decision[kSkipped] = counts == nullptr ? 0.0f : static_cast<float>(counts[1]);
    decision[kInARow] = counts == nullptr ? 0.0f : static_cast<float>(counts[2]);
  }
};

}  // namespace amp_wrapper
