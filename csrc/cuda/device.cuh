// What the kernels share: vectors of elements in registers, and which part of the lists a block works on. Besides CUDA's own
// words this file needs nothing, so that a header can give those words a meaning on a CPU (tests/cuda_shim).
//
// One block works on one chunk (planner.h), whatever tensor and type it is of: a list of any lengths and types is one launch.
#pragma once

#include <type_traits>

#include "../common/functors.h"
#include "../common/planner.h"
#include "kernel_args.h"

namespace amp_wrapper::cuda {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// elements that a thread moves at once: 128 bits of a 16-bit type
constexpr int kVector = 8;
// vectors that a thread has under way, so that the memory is busy while it waits
constexpr int kUnroll = 4;

struct alignas(16) Quad {
  std::uint32_t words[4];
};

__device__ inline float element_of(const Quad* quads, int i, const float*) { return float_of(quads[i / 4].words[i % 4]); }
template <typename T>
__device__ inline float element_of(const Quad* quads, int i, const T*) {
  const std::uint32_t word = quads[0].words[i / 2];
  return to_float(T{static_cast<std::uint16_t>(i % 2 ? word >> 16 : word & 0xffffu)});
}

__device__ inline void set_element(Quad* quads, int i, float value, const float*) {
  quads[i / 4].words[i % 4] = bits_of(value);
}
template <typename T>
__device__ inline void set_element(Quad* quads, int i, float value, const T*) {
  const std::uint32_t bits = from_float<T>(value).bits;
  // the first of two writes the whole word
  if (i % 2) {
    quads[0].words[i / 2] |= bits << 16;
  } else {
    quads[0].words[i / 2] = bits;
  }
}

// kVector elements in registers.
template <typename T>
struct Pack {
  static constexpr int kQuads = kVector * static_cast<int>(sizeof(T)) / 16;
  Quad quads[kQuads];

  __device__ float get(int i) const { return element_of(quads, i, static_cast<const T*>(nullptr)); }
  __device__ void set(int i, float value) { set_element(quads, i, value, static_cast<const T*>(nullptr)); }
};

template <typename T>
__device__ inline Pack<T> load_pack(const T* from) {
  Pack<T> pack;
#pragma unroll
  for (int k = 0; k < Pack<T>::kQuads; ++k) pack.quads[k] = reinterpret_cast<const Quad*>(from)[k];
  return pack;
}

template <typename T>
__device__ inline void store_pack(T* to, const Pack<T>& pack) {
#pragma unroll
  for (int k = 0; k < Pack<T>::kQuads; ++k) reinterpret_cast<Quad*>(to)[k] = pack.quads[k];
}

template <typename T>
__device__ inline bool is_aligned(const T* place) {
  return reinterpret_cast<std::uintptr_t>(place) % 16 == 0;
}

// Calls `body` with a null pointer of the element type.
template <typename F>
__device__ inline auto with_type(std::uint8_t type, F body) {
  switch (static_cast<Type>(type)) {
    case Type::kHalf:
      return body(static_cast<Half*>(nullptr));
    case Type::kBfloat:
      return body(static_cast<Bfloat*>(nullptr));
    default:
      return body(static_cast<float*>(nullptr));
  }
}

// The part of an entry that this block works on.
template <int kLists>
struct Place {
  void* data[kLists];
  std::uint8_t types[kLists];
  int entry;
  std::int64_t begin;
  int count;
};

template <int kLists>
__device__ inline Place<kLists> place_of(const Work<kLists>& work) {
  const std::int32_t chunk = static_cast<std::int32_t>(blockIdx.x);
  const bool has_table = work.table != nullptr;
  const std::int32_t* starts = has_table ? work.table_starts : work.starts;
  Place<kLists> place;
  place.entry = entry_of(starts, work.entries, chunk);
  place.begin = static_cast<std::int64_t>(chunk - starts[place.entry]) * kChunk;
  std::int64_t count;
  if (has_table) {
    const Slot<kLists>& slot = work.table[place.entry];
    count = slot.count;
#pragma unroll
    for (int list = 0; list < kLists; ++list) {
      place.data[list] = slot.data[list];
      place.types[list] = slot.types[list];
    }
  } else {
    count = work.counts[place.entry];
#pragma unroll
    for (int list = 0; list < kLists; ++list) {
      place.data[list] = work.data[list][place.entry];
      place.types[list] = work.types[list][place.entry];
    }
  }
  const std::int64_t left = count - place.begin;
  place.count = static_cast<int>(left < kChunk ? left : kChunk);
  return place;
}

// Tells the compiler that a pointer out of a table leads to no shared memory.
template <typename T>
__device__ inline T* in_global(T* pointer) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

template <typename T, int kLists>
__device__ inline T* data_of(const Place<kLists>& place, int list) {
  return in_global(static_cast<T*>(place.data[list])) + place.begin;
}

// A maximum, never a sum: the flag stays 0 or 1. Every thread of the block calls it.
__device__ inline void raise_flag(bool bad, float* found_inf) {
  if (__syncthreads_or(bad) && threadIdx.x == 0 && found_inf != nullptr) {
    atomicMax(reinterpret_cast<int*>(found_inf), static_cast<int>(bits_of(1.0f)));
  }
}

// Vectors whose type is told apart at run time, the same for the whole block, where they are taken from memory and put there:
// what lies between is float32, and compiled once for all mixtures of types. Narrow types beside float32 have 16 bits.

struct alignas(8) Pair {
  std::uint32_t words[2];
};

// N elements as they lie in memory, 8 or 4; 16-bit types fill the first half.
template <int N>
struct Raw {
  std::uint32_t words[N];
};

// `Part` moves some of the words.
template <typename Part, int N>
__device__ inline void load_words(const char* from, int first, Raw<N>* raw) {
  const Part part = *reinterpret_cast<const Part*>(from + 4 * first);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Part) / 4); ++i) raw->words[first + i] = part.words[i];
}
template <typename Part, int N>
__device__ inline void store_words(char* to, int first, const Raw<N>& raw) {
  Part part;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Part) / 4); ++i) part.words[i] = raw.words[first + i];
  *reinterpret_cast<Part*>(to + 4 * first) = part;
}

__device__ inline bool is_wide(std::uint8_t type) { return static_cast<Type>(type) == Type::kFloat; }

// Which elements a thread works on: `count` of N, or all, in one piece where all lists are aligned and none is missing.
template <int N>
struct Turn {
  int first;
  int count;
  bool whole;
};

// That of the elements from `first` on, of `all`; there may be none left.
template <int N>
__device__ inline Turn<N> turn_of(int first, int all, bool aligned) {
  const int left = all - first;
  return {first, left, aligned && left >= N};
}

template <int N>
__device__ inline Raw<N> load_raw(const void* data, std::uint8_t type, const Turn<N>& turn) {
  using Narrow = std::conditional_t<N == 8, Quad, Pair>;
  Raw<N> raw = {};
  const bool wide = is_wide(type);
  if (turn.whole) {
    const char* from = static_cast<const char*>(data) + turn.first * (wide ? 4 : 2);
    if (wide) {
#pragma unroll
      for (int i = 0; i < N; i += 4) load_words<Quad>(from, i, &raw);
    } else {
      load_words<Narrow>(from, 0, &raw);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < turn.count) {
        if (wide) {
          raw.words[i] = static_cast<const std::uint32_t*>(data)[turn.first + i];
        } else {
          const std::uint32_t bits = static_cast<const std::uint16_t*>(data)[turn.first + i];
          raw.words[i / 2] |= bits << (i % 2 * 16);
        }
      }
    }
  }
  return raw;
}

template <int N>
__device__ inline void store_raw(void* data, std::uint8_t type, const Turn<N>& turn, const Raw<N>& raw) {
  using Narrow = std::conditional_t<N == 8, Quad, Pair>;
  const bool wide = is_wide(type);
  if (turn.whole) {
    char* to = static_cast<char*>(data) + turn.first * (wide ? 4 : 2);
    if (wide) {
#pragma unroll
      for (int i = 0; i < N; i += 4) store_words<Quad>(to, i, raw);
    } else {
      store_words<Narrow>(to, 0, raw);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < turn.count) {
        if (wide) {
          static_cast<std::uint32_t*>(data)[turn.first + i] = raw.words[i];
        } else {
          static_cast<std::uint16_t*>(data)[turn.first + i] = static_cast<std::uint16_t>(raw.words[i / 2] >> (i % 2 * 16));
        }
      }
    }
  }
}

// The 16 bits of element i.
template <int N>
__device__ inline std::uint16_t part_of(const Raw<N>& raw, int i) {
  return static_cast<std::uint16_t>(raw.words[i / 2] >> (i % 2 * 16));
}

template <int N>
struct Floats {
  float values[N];
};

template <int N>
__device__ inline Floats<N> unpack(const Raw<N>& raw, std::uint8_t type) {
  Floats<N> x;
  switch (static_cast<Type>(type)) {
    case Type::kHalf:
#pragma unroll
      for (int i = 0; i < N; ++i) x.values[i] = to_float(Half{part_of(raw, i)});
      break;
    case Type::kBfloat:
#pragma unroll
      for (int i = 0; i < N; ++i) x.values[i] = to_float(Bfloat{part_of(raw, i)});
      break;
    default:
#pragma unroll
      for (int i = 0; i < N; ++i) x.values[i] = float_of(raw.words[i]);
  }
  return x;
}

template <int N>
__device__ inline Raw<N> pack(const Floats<N>& x, std::uint8_t type) {
  Raw<N> raw = {};
  switch (static_cast<Type>(type)) {
    case Type::kHalf:
#pragma unroll
      for (int i = 0; i < N; ++i) {
        raw.words[i / 2] |= static_cast<std::uint32_t>(from_float<Half>(x.values[i]).bits) << (i % 2 * 16);
      }
      break;
    case Type::kBfloat:
#pragma unroll
      for (int i = 0; i < N; ++i) {
        raw.words[i / 2] |= static_cast<std::uint32_t>(from_float<Bfloat>(x.values[i]).bits) << (i % 2 * 16);
      }
      break;
    default:
#pragma unroll
      for (int i = 0; i < N; ++i) raw.words[i] = bits_of(x.values[i]);
  }
  return raw;
}

// Where a list of this block begins; null stays null.
template <int kLists>
__device__ inline void* bytes_of(const Place<kLists>& place, int list) {
  char* data = static_cast<char*>(place.data[list]);
  return data == nullptr ? nullptr : data + place.begin * (is_wide(place.types[list]) ? 4 : 2);
}

}  // namespace amp_wrapper::cuda
