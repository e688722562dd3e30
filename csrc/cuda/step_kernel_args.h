// What the kernels of an optimizer step are handed. Read by nvcc and by g++; knows nothing of torch.
#pragma once

#include "../common/step_prologue.h"
#include "kernel_args.h"

namespace amp_wrapper::cuda {

// The lists of a launch. The row of a parameter stands beside its tensors as if it were one; the last but one may be missing
// where there is no partner, and so may the maxima of Adam and the momentum of SGD: the pointer is null then. The type of a
// partner says what it is: kShort for a remainder, and the type of the copy otherwise.
enum AdamList { kAdamGradient, kAdamParameter, kAdamFirst, kAdamSecond, kAdamMost, kAdamPartner, kAdamRow, kAdamLists };
enum SgdList { kSgdGradient, kSgdParameter, kSgdBuffer, kSgdPartner, kSgdRow, kSgdLists };

static_assert(sizeof(Work<kAdamLists>) + 64 <= kArgumentBytes && sizeof(Work<kSgdLists>) + 64 <= kArgumentBytes);

// A prologue for some parameters: bytes, in the argument or in a table, that hold the hyper-parameters of the groups, their
// rates (null for that of the group), the step counts, and the group of each parameter.
struct PrologueWork {
  // for everything else in here
  static constexpr int kOther = 256;
  static constexpr int kBytes = (kArgumentBytes - kReserved - kOther) / 8 * 8;

  Decide decide;
  const char* table;
  float* decision;
  float* rows;
  Kind kind;
  std::int32_t groups;
  std::int32_t parameters;
  // the scale moves once, however many launches there are
  bool decides;
  alignas(8) char bytes[kBytes];

  AMP_INLINE const char* begin() const { return table != nullptr ? table : bytes; }
  AMP_INLINE const double* hyper(std::int32_t group) const {
    return reinterpret_cast<const double*>(begin()) + static_cast<std::int64_t>(group) * kHyper;
  }
  AMP_INLINE float* const* rates() const { return reinterpret_cast<float* const*>(hyper(groups)); }
  AMP_INLINE float* const* steps() const { return rates() + groups; }
  AMP_INLINE const std::int32_t* group_of() const { return reinterpret_cast<const std::int32_t*>(steps() + parameters); }
};

static_assert(sizeof(PrologueWork) + 64 <= kArgumentBytes && sizeof(void*) == 8 && sizeof(double) == 8);

// What of a step is known on the host, in the order of the parameters.
struct Parameters {
  // the rows of the groups, one after the other
  const double* hyper;
  // of each group, null for none
  std::vector<const float*> rates;
  std::vector<float*> steps;
  // indices into hyper, in bounds
  const std::int64_t* groups;
};

// Calls launch(prologue) until every parameter has had its turn, and at least once; `prologue` holds what is the same for all.
// Without an upload there is a launch for each run of parameters whose groups and steps fit into the argument.
template <typename F>
void for_prologues(PrologueWork& prologue, const Parameters& all, F launch, const Upload& upload = {}) {
  constexpr std::size_t kGroupBytes = kHyper * sizeof(double) + sizeof(void*);
  constexpr std::size_t kParameterBytes = sizeof(void*) + sizeof(std::int32_t);
  static_assert(kGroupBytes + kParameterBytes <= PrologueWork::kBytes);
  const std::size_t size = all.steps.size();
  float* rows = prologue.rows;
  std::vector<double> hyper;
  std::vector<const float*> rates;
  std::vector<std::int32_t> groups;
  // where a group stands in this launch; groups that no parameter has are left out
  std::vector<std::int32_t> place;
  // takes parameters from `first` on, as many as `most_bytes` hold, and returns where it ended
  const auto collect = [&](std::size_t first, std::size_t most_bytes) {
    hyper.clear();
    rates.clear();
    groups.clear();
    place.assign(all.rates.size(), -1);
    std::size_t used = 0;
    for (std::size_t i = first; i < size; ++i) {
      const std::int64_t group = all.groups[i];
      const bool is_new = place[group] < 0;
      used += kParameterBytes + (is_new ? kGroupBytes : 0);
      if (used > most_bytes) return i;
      if (is_new) {
        place[group] = static_cast<std::int32_t>(rates.size());
        rates.push_back(all.rates[group]);
        hyper.insert(hyper.end(), all.hyper + group * kHyper, all.hyper + (group + 1) * kHyper);
      }
      groups.push_back(place[group]);
    }
    return size;
  };
  std::size_t first = 0;
  do {
    std::size_t end = collect(first, PrologueWork::kBytes);
    const bool has_table = end < size && upload;
    if (has_table) end = collect(first, std::numeric_limits<std::size_t>::max());
    Table table;
    table.add(hyper);
    table.add(rates);
    table.add(all.steps.data() + first, end - first);
    table.add(groups);
    prologue.table = has_table ? upload(table.data(), table.size()) : nullptr;
    if (!has_table && table.size() > 0) std::memcpy(prologue.bytes, table.data(), table.size());
    prologue.groups = static_cast<std::int32_t>(rates.size());
    prologue.parameters = static_cast<std::int32_t>(end - first);
    prologue.rows = rows + first * kRow;
    prologue.decides = end == size;
    launch(static_cast<const PrologueWork&>(prologue));
    first = end;
  } while (first < size);
}

}  // namespace amp_wrapper::cuda
