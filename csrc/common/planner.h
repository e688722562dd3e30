// How lists of tensors become pieces of work. Plain C++, so that it can be tested with sizes that no memory holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace amp_wrapper {

// The order of a sum of squares, the same on every device and with any number of threads:
//   a block of 1024 elements, as 16 rows of 64 lanes, is summed row after row, then lane i with i + 32, i + 16, ... i + 1;
//   the blocks of a chunk, and then the chunks of all tensors, are summed in pairs of neighbours, and those in pairs, and so
//   on; what is missing from a full tree counts as zero.
// The elements of a tensor are counted as they lie in memory. A chunk is the piece of work of one thread or one CUDA block.
constexpr int kLanes = 64;
constexpr int kRows = 16;
constexpr int kBlock = kLanes * kRows;
constexpr int kBlocks = 32;
constexpr std::int64_t kChunk = std::int64_t{kBlock} * kBlocks;

constexpr std::int64_t chunks_of(std::int64_t count) { return (count + kChunk - 1) / kChunk; }

// The chunks of tensors one after the other. Tensors without elements have none.
class Plan {
 public:
  explicit Plan(const std::vector<std::int64_t>& counts) {
    for (const std::int64_t count : counts) {
      starts_.push_back(starts_.back() + chunks_of(count));
      costs_.push_back(costs_.back() + count + kTensorCost);
    }
  }

  std::int64_t chunks() const { return starts_.back(); }
  // in elements
  std::int64_t cost() const { return costs_.back(); }
  std::int64_t start(std::size_t tensor) const { return starts_[tensor]; }
  std::size_t tensor_of(std::int64_t chunk) const { return last_before(starts_, chunk); }

  // Where the first `part` of `parts` runs of chunks of about equal cost end.
  std::int64_t bound(std::int64_t part, std::int64_t parts) const {
    if (part == parts) return chunks();
    const std::int64_t cost = costs_.back() / parts * part;
    const std::size_t tensor = last_before(costs_, cost);
    return std::min(starts_[tensor] + (cost - costs_[tensor]) / kChunk, starts_[tensor + 1]);
  }

 private:
  // what a tensor costs beside its elements
  static constexpr std::int64_t kTensorCost = 64;

  // The last tensor whose number is not above `value`, which is less than that of all.
  static std::size_t last_before(const std::vector<std::int64_t>& sorted, std::int64_t value) {
    return static_cast<std::size_t>(std::upper_bound(sorted.begin(), sorted.end(), value) - sorted.begin()) - 1;
  }

  // of the tensors before each, and of all
  std::vector<std::int64_t> starts_{0};
  std::vector<std::int64_t> costs_{0};
};

}  // namespace amp_wrapper
