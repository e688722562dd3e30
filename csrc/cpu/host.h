// What the ops on a CPU share: lists become chunks, and threads share them out.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <string>

#include "../common/lists.h"
#include "kernels.h"

namespace amp_wrapper::cpu {

// The same choice as torch's, which ATEN_CPU_CAPABILITY in the environment can lower.
inline const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
#if defined(__x86_64__)
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512") return kAvx512;
    if (capability == "AVX2") return kAvx2;
#endif
    return kDefault;
  }();
  return chosen;
}

// Below this many elements for each thread, waking a thread costs more than it brings.
constexpr std::int64_t kGrain = 32768;

// Calls body(tensor, first element, count, chunk) for every chunk.
template <typename F>
void for_chunks(const std::vector<std::int64_t>& counts, F body) {
  const Plan plan(counts);
  const std::int64_t parts = std::max<std::int64_t>(std::min<std::int64_t>(at::get_num_threads(), plan.cost() / kGrain), 1);
  at::parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t chunk = plan.bound(begin, parts); chunk < plan.bound(end, parts); ++chunk) {
      const std::size_t tensor = plan.tensor_of(chunk);
      const std::int64_t first = (chunk - plan.start(tensor)) * kChunk;
      body(tensor, first, std::min(kChunk, counts[tensor] - first), chunk);
    }
  });
}

}  // namespace amp_wrapper::cpu
