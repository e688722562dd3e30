// The planner of csrc/common, and what launches get of it, for Python's ctypes: results go into arrays that the caller made
// large enough.

#include "../../csrc/cuda/kernel_args.h"

using namespace amp_wrapper;

namespace {

template <int kLists>
int launch_rows_of(const std::vector<std::int64_t>& counts, std::int64_t* rows) {
  std::vector<cuda::TensorSlot<kLists>> slots;
  const Plan plan(counts);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    slots.push_back({{}, counts[i], static_cast<std::int32_t>(plan.start(i)), static_cast<std::int32_t>(i), {}});
  }
  int launches = 0;
  cuda::for_launches(slots, {}, [&](const auto& work, unsigned blocks) {
    const std::int64_t row[] = {work.first, work.size, work.begin()[0].start, blocks};
    std::copy_n(row, 4, rows + 4 * launches++);
    return cudaGetLastError();
  });
  return launches;
}

}  // namespace

extern "C" {

std::int64_t chunk_size() { return kChunk; }

// The bounds of `parts` runs of chunks, parts + 1 numbers, and the chunks before each tensor.
void plan(const std::int64_t* counts, std::int64_t size, std::int64_t parts, std::int64_t* bounds, std::int64_t* starts) {
  const Plan plan({counts, counts + size});
  for (std::int64_t part = 0; part <= parts; ++part) bounds[part] = plan.bound(part, parts);
  for (std::int64_t i = 0; i < size; ++i) starts[i] = plan.start(i);
}

int most_tensors(int lists) {
  constexpr int kBytes = cuda::kMostBytes;
  return lists == 1   ? cuda::Work<cuda::TensorSlot<1>, kBytes>::kMost
         : lists == 2 ? cuda::Work<cuda::TensorSlot<2>, kBytes>::kMost
         : lists == 4 ? cuda::Work<cuda::TensorSlot<4>, kBytes>::kMost
                      : cuda::Work<cuda::TensorSlot<6>, kBytes>::kMost;
}

// Rows of (first tensor, tensors, chunks before, blocks) for each launch without a table; returns how many.
int launch_rows(const std::int64_t* counts, std::int64_t size, int lists, std::int64_t* rows) {
  const std::vector<std::int64_t> all(counts, counts + size);
  return lists == 1   ? launch_rows_of<1>(all, rows)
         : lists == 2 ? launch_rows_of<2>(all, rows)
         : lists == 4 ? launch_rows_of<4>(all, rows)
                      : launch_rows_of<6>(all, rows);
}
}
