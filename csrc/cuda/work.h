// What a launch is handed by value, and how it is filled. Read by nvcc and by g++; knows nothing of torch.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "../common/planner.h"

namespace amp_wrapper::cuda {

// CUDA 13 passes 32,764 bytes everywhere; 4,096 are left to older toolkits.
#if defined(AMP_ARGUMENT_BYTES)
constexpr int kArgumentBytes = AMP_ARGUMENT_BYTES;
#elif defined(CUDART_VERSION) && CUDART_VERSION < 13000
constexpr int kArgumentBytes = 4096;
#else
constexpr int kArgumentBytes = 32764;
#endif
// for the other arguments of a kernel, and alignment
constexpr int kReserved = 128;

// A launch of planner.h for tensors in kLists lists.
template <int kLists>
struct Work {
  static constexpr int kMost = (kArgumentBytes - kReserved) / (kLists * (8 + 1) + 8 + 4);

  void* data[kLists][kMost];
  std::int64_t counts[kMost];
  std::int32_t starts[kMost + 1];
  std::int32_t entries;
  std::uint8_t types[kLists][kMost];
};

// The chunks of each of some tensors that stand one after the other.
struct Segments {
  static constexpr int kMost = (kArgumentBytes - kReserved) / 4 - 2;

  std::int32_t starts[kMost + 1];
  std::int32_t count;
};

static_assert(sizeof(Work<1>) + 64 <= kArgumentBytes && sizeof(Work<2>) + 64 <= kArgumentBytes);
static_assert(sizeof(Work<3>) + 64 <= kArgumentBytes && sizeof(Segments) + 64 <= kArgumentBytes);

// A grid has at most 2^31 - 1 blocks.
constexpr std::int64_t kMostChunks = std::numeric_limits<std::int32_t>::max();

// Calls launch(work, chunks of earlier launches) until every element has had its turn. operand(list, tensor, first element,
// &type) gives the pointer.
template <int kLists, typename O, typename F>
void for_launches(const std::vector<std::int64_t>& counts, O operand, F launch) {
  std::int64_t before = 0;
  for (const Launch& planned : plan(counts, Work<kLists>::kMost, kMostChunks)) {
    // 32 KB: too much for some stacks
    const auto work = std::make_unique<Work<kLists>>();
    work->entries = static_cast<std::int32_t>(planned.entries.size());
    for (std::int32_t i = 0; i < work->entries; ++i) {
      const Entry& entry = planned.entries[i];
      work->counts[i] = entry.count;
      work->starts[i] = static_cast<std::int32_t>(planned.starts[i]);
      for (int list = 0; list < kLists; ++list) {
        Type type = Type::kFloat;
        work->data[list][i] = operand(list, entry.tensor, entry.begin, &type);
        work->types[list][i] = static_cast<std::uint8_t>(type);
      }
    }
    work->starts[work->entries] = static_cast<std::int32_t>(planned.chunks());
    launch(static_cast<const Work<kLists>&>(*work), before);
    before += planned.chunks();
  }
}

// Calls launch(segments, first chunk, first tensor) until every tensor, also an empty one, has had its turn.
template <typename F>
void for_segments(const std::vector<std::int64_t>& counts, F launch) {
  const auto segments = std::make_unique<Segments>();
  const auto size = static_cast<std::int64_t>(counts.size());
  std::int64_t before = 0;
  for (std::int64_t first = 0; first < size; first += Segments::kMost) {
    segments->count = static_cast<std::int32_t>(std::min<std::int64_t>(Segments::kMost, size - first));
    const std::int64_t base = before;
    for (std::int32_t i = 0; i < segments->count; ++i) {
      segments->starts[i] = static_cast<std::int32_t>(before - base);
      before += chunks_of(counts[first + i]);
    }
    segments->starts[segments->count] = static_cast<std::int32_t>(before - base);
    launch(static_cast<const Segments&>(*segments), base, first);
  }
}

inline std::int64_t all_chunks(const std::vector<std::int64_t>& counts) {
  std::int64_t chunks = 0;
  for (const std::int64_t count : counts) chunks += chunks_of(count);
  return chunks;
}

}  // namespace amp_wrapper::cuda
