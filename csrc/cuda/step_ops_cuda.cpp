// The ops of an optimizer step on a GPU: two launches each, whatever the number of parameters.

#include "../common/step_ops.h"
#include "host.h"

namespace amp_wrapper::cuda {
namespace {

struct Cuda {
  static constexpr c10::DeviceType kType = c10::kCUDA;

  static void decide(const Prologue& prologue, c10::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    std::vector<ParameterSlot> slots;
    slots.reserve(prologue.parameters.size());
    for (const Parameter& parameter : prologue.parameters) {
      auto& slot = slots.emplace_back(ParameterSlot{{}, parameter.rate, parameter.step});
      std::copy_n(parameter.hyper, kHyper, slot.hyper);
    }
    Tables tables(device);
    C10_CUDA_CHECK(launch_prologue(slots, tables.upload(), prologue.decide, prologue.kind, prologue.rows, prologue.decision,
                                   stream_of(device)));
  }

  static void adam(const Update& update, bool amsgrad, c10::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    Tables tables(device);
    C10_CUDA_CHECK(launch_adam(slots_of<kAdamLists>(update.lists), tables.upload(), amsgrad, update.rows, update.decision,
                               stream_of(device)));
  }

  static void sgd(const Update& update, bool has_momentum, c10::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    Tables tables(device);
    C10_CUDA_CHECK(launch_sgd(slots_of<kSgdLists>(update.lists), tables.upload(), has_momentum, update.rows, update.decision,
                              stream_of(device)));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(amp_wrapper, CUDA, library) { register_steps<Cuda>(library); }

}  // namespace amp_wrapper::cuda
