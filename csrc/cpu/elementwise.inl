// Loops over the elements of one chunk: scale, copy, axpby, refresh.

namespace {

template <bool kStream, bool kCheck, typename S, typename T>
bool scale_elements(const S* source, T* target, std::int64_t count, float factor) {
  const Scale function{factor};
  Ints bad = {};
  std::int64_t i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth) {
    // where the target is read as well, the processor's own foresight is better
    if constexpr (kStream) fetch_four(source + i);
    // all loads first: the compiler may not move them over a store that could go to the same place
    const Floats x0 = load(source + i);
    const Floats x1 = load(source + i + kWidth);
    const Floats x2 = load(source + i + 2 * kWidth);
    const Floats x3 = load(source + i + 3 * kWidth);
    if constexpr (kCheck) bad |= (nonfinite(x0) | nonfinite(x1)) | (nonfinite(x2) | nonfinite(x3));
    put<kStream>(target + i, function(x0));
    put<kStream>(target + i + kWidth, function(x1));
    put<kStream>(target + i + 2 * kWidth, function(x2));
    put<kStream>(target + i + 3 * kWidth, function(x3));
  }
  for (; i < count; i += kWidth) {
    const std::int64_t some = count - i < kWidth ? count - i : kWidth;
    const Floats x = load_some(source + i, some);
    if constexpr (kCheck) bad |= nonfinite(x);
    store_some(target + i, function(x), some);
  }
  if constexpr (kStream) finish_stream();
  return any(bad);
}

bool scale(Type source_type, const void* source, Type target_type, void* target, std::int64_t count, float factor, bool checks,
           bool streams) {
  return with_type(source_type, [&](auto* s) {
    return with_type(target_type, [&](auto* t) {
      const auto* from = static_cast<decltype(s)>(const_cast<void*>(source));
      auto* to = static_cast<decltype(t)>(target);
      return with_flag(checks, [&](auto check) {
        return with_flag(streams && is_aligned(to), [&](auto stream) {
          return scale_elements<decltype(stream)::value, decltype(check)::value>(from, to, count, factor);
        });
      });
    });
  });
}

template <bool kStream, typename S, typename T>
void copy_elements(const S* source, T* target, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth) {
    if constexpr (kStream) fetch_four(source + i);
    const Floats x0 = load(source + i);
    const Floats x1 = load(source + i + kWidth);
    const Floats x2 = load(source + i + 2 * kWidth);
    const Floats x3 = load(source + i + 3 * kWidth);
    put<kStream>(target + i, x0);
    put<kStream>(target + i + kWidth, x1);
    put<kStream>(target + i + 2 * kWidth, x2);
    put<kStream>(target + i + 3 * kWidth, x3);
  }
  for (; i < count; i += kWidth) {
    const std::int64_t some = count - i < kWidth ? count - i : kWidth;
    store_some(target + i, load_some(source + i, some), some);
  }
  if constexpr (kStream) finish_stream();
}

void copy(Type source_type, const void* source, Type target_type, void* target, std::int64_t count, bool streams) {
  if (source == target) return;
  const bool around = streams && is_aligned(target);
  if (source_type == target_type && !(around && source_type == Type::kFloat)) {
    std::memcpy(target, source, static_cast<std::size_t>(count) * size_of(source_type));
    return;
  }
  with_type(source_type, [&](auto* s) {
    with_type(target_type, [&](auto* t) {
      const auto* from = static_cast<decltype(s)>(const_cast<void*>(source));
      auto* to = static_cast<decltype(t)>(target);
      if (around) {
        copy_elements<true>(from, to, count);
      } else {
        copy_elements<false>(from, to, count);
      }
    });
  });
}

template <bool kStream, bool kCheck, typename X, typename Y, typename T>
int axpby_elements(const X* x, const Y* y, T* target, std::int64_t count, Axpby function) {
  Ints bad_x = {};
  Ints bad_y = {};
  std::int64_t i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth) {
    if constexpr (kStream) {
      fetch_four(x + i);
      fetch_four(y + i);
    }
    Floats result[4];
    for (int k = 0; k < 4; ++k) {
      const Floats a = load(x + i + k * kWidth);
      const Floats b = load(y + i + k * kWidth);
      if constexpr (kCheck) {
        bad_x |= nonfinite(a);
        bad_y |= nonfinite(b);
      }
      result[k] = function(a, b);
    }
    for (int k = 0; k < 4; ++k) put<kStream>(target + i + k * kWidth, result[k]);
  }
  for (; i < count; i += kWidth) {
    const std::int64_t some = count - i < kWidth ? count - i : kWidth;
    const Floats a = load_some(x + i, some);
    const Floats b = load_some(y + i, some);
    if constexpr (kCheck) {
      bad_x |= nonfinite(a);
      bad_y |= nonfinite(b);
    }
    store_some(target + i, function(a, b), some);
  }
  if constexpr (kStream) finish_stream();
  return (any(bad_x) ? 1 : 0) | (any(bad_y) ? 2 : 0);
}

int axpby(Type x_type, const void* x, Type y_type, const void* y, Type target_type, void* target, std::int64_t count,
          Axpby function, bool checks, bool streams) {
  return with_type(x_type, [&](auto* a) {
    return with_type(y_type, [&](auto* b) {
      return with_type(target_type, [&](auto* t) {
        const auto* left = static_cast<decltype(a)>(const_cast<void*>(x));
        const auto* right = static_cast<decltype(b)>(const_cast<void*>(y));
        auto* to = static_cast<decltype(t)>(target);
        return with_flag(checks, [&](auto check) {
          return with_flag(streams && is_aligned(to), [&](auto stream) {
            return axpby_elements<decltype(stream)::value, decltype(check)::value>(left, right, to, count, function);
          });
        });
      });
    });
  });
}

// -1 in the lanes where both are NaN. Which of many NaN a rounding gives depends on the device: any is the rounded other.
inline Ints both_nan(Floats a, Floats b) { return (magnitude(a) > kExponent) & (magnitude(b) > kExponent); }

// -1 in the lanes whose weight is not the rounded master
template <typename W>
inline Ints edited_lanes(const Floats master, Shorts weight, const W* type) {
  return __builtin_convertvector(to_shorts(master, type) ^ weight, Ints) != 0;
}

template <typename W>
bool refresh_elements(const W* weight, float* master, std::int64_t count) {
  bool found = false;
  std::int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    fetch_ahead(master + i);
    fetch_ahead(weight + i);
    const Floats old = load(master + i);
    Ints edited = edited_lanes(old, read<Shorts>(weight + i), weight);
    // edits are rare: nothing is written where all bits agree
    if (!any(edited)) continue;
    const Floats present = load(weight + i);
    edited &= ~both_nan(old, present);
    if (!any(edited)) continue;
    found = true;
    store(master + i, (Floats)(((Ints)old & ~edited) | ((Ints)present & edited)));
  }
  if (i < count) {
    const std::int64_t some = count - i;
    W present[kWidth] = {};
    std::memcpy(present, weight + i, static_cast<std::size_t>(some) * sizeof(W));
    const Floats old = load_some(master + i, some);
    const Ints edited = edited_lanes(old, read<Shorts>(present), weight) & ~both_nan(old, load(present));
    if (any(edited)) {
      found = true;
      store_some(master + i, (Floats)(((Ints)old & ~edited) | ((Ints)load(present) & edited)), some);
    }
  }
  return found;
}

bool refresh(Type weight_type, const void* weight, float* master, std::int64_t count) {
  if (weight_type == Type::kHalf) return refresh_elements(static_cast<const Half*>(weight), master, count);
  return refresh_elements(static_cast<const Bfloat*>(weight), master, count);
}

}  // namespace
