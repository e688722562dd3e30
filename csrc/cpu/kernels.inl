// The loops over one chunk, for the vectors of vector.inl.

namespace {

// `body(vector, tail)` gets the element type of a runtime value as a null pointer.
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

template <typename S, typename T>
bool scale_elements(const S* source, T* target, std::int64_t count, float factor) {
  const Scale function{factor};
  Ints bad = {};
  std::int64_t i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth) {
    // all loads first: the compiler may not move them over a store that could go to the same place
    const Floats x0 = load(source + i);
    const Floats x1 = load(source + i + kWidth);
    const Floats x2 = load(source + i + 2 * kWidth);
    const Floats x3 = load(source + i + 3 * kWidth);
    bad |= (nonfinite(x0) | nonfinite(x1)) | (nonfinite(x2) | nonfinite(x3));
    store(target + i, function(x0));
    store(target + i + kWidth, function(x1));
    store(target + i + 2 * kWidth, function(x2));
    store(target + i + 3 * kWidth, function(x3));
  }
  for (; i < count; i += kWidth) {
    const std::int64_t some = count - i < kWidth ? count - i : kWidth;
    const Floats x = load_some(source + i, some);
    bad |= nonfinite(x);
    store_some(target + i, function(x), some);
  }
  return any(bad);
}

bool scale(Type source_type, const void* source, Type target_type, void* target, std::int64_t count, float factor) {
  return with_type(source_type, [&](auto* s) {
    return with_type(target_type, [&](auto* t) {
      return scale_elements(static_cast<decltype(s)>(const_cast<void*>(source)), static_cast<decltype(t)>(target), count, factor);
    });
  });
}

template <typename S, typename T>
void copy_elements(const S* source, T* target, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 2 * kWidth <= count; i += 2 * kWidth) {
    const Floats x0 = load(source + i);
    const Floats x1 = load(source + i + kWidth);
    store(target + i, x0);
    store(target + i + kWidth, x1);
  }
  for (; i < count; i += kWidth) {
    const std::int64_t some = count - i < kWidth ? count - i : kWidth;
    store_some(target + i, load_some(source + i, some), some);
  }
}

void copy(Type source_type, const void* source, Type target_type, void* target, std::int64_t count) {
  if (source_type == target_type) {
    if (source != target) std::memcpy(target, source, static_cast<std::size_t>(count) * size_of(source_type));
    return;
  }
  with_type(source_type, [&](auto* s) {
    with_type(target_type, [&](auto* t) {
      copy_elements(static_cast<decltype(s)>(const_cast<void*>(source)), static_cast<decltype(t)>(target), count);
    });
  });
}

template <typename X, typename Y, typename T>
int axpby_elements(const X* x, const Y* y, T* target, std::int64_t count, Axpby function) {
  Ints bad_x = {};
  Ints bad_y = {};
  std::int64_t i = 0;
  for (; i + 2 * kWidth <= count; i += 2 * kWidth) {
    const Floats x0 = load(x + i);
    const Floats y0 = load(y + i);
    const Floats x1 = load(x + i + kWidth);
    const Floats y1 = load(y + i + kWidth);
    bad_x |= nonfinite(x0) | nonfinite(x1);
    bad_y |= nonfinite(y0) | nonfinite(y1);
    store(target + i, function(x0, y0));
    store(target + i + kWidth, function(x1, y1));
  }
  for (; i < count; i += kWidth) {
    const std::int64_t some = count - i < kWidth ? count - i : kWidth;
    const Floats x0 = load_some(x + i, some);
    const Floats y0 = load_some(y + i, some);
    bad_x |= nonfinite(x0);
    bad_y |= nonfinite(y0);
    store_some(target + i, function(x0, y0), some);
  }
  return (any(bad_x) ? 1 : 0) | (any(bad_y) ? 2 : 0);
}

int axpby(Type x_type, const void* x, Type y_type, const void* y, Type target_type, void* target, std::int64_t count,
          Axpby function) {
  return with_type(x_type, [&](auto* a) {
    return with_type(y_type, [&](auto* b) {
      return with_type(target_type, [&](auto* t) {
        return axpby_elements(static_cast<decltype(a)>(const_cast<void*>(x)), static_cast<decltype(b)>(const_cast<void*>(y)),
                              static_cast<decltype(t)>(target), count, function);
      });
    });
  });
}

constexpr int kSums = kLanes / kWidth;

// Lane i with i + 32, i + 16, ... i + 1.
inline float sum_of_lanes(Floats* sums) {
  for (int half = kSums / 2; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  float lanes[kWidth];
  std::memcpy(lanes, sums, sizeof(lanes));
  for (int half = kWidth / 2; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

template <typename T>
float block_sum(const T* data, std::int64_t count, Ints* bad) {
  Floats sums[kSums] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int k = 0; k < kSums; ++k) {
      const Floats x = load(data + i + k * kWidth);
      *bad |= nonfinite(x);
      sums[k] += Square()(x);
    }
  }
  for (int k = 0; i < count; ++k, i += kWidth) {
    const Floats x = load_some(data + i, count - i < kWidth ? count - i : kWidth);
    *bad |= nonfinite(x);
    sums[k] += Square()(x);
  }
  return sum_of_lanes(sums);
}

float sum_of_squares(Type type, const void* data, std::int64_t count, bool* nonfinite_found) {
  return with_type(type, [&](auto* t) {
    const auto* elements = static_cast<decltype(t)>(const_cast<void*>(data));
    float sums[kBlocks] = {};
    int blocks = 0;
    Ints bad = {};
    for (std::int64_t i = 0; i < count; i += kBlock) {
      sums[blocks++] = block_sum(elements + i, count - i < kBlock ? count - i : kBlock, &bad);
    }
    if (any(bad)) *nonfinite_found = true;
    for (; blocks > 1; blocks = (blocks + 1) / 2) {
      if (blocks < kBlocks) sums[blocks] = 0.0f;
      for (int i = 0; i < (blocks + 1) / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    }
    return sums[0];
  });
}

std::int32_t largest(Type type, const void* data, std::int64_t count) {
  return with_type(type, [&](auto* t) {
    const auto* elements = static_cast<decltype(t)>(const_cast<void*>(data));
    Ints most[4] = {};
    std::int64_t i = 0;
    for (; i + 4 * kWidth <= count; i += 4 * kWidth) {
      for (int k = 0; k < 4; ++k) most[k] = larger(most[k], magnitude(load(elements + i + k * kWidth)));
    }
    for (; i < count; i += kWidth) {
      most[0] = larger(most[0], magnitude(load_some(elements + i, count - i < kWidth ? count - i : kWidth)));
    }
    const Ints merged = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    std::int32_t result = 0;
    for (int k = 0; k < kWidth; ++k) result = merged[k] > result ? merged[k] : result;
    return result;
  });
}

template <typename W>
bool refresh_elements(const W* weight, float* master, std::int64_t count) {
  bool found = false;
  for (std::int64_t i = 0; i < count; i += kWidth) {
    const std::int64_t some = count - i < kWidth ? count - i : kWidth;
    const bool whole = some == kWidth;
    const Floats old = whole ? load(master + i) : load_some(master + i, some);
    W rounded[kWidth];
    store(rounded, old);
    W present[kWidth] = {};
    std::memcpy(present, weight + i, static_cast<std::size_t>(some) * sizeof(W));
    // edits are rare: nothing is written where all bits agree
    const Shorts differs = read<Shorts>(rounded) ^ read<Shorts>(present);
    const Ints edited = __builtin_convertvector(differs, Ints) != 0;
    if (!any(edited)) continue;
    found = true;
    const Floats renewed = (Floats)(((Ints)old & ~edited) | ((Ints)load(present) & edited));
    store_some(master + i, renewed, some);
  }
  return found;
}

bool refresh(Type weight_type, const void* weight, float* master, std::int64_t count) {
  if (weight_type == Type::kHalf) return refresh_elements(static_cast<const Half*>(weight), master, count);
  return refresh_elements(static_cast<const Bfloat*>(weight), master, count);
}

}  // namespace

namespace amp_wrapper::cpu {
const Kernels AMP_TABLE = {scale, copy, axpby, sum_of_squares, largest, refresh};
}
