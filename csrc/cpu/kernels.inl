// The kernels of one instruction set, for the vectors of vector.inl, and the table of them.

namespace {

// Calls body(type) with a constant: one loop for each type, where little is done with what is read.
template <typename F>
inline auto with_type(Type type, F body) {
  switch (type) {
    case Type::kHalf:
      return body(std::integral_constant<Type, Type::kHalf>());
    case Type::kBfloat:
      return body(std::integral_constant<Type, Type::kBfloat>());
    default:
      return body(std::integral_constant<Type, Type::kFloat>());
  }
}

bool scale(Operand source, Operand target, std::int64_t count, float factor, bool streams) {
  const Scale function{factor};
  return with_type(source.type, [&](auto source_type) {
    return with_type(target.type, [&](auto target_type) {
      const Operand from{source.data, source_type};
      const Operand to{target.data, target_type};
      const bool around = streams && target_type == Type::kFloat && reinterpret_cast<std::uintptr_t>(to.data) % 64 == 0;
      Ints bad = {};
      for_vectors(count, [&](std::int64_t i, auto part) {
        const Floats x = load_ahead(from, i, part);
        bad |= nonfinite(x);
        if (around && part == kWidth) {
          stream(to.at(i), function(x));
        } else {
          store(to, i, function(x), part);
        }
      });
      if (around) finish_stream();
      return any(bad);
    });
  });
}

bool axpby(Operand x, Operand y, std::int64_t count, Axpby function) {
  Ints bad = {};
  for_vectors(count, [&](std::int64_t i, auto part) {
    const Floats left = load_ahead(x, i, part);
    bad |= nonfinite(left);
    store(y, i, function(left, load(y, i, part)), part);
  });
  return any(bad);
}

bool has_nonfinite(Operand data, std::int64_t count) {
  return with_type(data.type, [&](auto type) {
    const Operand from{data.data, type};
    Ints bad = {};
    for_vectors(count, [&](std::int64_t i, auto part) { bad |= nonfinite(load_ahead(from, i, part)); });
    return any(bad);
  });
}

// Lane i with i + 32, i + 16, ... i + 1.
inline float sum_of_lanes(const Floats* sums) {
  float lanes[kLanes];
  std::memcpy(lanes, sums, sizeof(lanes));
  for (int half = kLanes / 2; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

inline float block_sum(const Operand& data, std::int64_t first, std::int64_t count, Ints* bad) {
  constexpr int kSums = kLanes / kWidth;
  Floats sums[kSums] = {};
  const auto add = [&](int sum, std::int64_t i, auto part) {
    const Floats x = load_ahead(data, first + i, part);
    *bad |= nonfinite(x);
    sums[sum] += Square()(x);
  };
  const std::int64_t rows = count / kLanes * kLanes;
  for (std::int64_t i = 0; i < rows; i += kLanes) {
    for (int k = 0; k < kSums; ++k) add(k, i + k * kWidth, Whole());
  }
  for_vectors(count - rows, [&](std::int64_t i, auto part) { add(static_cast<int>(i / kWidth), rows + i, part); });
  return sum_of_lanes(sums);
}

float sum_of_squares(Operand data, std::int64_t count, bool* nonfinite_found) {
  float sums[kBlocks] = {};
  Ints bad = {};
  with_type(data.type, [&](auto type) {
    const Operand from{data.data, type};
    for (std::int64_t i = 0; i < count; i += kBlock) {
      sums[i / kBlock] = block_sum(from, i, std::min<std::int64_t>(count - i, kBlock), &bad);
    }
  });
  if (any(bad)) *nonfinite_found = true;
  for (int blocks = kBlocks; blocks > 1; blocks /= 2) {
    for (int i = 0; i < blocks / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
  return sums[0];
}

template <bool kAmsgrad>
void adam_elements(const Operand* lists, std::int64_t count, const Adam<Lanes> function) {
  for_vectors(count, [&](std::int64_t i, auto part) {
    Floats first = load(lists[kAdamFirst], i, part);
    Floats second = load(lists[kAdamSecond], i, part);
    Floats most = {};
    if constexpr (kAmsgrad) most = load(lists[kAdamMost], i, part);
    const Floats old = load_master(lists[kAdamParameter], lists[kAdamPartner], i, part);
    const Floats w = function.template update<kAmsgrad>(load(lists[kAdamGradient], i, part), old, &first, &second, &most);
    store(lists[kAdamFirst], i, first, part);
    store(lists[kAdamSecond], i, second, part);
    if constexpr (kAmsgrad) store(lists[kAdamMost], i, most, part);
    store_master(lists[kAdamParameter], lists[kAdamPartner], i, w, part);
  });
}

void adam(const Operand* lists, std::int64_t count, const float* row, const float* decision) {
  const Adam<Lanes> function(row, decision);
  if (lists[kAdamMost].data == nullptr) {
    adam_elements<false>(lists, count, function);
  } else {
    adam_elements<true>(lists, count, function);
  }
}

template <bool kMomentums>
void sgd_elements(const Operand* lists, std::int64_t count, const Sgd<Lanes> function) {
  for_vectors(count, [&](std::int64_t i, auto part) {
    Floats momentum = {};
    if constexpr (kMomentums) momentum = load(lists[kSgdBuffer], i, part);
    const Floats old = load_master(lists[kSgdParameter], lists[kSgdPartner], i, part);
    const Floats w = function.template update<kMomentums>(load(lists[kSgdGradient], i, part), old, &momentum);
    if constexpr (kMomentums) store(lists[kSgdBuffer], i, momentum, part);
    store_master(lists[kSgdParameter], lists[kSgdPartner], i, w, part);
  });
}

void sgd(const Operand* lists, std::int64_t count, const float* row, const float* decision) {
  const Sgd<Lanes> function(row, decision);
  if (lists[kSgdBuffer].data == nullptr) {
    sgd_elements<false>(lists, count, function);
  } else {
    sgd_elements<true>(lists, count, function);
  }
}

}  // namespace

namespace amp_wrapper::cpu {
const Kernels AMP_TABLE = {scale, axpby, has_nonfinite, sum_of_squares, adam, sgd};
}
