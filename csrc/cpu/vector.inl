// A vector of floats, and how elements in memory become one. Included by kernels_*.cpp after AMP_WIDTH and AMP_TABLE are set
// and the instruction set is switched on; everything here has internal linkage, so that no code for one instruction set is
// ever called on a machine that lacks it.

// functors.h was compiled for every processor, and is inlined here; GCC's own intrinsics begin with undefined registers
#include "../common/optimizer_update.h"
#include "../common/split.h"

#pragma GCC diagnostic ignored "-Wpsabi"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace {

using namespace amp_wrapper;

constexpr int kWidth = AMP_WIDTH;
typedef float Floats __attribute__((vector_size(4 * AMP_WIDTH)));
typedef std::int32_t Ints __attribute__((vector_size(4 * AMP_WIDTH)));
typedef std::uint32_t Words __attribute__((vector_size(4 * AMP_WIDTH)));
typedef std::uint16_t Shorts __attribute__((vector_size(2 * AMP_WIDTH)));
typedef std::int16_t SignedShorts __attribute__((vector_size(2 * AMP_WIDTH)));

inline Shorts narrow(Words words) { return __builtin_convertvector(words, Shorts); }

inline Floats bfloats_to_floats(Shorts bits) { return (Floats)(__builtin_convertvector(bits, Words) << 16); }

inline Shorts to_bfloats(Floats value) {
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Ints is_nan = ((Ints)value & kMagnitude) > kExponent;
  return narrow((Words)(((Ints)rounded & ~is_nan) | (is_nan & 0x7fc0)));
}

// stream: a store around the caches, to an aligned place, whose line is not read first. Other threads may read it after
// finish_stream alone.
#if AMP_WIDTH == 16
inline Floats halves_to_floats(Shorts bits) { return (Floats)_mm512_cvtph_ps((__m256i)bits); }
inline Shorts to_halves(Floats value) {
  return (Shorts)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline void stream(char* to, Floats value) { _mm512_stream_ps(reinterpret_cast<float*>(to), (__m512)value); }
inline void finish_stream() { _mm_sfence(); }
inline Floats root(Floats value) { return (Floats)_mm512_sqrt_ps((__m512)value); }
inline Floats fused(Floats a, Floats b, Floats c) { return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif AMP_WIDTH == 8
inline Floats halves_to_floats(Shorts bits) { return (Floats)_mm256_cvtph_ps((__m128i)bits); }
inline Shorts to_halves(Floats value) {
  return (Shorts)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline void stream(char* to, Floats value) { _mm256_stream_ps(reinterpret_cast<float*>(to), (__m256)value); }
inline void finish_stream() { _mm_sfence(); }
inline Floats root(Floats value) { return (Floats)_mm256_sqrt_ps((__m256)value); }
inline Floats fused(Floats a, Floats b, Floats c) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
inline Floats halves_to_floats(Shorts bits) {
  Floats value;
  for (int i = 0; i < kWidth; ++i) value[i] = to_float(Half{bits[i]});
  return value;
}
inline Shorts to_halves(Floats value) {
  Shorts result;
  for (int i = 0; i < kWidth; ++i) result[i] = from_float<Half>(value[i]).bits;
  return result;
}
inline void stream(char* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }
inline void finish_stream() {}
inline Floats root(Floats value) {
  for (int i = 0; i < kWidth; ++i) value[i] = std::sqrt(value[i]);
  return value;
}
inline Floats fused(Floats a, Floats b, Floats c) {
  for (int i = 0; i < kWidth; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
}
#endif

// -1 in the lanes that are infinite or NaN
inline Ints nonfinite(Floats value) { return ((Ints)value & kMagnitude) >= kExponent; }

inline bool any(Ints mask) {
  std::int32_t result = 0;
  for (int i = 0; i < kWidth; ++i) result |= mask[i];
  return result != 0;
}

// What split.h and optimizer_update.h work on. Of internal linkage, and so is what they become.
struct Lanes {
  using Floats = ::Floats;
  using Ints = ::Ints;
  using Words = ::Words;

  // a sum would turn -0 into 0
  static inline Floats all(float value) { return value - Floats{}; }
  static inline Ints all(std::int32_t value) { return Ints{} + value; }
  static inline Ints bits(Floats value) { return (Ints)value; }
  static inline Floats floats(Ints bits) { return (Floats)bits; }
  static inline Floats to_floats(Ints value) { return __builtin_convertvector(value, Floats); }
  static inline Ints half_bits(Floats value) { return __builtin_convertvector(to_halves(value), Ints); }
  static inline Floats half_floats(Ints bits) { return halves_to_floats(narrow((Words)bits)); }
  static inline Floats divide(Floats a, Floats b) { return a / b; }
  static inline Floats multiply_add(Floats a, Floats b, Floats c) { return fused(a, b, c); }
  static inline Floats sqrt(Floats value) { return root(value); }
};

// All elements of a vector. A number of them instead means the first ones: others are not read, but zero, and not written.
using Whole = std::integral_constant<std::size_t, kWidth>;

// Calls body(first element, Whole or how many) for all vectors of a chunk.
template <typename F>
inline void for_vectors(std::int64_t count, F body) {
  std::int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) body(i, Whole());
  if (i < count) body(i, static_cast<std::size_t>(count - i));
}

template <typename V, typename Part>
inline V read(const char* from, Part part) {
  V value = {};
  std::memcpy(&value, from, part * (sizeof(V) / kWidth));
  return value;
}

template <typename V, typename Part>
inline void write(char* to, V value, Part part) {
  std::memcpy(to, &value, part * (sizeof(V) / kWidth));
}

template <typename Part>
inline Floats load(const Operand& from, std::int64_t i, Part part) {
  const char* place = from.at(i);
  if (from.type == Type::kFloat) return read<Floats>(place, part);
  const Shorts bits = read<Shorts>(place, part);
  return from.type == Type::kHalf ? halves_to_floats(bits) : bfloats_to_floats(bits);
}

// As load, and asks for what will be read soon. The distance was measured: one core reads half as fast without it.
template <typename Part>
inline Floats load_ahead(const Operand& from, std::int64_t i, Part part) {
  __builtin_prefetch(from.at(i) + 2048);
  return load(from, i, part);
}

template <typename Part>
inline void store(const Operand& to, std::int64_t i, Floats value, Part part) {
  char* place = to.at(i);
  if (to.type == Type::kFloat) {
    write(place, value, part);
  } else {
    write(place, to.type == Type::kHalf ? to_halves(value) : to_bfloats(value), part);
  }
}

// A parameter together with its partner, which may be missing.
template <typename Part>
inline Floats load_master(const Operand& param, const Operand& partner, std::int64_t i, Part part) {
  if (partner.type != Type::kShort) return load(param, i, part);
  const Ints weight = __builtin_convertvector(read<Shorts>(param.at(i), part), Ints);
  const Ints remainder = __builtin_convertvector(read<SignedShorts>(partner.at(i), part), Ints);
  return param.type == Type::kHalf ? join_master<Lanes>(weight, remainder, static_cast<const Half*>(nullptr))
                                   : join_master<Lanes>(weight, remainder, static_cast<const Bfloat*>(nullptr));
}

template <typename Part>
inline void store_master(const Operand& param, const Operand& partner, std::int64_t i, Floats value, Part part) {
  if (partner.type != Type::kShort) {
    store(param, i, value, part);
    if (partner.data != nullptr) store(partner, i, value, part);
    return;
  }
  const Parts<Lanes> parts = param.type == Type::kHalf ? split_master<Lanes>(value, static_cast<const Half*>(nullptr))
                                                       : split_master<Lanes>(value, static_cast<const Bfloat*>(nullptr));
  write(param.at(i), narrow((Words)parts.weight), part);
  write(partner.at(i), narrow((Words)parts.remainder), part);
}

}  // namespace
