// Sums of squares and largest magnitudes of one chunk, in the order of planner.h.

namespace {

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
    fetch_four(data + i);
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

// The sums of the blocks of a chunk, in a tree.
template <typename F>
float sum_of_blocks(std::int64_t count, bool* nonfinite_found, F block) {
  float sums[kBlocks] = {};
  int blocks = 0;
  Ints bad = {};
  for (std::int64_t i = 0; i < count; i += kBlock) {
    sums[blocks++] = block(i, count - i < kBlock ? count - i : std::int64_t{kBlock}, &bad);
  }
  if (any(bad)) *nonfinite_found = true;
  for (; blocks > 1; blocks = (blocks + 1) / 2) {
    if (blocks < kBlocks) sums[blocks] = 0.0f;
    for (int i = 0; i < (blocks + 1) / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
  return sums[0];
}

float sum_of_squares(Type type, const void* data, std::int64_t count, bool* nonfinite_found) {
  return with_type(type, [&](auto* t) {
    const auto* elements = static_cast<decltype(t)>(const_cast<void*>(data));
    return sum_of_blocks(count, nonfinite_found,
                         [&](std::int64_t i, std::int64_t some, Ints* bad) { return block_sum(elements + i, some, bad); });
  });
}

std::int32_t largest(Type type, const void* data, std::int64_t count) {
  return with_type(type, [&](auto* t) {
    const auto* elements = static_cast<decltype(t)>(const_cast<void*>(data));
    Ints most[4] = {};
    std::int64_t i = 0;
    for (; i + 4 * kWidth <= count; i += 4 * kWidth) {
      fetch_four(elements + i);
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

template <bool kStream, typename S, typename T>
float scale_block(const S* source, T* target, std::int64_t count, float factor, Ints* bad) {
  const Scale function{factor};
  Floats sums[kSums] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    fetch_four(source + i);
    Floats x[kSums];
    for (int k = 0; k < kSums; ++k) {
      x[k] = load(source + i + k * kWidth);
      *bad |= nonfinite(x[k]);
      sums[k] += Square()(x[k]);
    }
    for (int k = 0; k < kSums; ++k) put<kStream>(target + i + k * kWidth, function(x[k]));
  }
  for (int k = 0; i < count; ++k, i += kWidth) {
    const std::int64_t some = count - i < kWidth ? count - i : kWidth;
    const Floats x = load_some(source + i, some);
    *bad |= nonfinite(x);
    sums[k] += Square()(x);
    store_some(target + i, function(x), some);
  }
  return sum_of_lanes(sums);
}

float scale_and_sum(Type source_type, const void* source, Type target_type, void* target, std::int64_t count, float factor,
                    bool streams, bool* nonfinite_found) {
  return with_type(source_type, [&](auto* s) {
    return with_type(target_type, [&](auto* t) {
      const auto* from = static_cast<decltype(s)>(const_cast<void*>(source));
      auto* to = static_cast<decltype(t)>(target);
      return with_flag(streams && is_aligned(to), [&](auto stream) {
        constexpr bool kStream = decltype(stream)::value;
        const float sum = sum_of_blocks(count, nonfinite_found, [&](std::int64_t i, std::int64_t some, Ints* bad) {
          return scale_block<kStream>(from + i, to + i, some, factor, bad);
        });
        if constexpr (kStream) finish_stream();
        return sum;
      });
    });
  });
}

}  // namespace
