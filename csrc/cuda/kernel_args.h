// What a launch is handed by value, and how it is filled. Read by nvcc and by g++; knows nothing of torch.
#pragma once

// before the limit, which must not depend on what a file includes first
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../common/element.h"
#include "../common/planner.h"
#include "../common/step_prologue.h"

namespace amp_wrapper::cuda {

// CUDA 13 passes 32,764 bytes to every device; older ones do so for some devices and drivers alone.
#if CUDART_VERSION >= 13000
constexpr int kMostBytes = 32764;
#else
constexpr int kMostBytes = 4096;
#endif
// copied at every launch, and enough for most models
constexpr int kFewBytes = 4096;
// for the other arguments of a kernel, and alignment
constexpr int kReserved = 256;

// A tensor of each list, all of one length. A grid has room for 2^31 - 1 chunks: 140 terabytes of 16-bit elements.
template <int kLists>
struct TensorSlot {
  char* data[kLists];
  std::int64_t count;
  // chunks before this one, of all launches
  std::int32_t start;
  // its place in the lists
  std::int32_t tensor;
  Type types[kLists];

  static unsigned blocks(const TensorSlot* first, const TensorSlot* last) {
    return static_cast<unsigned>(last->start + chunks_of(last->count) - first->start);
  }
};

constexpr int kPrologueThreads = 32;

// What the prologue knows of a parameter, see common/step_arguments.h.
struct ParameterSlot {
  double hyper[kHyper];
  const float* rate;
  float* step;

  static unsigned blocks(const ParameterSlot* first, const ParameterSlot* last) {
    return static_cast<unsigned>((last - first) / kPrologueThreads + 1);
  }
};

// The slots of one launch: in the argument itself, or in a table in the memory of the device.
template <typename Slot, int kBytes>
struct Work {
  static constexpr int kMost = (kBytes - kReserved) / static_cast<int>(sizeof(Slot));

  const Slot* table;
  std::int32_t size;
  // of the first slot, in all slots
  std::int32_t first;
  Slot slots[kMost];

  AMP_INLINE const Slot* begin() const { return table != nullptr ? table : slots; }
};

// Takes bytes to the device without waiting for it, and says where they are. Without one, there are no tables but more
// launches.
using Upload = std::function<const void*(const void* bytes, std::size_t size)>;

// Calls launch(work, blocks) until every slot has had its turn: with a small argument where it suffices, and a table where
// even a large one does not. Returns the first error.
template <typename Slot, typename F>
cudaError_t for_launches(const std::vector<Slot>& slots, const Upload& upload, F launch) {
  using Few = Work<Slot, kFewBytes>;
  using Many = Work<Slot, kMostBytes>;
  const int size = static_cast<int>(slots.size());
  const auto launch_some = [&](auto& work, int first, int count) {
    work.table = nullptr;
    work.size = count;
    work.first = first;
    std::copy_n(slots.data() + first, count, work.slots);
    return launch(work, Slot::blocks(slots.data() + first, slots.data() + first + count - 1));
  };
  if (size == 0) return {};
  if (size <= Few::kMost) {
    Few work;
    return launch_some(work, 0, size);
  }
  if (size > Many::kMost && upload) {
    Few work{static_cast<const Slot*>(upload(slots.data(), slots.size() * sizeof(Slot))), size, 0, {}};
    return launch(work, Slot::blocks(slots.data(), slots.data() + size - 1));
  }
  // 32 KB: too much for some stacks
  const auto work = std::make_unique<Many>();
  for (int first = 0; first < size; first += Many::kMost) {
    const cudaError_t error = launch_some(*work, first, std::min(Many::kMost, size - first));
    if (error != cudaError_t{}) return error;
  }
  return {};
}

}  // namespace amp_wrapper::cuda
