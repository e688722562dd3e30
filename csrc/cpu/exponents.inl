// Counts of the elements of one chunk by their power of two.
//
// The numbers of a tensor mostly lie between few powers of two. So the exponents of a piece are packed into bytes, and the
// bytes are compared with each exponent between the least and the largest of the piece: many at once, and nothing waits for a
// place in memory that was written just before. Only pieces whose numbers lie far apart are counted one by one.

namespace {

constexpr int kPiece = 1024;
// More exponents than these are counted one by one.
constexpr int kFewExponents = 64;
// Neighbours are counted in different tables: an addition has to wait for the one before it to the same place.
constexpr int kTables = 4;

inline Ints columns_of(Ints bits) {
  const Ints zeros = bits == 0;
  return (zeros & kZeros) | (~zeros & (bits >> kMantissaBits));
}

inline Ints finite_or_zero(Ints bits) { return bits & (bits < kExponent); }

inline std::int32_t largest_of(Ints values) {
  std::int32_t result = values[0];
  for (int k = 1; k < kWidth; ++k) result = values[k] > result ? values[k] : result;
  return result;
}

// The elements of a piece, and between what magnitudes they lie.
struct Span {
  std::int32_t most;
  // of those that are not zero; 0 without any
  std::uint32_t least;
};

// Packs the exponents into bytes, in an order of its own.
template <typename T>
inline Span pack_exponents(const T* piece, std::uint8_t* bytes) {
  // zero becomes the largest number, and the others stay in their order
  constexpr std::uint32_t kStep = 0x7fffffffu;
  Ints most = {};
  Ints least = Ints{} + kMagnitude;
  for (int i = 0; i < kPiece; i += 4 * kWidth) {
    fetch_four(piece + i);
    Words packed = {};
    for (int k = 0; k < 4; ++k) {
      const Ints bits = magnitude(load(piece + i + k * kWidth));
      most = larger(most, bits);
      least = smaller(least, (Ints)((Words)bits + kStep));
      packed |= (Words)(bits >> kMantissaBits) << (8 * k);
    }
    std::memcpy(bytes + i, &packed, sizeof(packed));
  }
  return {largest_of(most), static_cast<std::uint32_t>(~largest_of(~least)) - kStep};
}

template <typename T>
inline std::int32_t largest_finite(const T* piece) {
  Ints most = {};
  for (int i = 0; i < kPiece; i += kWidth) most = larger(most, finite_or_zero(magnitude(load(piece + i))));
  return largest_of(most);
}

template <typename T>
inline void count_one_by_one(const T* piece, std::uint32_t (&tables)[kTables][kExponents]) {
  std::uint32_t places[kPiece / 2];
  for (int i = 0; i < kPiece; i += 2 * kWidth) {
    const Words both = (Words)columns_of(magnitude(load(piece + i))) | (Words)columns_of(magnitude(load(piece + i + kWidth)))
                                                                           << 16;
    std::memcpy(places + i / 2, &both, sizeof(both));
  }
  for (int i = 0; i < kPiece / 2; i += 2) {
    ++tables[0][places[i] & 0xffffu];
    ++tables[1][places[i] >> 16];
    ++tables[2][places[i + 1] & 0xffffu];
    ++tables[3][places[i + 1] >> 16];
  }
}

std::int32_t exponents(Type type, const void* data, std::int64_t count, std::uint32_t* columns) {
  return with_type(type, [&](auto* t) {
    const auto* elements = static_cast<decltype(t)>(const_cast<void*>(data));
    std::uint32_t tables[kTables][kExponents];
    bool has_tables = false;
    std::int32_t most = 0;
    std::int64_t i = 0;
    for (; i + kPiece <= count; i += kPiece) {
      std::uint8_t bytes[kPiece];
      const Span span = pack_exponents(elements + i, bytes);
      const std::int32_t finite = span.most < kExponent ? span.most : largest_finite(elements + i);
      most = finite > most ? finite : most;
      if (span.most == 0) {
        columns[kZeros] += kPiece;
        continue;
      }
      // without what is not finite, which lies far from all others
      const int first = static_cast<int>(span.least >> kMantissaBits);
      const int last = static_cast<int>(finite >> kMantissaBits);
      // zeros and subnormal numbers have one exponent
      if (first == 0 || last - first >= kFewExponents) {
        if (!has_tables) std::memset(tables, 0, sizeof(tables));
        has_tables = true;
        count_one_by_one(elements + i, tables);
        continue;
      }
      std::uint32_t others = 0;
      if (span.most >= kExponent) others = count_bytes(bytes, kPiece, kNonfinite);
      columns[kNonfinite] += others;
      for (int exponent = first; exponent <= last; ++exponent) {
        const std::uint32_t found = count_bytes(bytes, kPiece, static_cast<std::uint8_t>(exponent));
        columns[exponent] += found;
        others += found;
      }
      columns[kZeros] += kPiece - others;
    }
    for (; i < count; i += kWidth) {
      const std::int64_t some = count - i < kWidth ? count - i : kWidth;
      const Ints bits = magnitude(load_some(elements + i, some));
      const std::int32_t finite = largest_of(finite_or_zero(bits));
      most = finite > most ? finite : most;
      const Ints found = columns_of(bits);
      for (int k = 0; k < some; ++k) ++columns[found[k]];
    }
    if (has_tables) {
      for (const auto& table : tables) {
        for (int column = 0; column < kExponents; ++column) columns[column] += table[column];
      }
    }
    return most;
  });
}

}  // namespace
