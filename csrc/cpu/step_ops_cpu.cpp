// The ops of an optimizer step on a CPU.

#include <algorithm>

#include "../common/step_ops.h"
#include "host.h"

namespace amp_wrapper::cpu {
namespace {

// Every chunk of every parameter, where the decision is to take the step.
template <int kLists, typename F>
void update_chunks(const Update& update, F kernel) {
  if (update.lists.size() == 0 || update.decision[kSkip] != 0.0f) return;
  for_chunks(update.lists.counts(), [&](std::size_t tensor, std::int64_t first, std::int64_t count, std::int64_t) {
    Operand operands[kLists];
    for (int list = 0; list < kLists; ++list) operands[list] = update.lists.operand(list, tensor, first);
    kernel(operands, count, update.rows + tensor * kRow, update.decision);
  });
}

struct Cpu {
  static constexpr c10::DeviceType kType = c10::kCPU;

  static void decide(const Prologue& prologue, c10::Device) {
    const bool taken = !prologue.decide.skips();
    // the parameter before, and its count: where both agree, powers are not taken again
    const Parameter* last = nullptr;
    float before = 0.0f;
    float* row = prologue.rows;
    for (const Parameter& parameter : prologue.parameters) {
      const float count = parameter.step == nullptr ? 0.0f : *parameter.step;
      if (last != nullptr && parameter.hyper == last->hyper && bits_of(count) == bits_of(before)) {
        std::copy(row - kRow, row, row);
        if (parameter.step != nullptr) *parameter.step = *last->step;
      } else {
        fill_row(prologue.kind, parameter.hyper, parameter.rate, parameter.step, taken, row);
      }
      before = count;
      last = &parameter;
      row += kRow;
    }
    prologue.decide(prologue.decision);
  }

  static void adam(const Update& update, bool, c10::Device) { update_chunks<kAdamLists>(update, kernels().adam); }
  static void sgd(const Update& update, bool, c10::Device) { update_chunks<kSgdLists>(update, kernels().sgd); }
};

}  // namespace

TORCH_LIBRARY_IMPL(amp_wrapper, CPU, library) { register_steps<Cpu>(library); }

}  // namespace amp_wrapper::cpu
