// What a launch is handed by value, and how it is filled. Read by nvcc and by g++; knows nothing of torch.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>

#include "../common/planner.h"

namespace amp_wrapper::cuda {

// CUDA 13 passes 32,764 bytes everywhere; 4,096 are left to older toolkits.
#if defined(AMP_ARGUMENT_BYTES)
constexpr int kArgumentBytes = AMP_ARGUMENT_BYTES;
#elif defined(CUDART_VERSION) && CUDART_VERSION < 13000
constexpr int kArgumentBytes = 4096;
#else
constexpr int kArgumentBytes = 32764;
#endif
// for the other arguments of a kernel, and alignment
constexpr int kReserved = 128;

// An entry in a table.
template <int kLists>
struct Slot {
  void* data[kLists];
  std::int64_t count;
  std::uint8_t types[kLists];
};

// A launch of planner.h for tensors in kLists lists. More entries than an argument holds stand in a table in the memory of the
// device, and the arrays are empty then: one launch, whatever the number of tensors.
template <int kLists>
struct Work {
  static constexpr int kMost = (kArgumentBytes - kReserved) / (kLists * (8 + 1) + 8 + 4);

  const Slot<kLists>* table;
  const std::int32_t* table_starts;
  void* data[kLists][kMost];
  std::int64_t counts[kMost];
  std::int32_t starts[kMost + 1];
  std::int32_t entries;
  // of all entries
  std::int32_t chunks;
  std::uint8_t types[kLists][kMost];
};

// The chunks of each of some tensors that stand one after the other, or a table of them.
struct Segments {
  static constexpr int kMost = (kArgumentBytes - kReserved) / 4 - 2;

  const std::int32_t* table;
  std::int32_t starts[kMost + 1];
  std::int32_t count;
};

static_assert(sizeof(Work<1>) + 64 <= kArgumentBytes && sizeof(Work<2>) + 64 <= kArgumentBytes);
static_assert(sizeof(Work<3>) + 64 <= kArgumentBytes && sizeof(Segments) + 64 <= kArgumentBytes);

// A grid has at most 2^31 - 1 blocks.
constexpr std::int64_t kMostChunks = std::numeric_limits<std::int32_t>::max();

// Takes bytes to the device without waiting for it, and says where they are. Without one, there are no tables but more
// launches.
using Upload = std::function<const char*(const char* bytes, std::size_t size)>;

// Bytes that become a table: a run of things of one type after the other, each where that type may stand.
class Table {
 public:
  template <typename T>
  std::size_t add(const T* first, std::size_t count) {
    const std::size_t at = (bytes_.size() + alignof(T) - 1) / alignof(T) * alignof(T);
    bytes_.resize(at + count * sizeof(T));
    if (count > 0) std::memcpy(bytes_.data() + at, first, count * sizeof(T));
    return at;
  }
  template <typename T>
  std::size_t add(const std::vector<T>& things) {
    return add(things.data(), things.size());
  }

  const char* data() const { return bytes_.data(); }
  std::size_t size() const { return bytes_.size(); }

 private:
  std::vector<char> bytes_;
};

// Calls launch(work, chunks of earlier launches) until every element has had its turn. operand(list, tensor, first element,
// &type) gives the pointer.
template <int kLists, typename O, typename F>
void for_launches(const std::vector<std::int64_t>& counts, O operand, F launch, const Upload& upload = {}) {
  constexpr std::int64_t kMost = Work<kLists>::kMost;
  std::vector<Launch> launches = plan(counts, kMost, kMostChunks);
  const bool has_table = upload && launches.size() > 1;
  if (has_table) launches = plan(counts, std::numeric_limits<std::int64_t>::max(), kMostChunks);
  // 32 KB: too much for some stacks
  const auto work = std::make_unique<Work<kLists>>();
  std::int64_t before = 0;
  for (const Launch& planned : launches) {
    work->entries = static_cast<std::int32_t>(planned.entries.size());
    work->chunks = static_cast<std::int32_t>(planned.chunks());
    std::vector<Slot<kLists>> slots(has_table ? planned.entries.size() : 0);
    for (std::int32_t i = 0; i < work->entries; ++i) {
      const Entry& entry = planned.entries[i];
      if (has_table) {
        slots[i].count = entry.count;
      } else {
        work->counts[i] = entry.count;
        work->starts[i] = static_cast<std::int32_t>(planned.starts[i]);
      }
      for (int list = 0; list < kLists; ++list) {
        Type type = Type::kFloat;
        void* data = operand(list, entry.tensor, entry.begin, &type);
        (has_table ? slots[i].data[list] : work->data[list][i]) = data;
        (has_table ? slots[i].types[list] : work->types[list][i]) = static_cast<std::uint8_t>(type);
      }
    }
    if (has_table) {
      Table table;
      const std::size_t first = table.add(slots);
      const std::size_t starts = table.add(std::vector<std::int32_t>(planned.starts.begin(), planned.starts.end()));
      const char* there = upload(table.data(), table.size());
      work->table = reinterpret_cast<const Slot<kLists>*>(there + first);
      work->table_starts = reinterpret_cast<const std::int32_t*>(there + starts);
    } else {
      work->starts[work->entries] = work->chunks;
    }
    launch(static_cast<const Work<kLists>&>(*work), before);
    before += planned.chunks();
  }
}

// Calls launch(segments, first chunk, first tensor) until every tensor, also an empty one, has had its turn.
template <typename F>
void for_segments(const std::vector<std::int64_t>& counts, F launch, const Upload& upload = {}) {
  const auto segments = std::make_unique<Segments>();
  const auto size = static_cast<std::int64_t>(counts.size());
  const bool has_table = upload && size > Segments::kMost;
  std::vector<std::int32_t> starts;
  std::int64_t before = 0;
  for (std::int64_t first = 0; first < size; first += segments->count) {
    segments->count = static_cast<std::int32_t>(has_table ? size : std::min<std::int64_t>(Segments::kMost, size - first));
    const std::int64_t base = before;
    starts.assign(1, 0);
    for (std::int32_t i = 0; i < segments->count; ++i) {
      before += chunks_of(counts[first + i]);
      starts.push_back(static_cast<std::int32_t>(before - base));
    }
    if (has_table) {
      const auto* bytes = reinterpret_cast<const char*>(starts.data());
      segments->table = reinterpret_cast<const std::int32_t*>(upload(bytes, starts.size() * sizeof(std::int32_t)));
    } else {
      std::copy(starts.begin(), starts.end(), segments->starts);
    }
    launch(static_cast<const Segments&>(*segments), base, first);
  }
}

inline std::int64_t all_chunks(const std::vector<std::int64_t>& counts) {
  std::int64_t chunks = 0;
  for (const std::int64_t count : counts) chunks += chunks_of(count);
  return chunks;
}

}  // namespace amp_wrapper::cuda
