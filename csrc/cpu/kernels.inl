// The loops over one chunk, for the vectors of vector.inl.

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

// How an update finds a parameter, and where it leaves it: `Plain` is float32 alone, `Copied` has a copy beside it,
// `Split` is a 16-bit weight with a remainder. `some` is kWidth, or less at the end.
struct Plain {
  float* param;

  Floats get(std::int64_t i) const { return load(param + i); }
  Floats get(std::int64_t i, std::int64_t some) const { return load_some(param + i, some); }
  void set(std::int64_t i, Floats value) const { store(param + i, value); }
  void set(std::int64_t i, Floats value, std::int64_t some) const { store_some(param + i, value, some); }
};

template <typename T>
struct Copied {
  float* param;
  T* copy;

  Floats get(std::int64_t i) const { return load(param + i); }
  Floats get(std::int64_t i, std::int64_t some) const { return load_some(param + i, some); }
  void set(std::int64_t i, Floats value) const {
    store(param + i, value);
    store(copy + i, value);
  }
  void set(std::int64_t i, Floats value, std::int64_t some) const {
    store_some(param + i, value, some);
    store_some(copy + i, value, some);
  }
};

template <typename T>
struct Split {
  T* weight;
  std::int16_t* remainder;

  Floats get(std::int64_t i) const { return join_master<Lanes>(load_bits(weight + i), load_bits(remainder + i), weight); }
  Floats get(std::int64_t i, std::int64_t some) const {
    return join_master<Lanes>(load_some_bits(weight + i, some), load_some_bits(remainder + i, some), weight);
  }
  void set(std::int64_t i, Floats value) const { set(i, value, kWidth); }
  void set(std::int64_t i, Floats value, std::int64_t some) const {
    const Parts<Lanes> parts = split_master<Lanes>(value, weight);
    store_bits(weight + i, parts.weight, some);
    store_bits(remainder + i, parts.remainder, some);
  }
};

template <bool kAmsgrad, typename G, typename P>
void adam_elements(const G* grad, P param, float* m, float* v, float* most, std::int64_t count, const Adam<Lanes> function) {
  std::int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    Floats first = load(m + i);
    Floats second = load(v + i);
    Floats largest = {};
    if constexpr (kAmsgrad) largest = load(most + i);
    const Floats w = function.template update<kAmsgrad>(load(grad + i), param.get(i), &first, &second, &largest);
    store(m + i, first);
    store(v + i, second);
    if constexpr (kAmsgrad) store(most + i, largest);
    param.set(i, w);
  }
  if (i == count) return;
  const std::int64_t some = count - i;
  Floats first = load_some(m + i, some);
  Floats second = load_some(v + i, some);
  Floats largest = {};
  if constexpr (kAmsgrad) largest = load_some(most + i, some);
  const Floats w = function.template update<kAmsgrad>(load_some(grad + i, some), param.get(i, some), &first, &second, &largest);
  store_some(m + i, first, some);
  store_some(v + i, second, some);
  if constexpr (kAmsgrad) store_some(most + i, largest, some);
  param.set(i, w, some);
}

template <bool kMomentums, typename G, typename P>
void sgd_elements(const G* grad, P param, float* buffer, std::int64_t count, const Sgd<Lanes> function) {
  std::int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    Floats moved = {};
    if constexpr (kMomentums) moved = load(buffer + i);
    const Floats w = function.template update<kMomentums>(load(grad + i), param.get(i), &moved);
    if constexpr (kMomentums) store(buffer + i, moved);
    param.set(i, w);
  }
  if (i == count) return;
  const std::int64_t some = count - i;
  Floats moved = {};
  if constexpr (kMomentums) moved = load_some(buffer + i, some);
  const Floats w = function.template update<kMomentums>(load_some(grad + i, some), param.get(i, some), &moved);
  if constexpr (kMomentums) store_some(buffer + i, moved, some);
  param.set(i, w, some);
}

// Calls `body` with gradients and parameter of their types; what it works on beside them is float32.
template <typename F>
void with_piece(const Piece& piece, F body) {
  with_type(piece.grad_type, [&](auto* g) {
    const auto* grad = static_cast<decltype(g)>(const_cast<void*>(piece.grad));
    if (piece.partner == nullptr) {
      body(grad, Plain{static_cast<float*>(piece.param)});
    } else if (piece.partner_type == Type::kShort) {
      auto* remainder = static_cast<std::int16_t*>(piece.partner);
      if (piece.param_type == Type::kHalf) {
        body(grad, Split<Half>{static_cast<Half*>(piece.param), remainder});
      } else {
        body(grad, Split<Bfloat>{static_cast<Bfloat*>(piece.param), remainder});
      }
    } else if (piece.partner_type == Type::kFloat) {
      body(grad, Copied<float>{static_cast<float*>(piece.param), static_cast<float*>(piece.partner)});
    } else if (piece.partner_type == Type::kHalf) {
      body(grad, Copied<Half>{static_cast<float*>(piece.param), static_cast<Half*>(piece.partner)});
    } else {
      body(grad, Copied<Bfloat>{static_cast<float*>(piece.param), static_cast<Bfloat*>(piece.partner)});
    }
  });
}

// 16-bit states, and 16-bit parameters without a remainder, pass through float32 in the first cache, a tile at a time: one
// loop for all types.
constexpr std::int64_t kTile = 512;

template <typename F>
void in_tiles(const Piece& whole, F body) {
  const auto is_wide = [](Type type, const void* data) { return data == nullptr || type == Type::kFloat; };
  const bool split = whole.partner != nullptr && whole.partner_type == Type::kShort;
  bool direct = split || is_wide(whole.param_type, whole.param);
  for (int k = 0; k < 3; ++k) direct = direct && is_wide(whole.state_types[k], whole.states[k]);
  if (direct) {
    body(whole);
    return;
  }
  alignas(64) float tiles[4][kTile];
  const auto place = [](void* data, Type type, std::int64_t i) {
    return data == nullptr ? nullptr : static_cast<void*>(static_cast<char*>(data) + i * size_of(type));
  };
  for (std::int64_t i = 0; i < whole.count; i += kTile) {
    Piece piece = whole;
    piece.count = whole.count - i < kTile ? whole.count - i : kTile;
    piece.grad = static_cast<const char*>(whole.grad) + i * size_of(whole.grad_type);
    piece.partner = place(whole.partner, whole.partner_type, i);
    void** operands[] = {&piece.states[0], &piece.states[1], &piece.states[2], &piece.param};
    Type* types[] = {&piece.state_types[0], &piece.state_types[1], &piece.state_types[2], &piece.param_type};
    void* narrow_places[4] = {};
    Type narrow_types[4] = {};
    for (int k = 0; k < 4; ++k) {
      *operands[k] = place(*operands[k], *types[k], i);
      if (is_wide(*types[k], *operands[k]) || (k == 3 && split)) continue;
      narrow_places[k] = *operands[k];
      narrow_types[k] = *types[k];
      copy(narrow_types[k], narrow_places[k], Type::kFloat, tiles[k], piece.count, false);
      *operands[k] = tiles[k];
      *types[k] = Type::kFloat;
    }
    body(piece);
    for (int k = 0; k < 4; ++k) {
      if (narrow_places[k] != nullptr) copy(Type::kFloat, tiles[k], narrow_types[k], narrow_places[k], piece.count, false);
    }
  }
}

void adam(const Piece& whole, const float* row, const float* decision) {
  const Adam<Lanes> function(row, decision);
  in_tiles(whole, [&](const Piece& piece) {
    auto* m = static_cast<float*>(piece.states[0]);
    auto* v = static_cast<float*>(piece.states[1]);
    auto* most = static_cast<float*>(piece.states[2]);
    with_piece(piece, [&](const auto* grad, auto param) {
      with_flag(most != nullptr,
                [&](auto amsgrad) { adam_elements<decltype(amsgrad)::value>(grad, param, m, v, most, piece.count, function); });
    });
  });
}

void sgd(const Piece& whole, const float* row, const float* decision) {
  const Sgd<Lanes> function(row, decision);
  in_tiles(whole, [&](const Piece& piece) {
    auto* buffer = static_cast<float*>(piece.states[0]);
    with_piece(piece, [&](const auto* grad, auto param) {
      with_flag(buffer != nullptr,
                [&](auto momentums) { sgd_elements<decltype(momentums)::value>(grad, param, buffer, piece.count, function); });
    });
  });
}

}  // namespace

namespace amp_wrapper::cpu {
const Kernels AMP_TABLE = {scale, copy, axpby, sum_of_squares, largest, refresh, scale_and_sum, adam, sgd};
}
