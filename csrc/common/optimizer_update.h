// What an optimizer does to one element, as float32; described in amp_wrapper/ops/__init__.py.
//
// Templates alone, over a policy M as in split.h, with the further functions all, multiply_add (a * b + c, rounded once),
// divide and sqrt, each rounded as IEEE 754 asks. A product and a sum are rounded once where multiply_add says so, as torch's
// own fused optimizers do it, and twice elsewhere.
#pragma once

#include "element.h"

namespace amp_wrapper {

// Numbers of a decision, in order.
enum DecisionAt { kSkip, kInverse, kCoefficient, kLimit, kNorm, kScale, kSkipped, kInARow, kDecision };
// Numbers of a row of Adam, and of SGD.
enum AdamAt { kSign, kDecay, kRest1, kBeta2, kRest2, kRoot, kEps, kRate, kDecoupled, kRow = 12 };
enum SgdAt { kMomentum = 2, kRest, kNesterov, kSgdRate };

// The gradient that counts: unscaled, clipped, and against its sign where it is climbed.
template <typename M>
struct Gradient {
  float inverse;
  float coefficient;
  float limit;
  float sign;

  AMP_INLINE Gradient(const float* row, const float* decision)
      : inverse(decision[kInverse]), coefficient(decision[kCoefficient]), limit(decision[kLimit]), sign(row[kSign]) {}

  AMP_INLINE typename M::Floats operator()(typename M::Floats gradient) const {
    using Floats = typename M::Floats;
    const Floats most = M::all(limit);
    const Floats least = M::all(-limit);
    Floats value = gradient * inverse * coefficient;
    // NaN stays
    value = value < least ? least : value;
    value = value > most ? most : value;
    return value * sign;
  }
};

template <typename M>
struct Adam {
  Gradient<M> gradient;
  float decay;
  float weight;
  float beta2;
  float rest;
  float root;
  float eps;
  float rate;
  bool decoupled;

  AMP_INLINE Adam(const float* row, const float* decision)
      : gradient(row, decision),
        decay(row[kDecay]),
        weight(row[kRest1]),
        beta2(row[kBeta2]),
        rest(row[kRest2]),
        root(row[kRoot]),
        eps(row[kEps]),
        rate(row[kRate]),
        decoupled(row[kDecoupled] != 0.0f) {}

  // Returns the new parameter; `m`, `v` and, with kAmsgrad, `most` are the moments, old and then new.
  template <bool kAmsgrad>
  AMP_INLINE typename M::Floats update(typename M::Floats scaled, typename M::Floats w, typename M::Floats* m,
                                       typename M::Floats* v, typename M::Floats* most) const {
    using Floats = typename M::Floats;
    Floats g = gradient(scaled);
    if (decoupled) {
      w = w * decay;
    } else if (decay != 0.0f) {
      g = M::multiply_add(w, M::all(decay), g);
    }
    // as torch's lerp: from the nearer end
    const bool near = weight < 0.5f;
    const Floats first = M::multiply_add(M::all(near ? weight : weight - 1.0f), g - *m, near ? *m : g);
    const Floats second = M::multiply_add(g * rest, g, *v * beta2);
    Floats largest = second;
    if constexpr (kAmsgrad) {
      const Floats before = *most;
      // NaN wins
      const auto holds = (before > second) | (before != before);
      largest = holds ? before : second;
      *most = largest;
    }
    *m = first;
    *v = second;
    return w + M::divide(first * rate, M::divide(M::sqrt(largest), M::all(root)) + eps);
  }
};

template <typename M>
struct Sgd {
  Gradient<M> gradient;
  float decay;
  float momentum;
  float rest;
  float rate;
  bool nesterov;

  AMP_INLINE Sgd(const float* row, const float* decision)
      : gradient(row, decision),
        decay(row[kDecay]),
        momentum(row[kMomentum]),
        rest(row[kRest]),
        rate(row[kSgdRate]),
        nesterov(row[kNesterov] != 0.0f) {}

  // Returns the new parameter; with kMomentums, `buffer` is the momentum, old and then new.
  template <bool kMomentums>
  AMP_INLINE typename M::Floats update(typename M::Floats scaled, typename M::Floats w, typename M::Floats* buffer) const {
    using Floats = typename M::Floats;
    Floats g = gradient(scaled);
    if (decay != 0.0f) g = M::multiply_add(w, M::all(decay), g);
    if constexpr (kMomentums) {
      // a momentum of zeros has not begun, and becomes the first gradient where nothing is dampened
      const Floats moved = M::multiply_add(M::all(rest), g, *buffer * momentum);
      *buffer = moved;
      g = nesterov ? M::multiply_add(M::all(momentum), moved, g) : moved;
    }
    return M::multiply_add(M::all(rate), g, w);
  }
};

}  // namespace amp_wrapper
