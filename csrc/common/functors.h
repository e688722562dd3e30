// The arithmetic of the ops, element by element. The CPU kernels apply it to vectors of floats and the CUDA kernels to
// floats: one source, compiled by both. Both compilers are told not to contract a product and a sum into one rounding, so
// the results are the same bits everywhere.
#pragma once

#include "element.h"

namespace amp_wrapper {

struct Scale {
  float factor;

  template <typename V>
  AMP_INLINE V operator()(V x) const {
    return x * factor;
  }
};

struct Axpby {
  float a;
  float b;

  template <typename V>
  AMP_INLINE V operator()(V x, V y) const {
    return x * a + y * b;
  }
};

// What a tensor gives to the square of its norm.
struct Square {
  template <typename V>
  AMP_INLINE V operator()(V x) const {
    return x * x;
  }
};

// The rule of the dynamic loss scale, once per optimizer step; described in amp_wrapper/engine/loss_scale.py.
struct ScaleUpdate {
  float growth_factor;
  float backoff_factor;
  float min_scale;
  float max_scale;
  std::int32_t growth_interval;
  std::int32_t hysteresis;

  AMP_INLINE void operator()(float* scale, std::int32_t* growth_tracker, std::int32_t* hysteresis_tracker,
                             float found_inf) const {
    const float now = *scale;
    if (found_inf > 0.0f) {
      const std::int32_t left = *hysteresis_tracker > 0 ? *hysteresis_tracker - 1 : 0;
      *hysteresis_tracker = left;
      *growth_tracker = 0;
      if (left > 0) return;
      float lowered = now * backoff_factor;
      if (lowered < min_scale) lowered = min_scale;
      // a floor above the present scale never raises it
      if (lowered < now) *scale = lowered;
      return;
    }
    *hysteresis_tracker = hysteresis;
    // compared before the addition, which could pass the largest integer
    const bool due = *growth_tracker >= growth_interval - 1;
    *growth_tracker = due ? 0 : *growth_tracker + 1;
    if (!due) return;
    float raised = now * growth_factor;
    if (raised > max_scale) raised = max_scale;
    // a ceiling below the present scale never lowers it, and infinity is no scale
    if (!is_nonfinite(raised) && raised > now) *scale = raised;
  }
};

}  // namespace amp_wrapper
