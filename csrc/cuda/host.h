// What the ops on a GPU share: lists become launches on the current stream. Nothing here waits for the device, and all memory
// comes from torch's allocators, so the ops may stand inside a CUDA graph.
#pragma once

#include <ATen/Functions.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../common/lists.h"
#include "kernel_args.h"

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
    return [this](const char* bytes, std::size_t size) {
      const auto options = at::TensorOptions().dtype(at::kByte);
      const auto count = static_cast<std::int64_t>(size);
      // torch's allocator gives pinned memory to nobody else before the copy is done
      const at::Tensor here = at::empty({count}, options.pinned_memory(true));
      std::memcpy(here.mutable_data_ptr(), bytes, size);
      kept_.push_back(at::empty({count}, options.device(device_)));
      kept_.back().copy_(here, /*non_blocking=*/true);
      return static_cast<const char*>(kept_.back().const_data_ptr());
    };
  }

 private:
  c10::Device device_;
  // until the kernels that read them are under way; what uses the memory next comes after them on the stream
  std::vector<at::Tensor> kept_;
};

inline void* at_element(const Flat& flat, std::size_t list, std::int64_t tensor, std::int64_t element) {
  return static_cast<char*>(flat.data(list, tensor)) + element * size_of(flat.type(list, tensor));
}

// Calls launch(work, chunks before); `operand` is that of for_launches.
template <int kLists, typename O, typename F>
void launch_all(const Flat& flat, c10::Device device, O operand, F launch) {
  Tables tables(device);
  for_launches<kLists>(
      flat.counts(), operand, [&](const auto& work, std::int64_t before) { C10_CUDA_CHECK(launch(work, before)); },
      tables.upload());
}

template <int kLists, typename F>
void launch_all(const Flat& flat, c10::Device device, F launch) {
  launch_all<kLists>(
      flat, device,
      [&](int list, std::int64_t tensor, std::int64_t element, Type* type) {
        *type = flat.type(list, tensor);
        return at_element(flat, list, tensor, element);
      },
      launch);
}

}  // namespace amp_wrapper::cuda
