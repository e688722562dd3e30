// The updates of Adam and SGD over one chunk.

namespace {

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
