// The planner of csrc/common for Python's ctypes: results go into arrays that the caller made large enough.

#include "../../csrc/cuda/kernel_args.h"

using namespace amp_wrapper;

extern "C" {

std::int64_t chunk_size() { return kChunk; }
std::int64_t most_chunks() { return cuda::kMostChunks; }

// Rows of (launch, tensor, begin, count, chunks of the launch before it); returns how many.
std::int64_t plan_rows(const std::int64_t* counts, std::int64_t size, std::int64_t most_entries, std::int64_t most_chunks,
                       std::int64_t* rows, std::int64_t room) {
  std::int64_t used = 0;
  std::int64_t launch = 0;
  for (const Launch& planned : plan({counts, counts + size}, most_entries, most_chunks)) {
    for (std::size_t i = 0; i < planned.entries.size(); ++i) {
      if (used < room) {
        const Entry& entry = planned.entries[i];
        const std::int64_t row[] = {launch, entry.tensor, entry.begin, entry.count, planned.starts[i]};
        std::copy(row, row + 5, rows + 5 * used);
      }
      ++used;
    }
    ++launch;
  }
  return used;
}

int most_tensors(int lists) {
  return lists == 1 ? cuda::Work<1>::kMost : lists == 2 ? cuda::Work<2>::kMost : cuda::Work<3>::kMost;
}

// Launches of an op with that many lists, and of the second kernel of a norm.
int launches_of(const std::int64_t* counts, std::int64_t size, int lists) {
  int launches = 0;
  const auto operand = [](int, std::int64_t, std::int64_t, Type*) -> void* { return nullptr; };
  const auto count = [&](const auto&, std::int64_t) { ++launches; };
  const std::vector<std::int64_t> all(counts, counts + size);
  if (lists == 1) cuda::for_launches<1>(all, operand, count);
  if (lists == 2) cuda::for_launches<2>(all, operand, count);
  if (lists == 3) cuda::for_launches<3>(all, operand, count);
  return launches;
}

int find_entry(const std::int64_t* starts, int entries, std::int64_t chunk) { return entry_of(starts, entries, chunk); }

// The bounds of `parts` runs of the chunks of one launch, parts + 1 numbers; returns the number of chunks.
std::int64_t split_bounds(const std::int64_t* counts, std::int64_t size, std::int64_t parts, std::int64_t* bounds) {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  const std::vector<Launch> launches = plan({counts, counts + size}, kAny, kAny);
  if (launches.empty()) return 0;
  const std::vector<std::int64_t> found = split(launches.front(), parts);
  std::copy(found.begin(), found.end(), bounds);
  return launches.front().chunks();
}

// Rows of (first tensor, first chunk, tensors, chunks) for each launch of the second kernel of a norm; returns how many.
std::int64_t segment_rows(const std::int64_t* counts, std::int64_t size, std::int64_t* rows) {
  std::int64_t used = 0;
  cuda::for_segments({counts, counts + size}, [&](const cuda::Segments& segments, std::int64_t base, std::int64_t first) {
    const std::int64_t row[] = {first, base, segments.count, segments.starts[segments.count]};
    std::copy(row, row + 4, rows + 4 * used++);
  });
  return used;
}
}
