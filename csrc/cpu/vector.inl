// A vector of floats, and how the element types become one. Included by kernels_*.cpp after AMP_WIDTH and AMP_TABLE are set
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
using amp_wrapper::cpu::Piece;

constexpr int kWidth = AMP_WIDTH;
typedef float Floats __attribute__((vector_size(4 * AMP_WIDTH)));
typedef std::int32_t Ints __attribute__((vector_size(4 * AMP_WIDTH)));
typedef std::uint32_t Words __attribute__((vector_size(4 * AMP_WIDTH)));
typedef std::uint16_t Shorts __attribute__((vector_size(2 * AMP_WIDTH)));

template <typename V>
inline V read(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

inline Floats load(const float* from) { return read<Floats>(from); }

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

inline Floats load(const Bfloat* from) {
  const Words wide = __builtin_convertvector(read<Shorts>(from), Words);
  return (Floats)(wide << 16);
}

inline Floats load(const Half* from) {
#if AMP_WIDTH == 16
  return (Floats)_mm512_cvtph_ps(read<__m256i>(from));
#elif AMP_WIDTH == 8
  return (Floats)_mm256_cvtph_ps(read<__m128i>(from));
#else
  Floats value;
  for (int i = 0; i < kWidth; ++i) value[i] = to_float(from[i]);
  return value;
#endif
}

inline Shorts narrow(Words words) { return __builtin_convertvector(words, Shorts); }

inline Shorts to_bfloats(Floats value) {
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Ints is_nan = ((Ints)value & kMagnitude) > kExponent;
  return narrow((Words)(((Ints)rounded & ~is_nan) | (is_nan & 0x7fc0)));
}

inline Shorts to_halves(Floats value) {
#if AMP_WIDTH == 16
  return (Shorts)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif AMP_WIDTH == 8
  return (Shorts)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  Shorts result;
  for (int i = 0; i < kWidth; ++i) result[i] = from_float<Half>(value[i]).bits;
  return result;
#endif
}

inline Shorts to_shorts(Floats value, const Bfloat*) { return to_bfloats(value); }
inline Shorts to_shorts(Floats value, const Half*) { return to_halves(value); }

template <typename T>
inline void store(T* to, Floats value) {
  const Shorts narrowed = to_shorts(value, to);
  std::memcpy(to, &narrowed, sizeof(narrowed));
}

// A store around the caches, for targets that do not fit into them: the line is not read first. The place must be aligned.
inline void stream(float* to, Floats value) {
#if AMP_WIDTH == 16
  _mm512_stream_ps(to, (__m512)value);
#elif AMP_WIDTH == 8
  _mm256_stream_ps(to, (__m256)value);
#else
  store(to, value);
#endif
}

template <typename T>
inline void stream(T* to, Floats value) {
  const Shorts narrowed = to_shorts(value, to);
#if AMP_WIDTH == 16
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)narrowed);
#elif AMP_WIDTH == 8
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)narrowed);
#else
  std::memcpy(to, &narrowed, sizeof(narrowed));
#endif
}

// Other threads may read what was streamed only after this.
inline void finish_stream() {
#if AMP_WIDTH > 4
  _mm_sfence();
#endif
}

inline bool is_aligned(const void* place) { return reinterpret_cast<std::uintptr_t>(place) % 64 == 0; }

template <bool kStream, typename T>
inline void put(T* to, Floats value) {
  if constexpr (kStream) {
    stream(to, value);
  } else {
    store(to, value);
  }
}

// What will be read soon. The distance was measured: one core reads float32 a fifth faster, and 16-bit no slower.
template <typename T>
inline void fetch_ahead(const T* from) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + 2048);
}

inline Ints magnitude(Floats value) { return (Ints)value & kMagnitude; }

// -1 in the lanes that are infinite or NaN
inline Ints nonfinite(Floats value) { return magnitude(value) >= kExponent; }

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
  static inline Floats half_floats(Ints bits) {
    const Shorts narrowed = narrow((Words)bits);
    return load(reinterpret_cast<const Half*>(&narrowed));
  }
  static inline Floats divide(Floats a, Floats b) { return a / b; }
#if AMP_WIDTH == 16
  static inline Floats multiply_add(Floats a, Floats b, Floats c) {
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  }
  static inline Floats sqrt(Floats value) { return (Floats)_mm512_sqrt_ps((__m512)value); }
#elif AMP_WIDTH == 8
  static inline Floats multiply_add(Floats a, Floats b, Floats c) {
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  }
  static inline Floats sqrt(Floats value) { return (Floats)_mm256_sqrt_ps((__m256)value); }
#else
  static inline Floats multiply_add(Floats a, Floats b, Floats c) {
    Floats result;
    for (int i = 0; i < kWidth; ++i) result[i] = std::fma(a[i], b[i], c[i]);
    return result;
  }
  static inline Floats sqrt(Floats value) {
    Floats result;
    for (int i = 0; i < kWidth; ++i) result[i] = std::sqrt(value[i]);
    return result;
  }
#endif
};

inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }
inline Ints smaller(Ints a, Ints b) { return a < b ? a : b; }

// How many of the bytes are `value`; `count` is a multiple of two vectors, and at most 255 of them.
inline std::uint32_t count_bytes(const std::uint8_t* bytes, int count, std::uint8_t value) {
#if AMP_WIDTH >= 8
  // half vectors for AVX-512, too: their comparisons need no mask registers
  const __m256i wanted = _mm256_set1_epi8(static_cast<char>(value));
  __m256i found[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int i = 0; i < count; i += 64) {
    for (int k = 0; k < 2; ++k) {
      // the mask of a comparison is -1
      found[k] = _mm256_sub_epi8(found[k], _mm256_cmpeq_epi8(read<__m256i>(bytes + i + 32 * k), wanted));
    }
  }
  std::uint32_t sum = 0;
  for (const __m256i one : found) {
    std::uint64_t parts[4];
    const __m256i sums = _mm256_sad_epu8(one, _mm256_setzero_si256());
    std::memcpy(parts, &sums, sizeof(parts));
    sum += static_cast<std::uint32_t>(parts[0] + parts[1] + parts[2] + parts[3]);
  }
  return sum;
#else
  typedef std::uint8_t Bytes __attribute__((vector_size(4 * AMP_WIDTH)));
  const Bytes wanted = Bytes{} + value;
  Bytes found = {};
  for (int i = 0; i < count; i += 4 * kWidth) found -= (Bytes)(read<Bytes>(bytes + i) == wanted);
  std::uint8_t parts[4 * kWidth];
  std::memcpy(parts, &found, sizeof(parts));
  std::uint32_t sum = 0;
  for (const std::uint8_t part : parts) sum += part;
  return sum;
#endif
}

inline bool any(Ints mask) {
  std::int32_t result = 0;
  for (int i = 0; i < kWidth; ++i) result |= mask[i];
  return result != 0;
}

// The first `count` elements, at most a vector; the rest is zero, and not read.
template <typename T>
inline Floats load_some(const T* from, std::int64_t count) {
#if AMP_WIDTH == 16
  const auto mask = static_cast<__mmask16>((1u << count) - 1u);
  if constexpr (sizeof(T) == 4) {
    return (Floats)_mm512_maskz_loadu_ps(mask, from);
  } else {
    const __m256i present = _mm256_maskz_loadu_epi16(mask, from);
    return load(reinterpret_cast<const T*>(&present));
  }
#else
  T buffer[kWidth] = {};
  std::memcpy(buffer, from, static_cast<std::size_t>(count) * sizeof(T));
  return load(buffer);
#endif
}

template <typename T>
inline void store_some(T* to, Floats value, std::int64_t count) {
#if AMP_WIDTH == 16
  const auto mask = static_cast<__mmask16>((1u << count) - 1u);
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_ps(to, mask, (__m512)value);
  } else {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)to_shorts(value, to));
  }
#else
  T buffer[kWidth];
  store(buffer, value);
  std::memcpy(to, buffer, static_cast<std::size_t>(count) * sizeof(T));
#endif
}

// 16-bit patterns as integers: a weight without its sign, a remainder with it.
inline Ints widen(Shorts bits, const Half*) { return __builtin_convertvector(bits, Ints); }
inline Ints widen(Shorts bits, const Bfloat*) { return __builtin_convertvector(bits, Ints); }
inline Ints widen(Shorts bits, const std::int16_t*) {
  typedef std::int16_t Signed __attribute__((vector_size(2 * AMP_WIDTH)));
  return __builtin_convertvector((Signed)bits, Ints);
}

template <typename T>
inline Ints load_bits(const T* from) {
  return widen(read<Shorts>(from), from);
}

template <typename T>
inline Ints load_some_bits(const T* from, std::int64_t count) {
  std::uint16_t buffer[kWidth] = {};
  std::memcpy(buffer, from, static_cast<std::size_t>(count) * 2);
  return widen(read<Shorts>(buffer), from);
}

inline void store_bits(void* to, Ints value, std::int64_t count) {
  const Shorts narrowed = narrow((Words)value);
  std::memcpy(to, &narrowed, static_cast<std::size_t>(count) * 2);
}

}  // namespace
