// How lists of tensors become pieces of work. Plain C++, so that it can be tested with sizes that no memory holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "element.h"

namespace amp_wrapper {

// The order of every sum of squares, the same on every device and with any number of threads:
//   a block of 1024 elements, as 16 rows of 64 lanes, is summed row after row, then lane i with i + 32, i + 16, ... i + 1;
//   the blocks of a tensor, and then the tensors of the list, are summed in pairs of neighbours, and those in pairs, and so
//   on; what is missing from a full tree counts as zero.
// The elements of a tensor without gaps are counted as they lie in memory; of others the last dimension runs first.
// A chunk, the piece of work of one thread or one CUDA block, is a whole subtree: 32 blocks.
constexpr int kLanes = 64;
constexpr int kRows = 16;
constexpr int kBlock = kLanes * kRows;
constexpr int kBlocks = 32;
constexpr std::int64_t kChunk = std::int64_t{kBlock} * kBlocks;

constexpr std::int64_t chunks_of(std::int64_t count) { return (count + kChunk - 1) / kChunk; }

// A run of elements of one tensor, beginning at a multiple of kChunk.
struct Entry {
  std::int64_t tensor;
  std::int64_t begin;
  std::int64_t count;
};

// What is worked on at once: entries, and the number of chunks before each (and, last, of all).
struct Launch {
  std::vector<Entry> entries;
  std::vector<std::int64_t> starts{0};

  std::int64_t chunks() const { return starts.back(); }
};

// Every element of every tensor in exactly one entry, in order. Tensors without elements have none, wherever they stand.
inline std::vector<Launch> plan(const std::vector<std::int64_t>& counts, std::int64_t most_entries, std::int64_t most_chunks) {
  std::vector<Launch> launches;
  Launch now;
  for (std::size_t tensor = 0; tensor < counts.size(); ++tensor) {
    for (std::int64_t begin = 0; begin < counts[tensor];) {
      if (static_cast<std::int64_t>(now.entries.size()) == most_entries || now.chunks() == most_chunks) {
        launches.push_back(std::move(now));
        now = Launch();
      }
      // compared in chunks: a product of chunks and elements could pass what 64 bits hold
      const std::int64_t room = most_chunks - now.chunks();
      const std::int64_t left = counts[tensor] - begin;
      const std::int64_t count = chunks_of(left) <= room ? left : room * kChunk;
      now.entries.push_back({static_cast<std::int64_t>(tensor), begin, count});
      now.starts.push_back(now.chunks() + chunks_of(count));
      begin += count;
    }
  }
  if (!now.entries.empty()) launches.push_back(std::move(now));
  return launches;
}

// The entry that holds a chunk: the last that begins at or before it.
template <typename Index>
AMP_INLINE int entry_of(const Index* starts, int entries, Index chunk) {
  int low = 0;
  int high = entries;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// What a tensor costs beside its elements, in elements.
constexpr std::int64_t kEntryCost = 64;

// Bounds of `parts` runs of chunks of about equal cost: chunk 0 first, all chunks last.
inline std::vector<std::int64_t> split(const Launch& launch, std::int64_t parts) {
  std::int64_t total = 0;
  for (const Entry& entry : launch.entries) total += entry.count + kEntryCost;
  std::vector<std::int64_t> bounds{0};
  std::int64_t before = 0;
  for (std::size_t i = 0; i < launch.entries.size(); ++i) {
    const std::int64_t cost = launch.entries[i].count + kEntryCost;
    while (static_cast<std::int64_t>(bounds.size()) < parts) {
      const std::int64_t wanted = total / parts * static_cast<std::int64_t>(bounds.size());
      if (wanted >= before + cost) break;
      const std::int64_t inside = std::max<std::int64_t>(wanted - before, 0) / kChunk;
      bounds.push_back(std::max(bounds.back(), launch.starts[i] + inside));
    }
    before += cost;
  }
  while (static_cast<std::int64_t>(bounds.size()) < parts) bounds.push_back(launch.chunks());
  bounds.push_back(launch.chunks());
  return bounds;
}

}  // namespace amp_wrapper
