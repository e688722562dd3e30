// What the ops on a CPU share: lists become chunks, and threads share them out.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <limits>
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
void for_chunks(const Launch& launch, F body) {
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    if (begin == end) return;
    int entry = entry_of(launch.starts.data(), static_cast<int>(launch.entries.size()), begin);
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
      while (launch.starts[entry + 1] <= chunk) ++entry;
      const Entry& piece = launch.entries[entry];
      const std::int64_t offset = (chunk - launch.starts[entry]) * kChunk;
      body(piece.tensor, piece.begin + offset, std::min(kChunk, piece.count - offset), chunk);
    }
  };
  std::int64_t cost = 0;
  for (const Entry& entry : launch.entries) cost += entry.count + kEntryCost;
  const std::int64_t parts = std::min<std::int64_t>(at::get_num_threads(), cost / kGrain);
  if (parts <= 1) {
    run(0, launch.chunks());
    return;
  }
  const std::vector<std::int64_t> bounds = split(launch, parts);
  at::parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) { run(bounds[begin], bounds[end]); });
}

inline Launch whole_plan(const std::vector<std::int64_t>& counts) {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  std::vector<Launch> launches = plan(counts, kAny, kAny);
  return launches.empty() ? Launch() : std::move(launches.front());
}

inline void* at_element(const Flat& flat, std::size_t list, std::int64_t tensor, std::int64_t element) {
  return static_cast<char*>(flat.data(list, tensor)) + element * size_of(flat.type(list, tensor));
}

}  // namespace amp_wrapper::cpu
