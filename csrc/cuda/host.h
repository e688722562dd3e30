// What the ops on a GPU share: lists become launches on the current stream. Nothing here waits for the device, and all memory
// comes from torch's allocators, so the ops may stand inside a CUDA graph.
#pragma once

#include <ATen/Functions.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>

#include "../common/lists.h"
#include "launch.h"

namespace amp_wrapper::cuda {

inline cudaStream_t stream_of(c10::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

// Tables in the memory of a device, for the launches that follow on its current stream.
class Tables {
 public:
  explicit Tables(c10::Device device) : device_(device) {}

  // A graph would copy, at each replay, from host memory that others have by then: while one is recorded there are no tables,
  // but more launches.
  Upload upload() {
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return {};
    return [this](const void* bytes, std::size_t size) {
      const auto options = at::TensorOptions().dtype(at::kByte);
      const auto count = static_cast<std::int64_t>(size);
      // torch's allocator gives pinned memory to nobody else before the copy is done
      const at::Tensor here = at::empty({count}, options.pinned_memory(true));
      std::memcpy(here.mutable_data_ptr(), bytes, size);
      kept_.push_back(at::empty({count}, options.device(device_)));
      kept_.back().copy_(here, /*non_blocking=*/true);
      return kept_.back().const_data_ptr();
    };
  }

 private:
  c10::Device device_;
  // until the kernels that read them are under way; what uses the memory next comes after them on the stream
  std::vector<at::Tensor> kept_;
};

// The tensors that have elements.
template <int kLists>
Slots<kLists> slots_of(const Lists& lists) {
  Slots<kLists> slots;
  std::int32_t start = 0;
  for (std::size_t i = 0; i < lists.size(); ++i) {
    const std::int64_t count = lists.counts()[i];
    if (count == 0) continue;
    auto& slot = slots.emplace_back(TensorSlot<kLists>{{}, count, start, static_cast<std::int32_t>(i), {}});
    for (int list = 0; list < kLists; ++list) {
      const Operand operand = lists.operand(list, i);
      slot.data[list] = operand.data;
      slot.types[list] = operand.type;
    }
    start += static_cast<std::int32_t>(chunks_of(count));
  }
  return slots;
}

}  // namespace amp_wrapper::cuda
