#include "lists.h"

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <sstream>

namespace amp_wrapper {

std::string shape_of(at::IntArrayRef sizes) {
  // as Python writes a tuple
  std::ostringstream text;
  text << '(';
  for (std::size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

std::string shape_of(const at::Tensor& tensor) { return shape_of(tensor.sizes()); }

// torch's C++ names for types are not those that users write.
std::string name_of(c10::ScalarType type) { return "torch." + std::string(c10::getDtypeNames(type).first); }

namespace {

std::optional<Type> type_of(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return Type::kFloat;
    case c10::ScalarType::Half:
      return Type::kHalf;
    case c10::ScalarType::BFloat16:
      return Type::kBfloat;
    case c10::ScalarType::Short:
      return Type::kShort;
    default:
      return std::nullopt;
  }
}

// torch would say so too, but at the first write, when others were made already.
bool is_writable(const at::Tensor& tensor) { return !tensor.is_inference() || c10::InferenceMode::is_enabled(); }
constexpr const char* kNotWritable = " was made in inference mode: outside of it, it cannot be written to.";

// A storage that was resized to nothing leaves a tensor with elements and no place for them.
bool has_memory(const at::Tensor& tensor) { return tensor.numel() == 0 || tensor.storage().nbytes() > 0; }
constexpr const char* kNoMemory = " has no memory: its storage was freed (resized to 0).";

Type check_one(const List& list, std::size_t index, const at::Tensor& tensor, c10::Device device) {
  TORCH_CHECK_VALUE(tensor.layout() == c10::Layout::Strided, list.name, "[", index,
                    "] is not dense: give the values of a sparse tensor, coalesced.");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.device() == device, list.name, "[", index, "] is on ", tensor.device(),
                              " and the first tensor on ", device, ": one call of the compiled op serves one device.");
  const std::optional<Type> type = type_of(tensor.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(type.has_value() && (list.shorts || *type != Type::kShort), list.name, "[", index, "] has dtype ",
                              name_of(tensor.scalar_type()), ": the compiled op takes float32, float16 and bfloat16.");
  return *type;
}

// The memory of a tensor without gaps.
struct Span {
  std::uintptr_t begin;
  std::uintptr_t end;
  std::size_t index;

  // in full, so that the error names the same tensors as that of checks.py
  bool operator<(const Span& other) const {
    return std::tie(begin, end, index) < std::tie(other.begin, other.end, other.index);
  }
};

template <typename Operands>
std::vector<Span> spans_of(const Operands& operands) {
  std::vector<Span> spans;
  spans.reserve(operands.size());
  for (std::size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].bytes == 0 || !operands[i].dense) continue;
    const auto begin = reinterpret_cast<std::uintptr_t>(operands[i].data);
    spans.push_back({begin, begin + static_cast<std::uintptr_t>(operands[i].bytes), i});
  }
  if (!std::is_sorted(spans.begin(), spans.end())) std::sort(spans.begin(), spans.end());
  return spans;
}

c10::Device device_of(at::TensorList tensors, at::ArrayRef<Scalar> scalars) {
  if (!tensors.empty()) return tensors[0].device();
  c10::Device device = c10::kCPU;
  for (const Scalar& scalar : scalars) {
    if (scalar.tensor.has_value()) device = scalar.tensor->device();
  }
  return device;
}

}  // namespace

void Flat::check_overlap(const List* lists) const {
  if (std::none_of(lists, lists + operands_.size(), [](const List& list) { return list.written; })) return;
  // most steps find their tensors where they were: what shared no memory then shares none now
  constexpr std::size_t kWidths = 8;
  thread_local std::vector<std::uintptr_t> apart[kWidths];
  std::vector<std::uintptr_t> places;
  places.reserve(operands_.size() * (2 * size() + 1));
  for (std::size_t list = 0; list < operands_.size(); ++list) {
    places.push_back(lists[list].written);
    for (const Operand& operand : operands_[list]) {
      places.push_back(reinterpret_cast<std::uintptr_t>(operand.data));
      places.push_back(operand.dense ? static_cast<std::uintptr_t>(operand.bytes) : 0);
    }
  }
  std::vector<std::uintptr_t>& known = apart[operands_.size() % kWidths];
  if (places == known) return;
  bool shares = false;
  std::vector<std::vector<Span>> spans;
  spans.reserve(operands_.size());
  for (const auto& operands : operands_) spans.push_back(spans_of(operands));
  for (std::size_t written = 0; written < operands_.size(); ++written) {
    if (!lists[written].written) continue;
    const char* name = lists[written].name;
    const std::vector<Span>& targets = spans[written];
    for (std::size_t i = 1; i < targets.size(); ++i) {
      const auto [first, second] = std::minmax(targets[i - 1].index, targets[i].index);
      TORCH_CHECK_VALUE(targets[i - 1].end <= targets[i].begin, name, "[", first, "] and ", name, "[", second,
                        "] share memory: give each tensor that is written once.");
    }
    for (std::size_t other = 0; other < operands_.size(); ++other) {
      if (other == written) continue;
      // both are in order, and targets are disjoint, so their ends are in order too
      auto target = targets.begin();
      for (const Span& source : spans[other]) {
        while (target != targets.end() && target->end <= source.begin) ++target;
        for (auto hit = target; hit != targets.end() && hit->begin < source.end; ++hit) {
          // what is idle beside another list is not written
          shares = true;
          const bool twice =
              lists[other].written && !operands_[other][source.index].idle && !operands_[written][hit->index].idle;
          const bool same = !twice && hit->index == source.index && hit->begin == source.begin && hit->end == source.end &&
                            operands_[other][source.index].type == operands_[written][hit->index].type &&
                            lists[other].tensors[source.index].strides() == lists[written].tensors[hit->index].strides();
          TORCH_CHECK_VALUE(same, lists[other].name, "[", source.index, "] and ", name, "[", hit->index,
                            "] share memory, but are not the same tensor: what is written would be read.");
        }
      }
    }
  }
  if (!shares) known = std::move(places);
}

// A scalar that lies in what is written would change while it is read, and a flag in what is read would be read.
void Flat::check_apart(const List* lists, const Scalar& scalar) const {
  if (!scalar.tensor.has_value()) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(scalar.tensor->const_data_ptr());
  const std::uintptr_t end = begin + scalar.tensor->numel() * scalar.tensor->itemsize();
  for (std::size_t list = 0; list < operands_.size(); ++list) {
    if (!lists[list].written && !scalar.written) continue;
    for (std::size_t i = 0; i < operands_[list].size(); ++i) {
      const Operand& operand = operands_[list][i];
      const auto place = reinterpret_cast<std::uintptr_t>(operand.data);
      const bool apart = !operand.dense || place + static_cast<std::uintptr_t>(operand.bytes) <= begin || end <= place;
      TORCH_CHECK_VALUE(apart || operand.bytes == 0, scalar.name, " and ", lists[list].name, "[", i,
                        "] share memory: give each memory of its own.");
    }
  }
}

Flat::Flat(const List* lists, std::size_t width, c10::DeviceType device_type, at::ArrayRef<Scalar> scalars)
    : device_(device_of(lists[0].tensors, scalars)) {
  const List& first = lists[0];
  const std::size_t size = first.tensors.size();
  for (std::size_t which = 0; which < width; ++which) {
    const List& list = lists[which];
    TORCH_CHECK_VALUE(list.tensors.size() == size, first.name, " has ", size, " tensors and ", list.name, " ",
                      list.tensors.size(), ": the lists must pair up.");
  }
  if (size == 0) return;
  TORCH_CHECK_NOT_IMPLEMENTED(device_.type() == device_type, first.name, "[0] is on ", device_,
                              ": one call of the compiled op serves one device.");

  // one pass over the tensors, which lie all over the memory
  counts_.reserve(size);
  operands_.resize(width);
  for (auto& operands : operands_) operands.reserve(size);
  std::vector<std::size_t> indirect;
  for (std::size_t i = 0; i < size; ++i) {
    const at::Tensor& model = first.tensors[i];
    counts_.push_back(model.numel());
    bool contiguous = true;
    bool same_order = true;
    bool negative = false;
    for (std::size_t which = 0; which < width; ++which) {
      const List& list = lists[which];
      const at::Tensor& tensor = list.tensors[i];
      TORCH_CHECK_VALUE(which == 0 || tensor.sizes() == model.sizes(), first.name, "[", i, "] has shape ", shape_of(model),
                        " and ", list.name, "[", i, "] ", shape_of(tensor), ".");
      const Type type = check_one(list, i, tensor, device_);
      const bool dense = tensor.is_non_overlapping_and_dense();
      TORCH_CHECK_VALUE(!list.written || is_writable(tensor), list.name, "[", i, "]", kNotWritable);
      TORCH_CHECK_VALUE(!list.written || dense || at::has_internal_overlap(tensor) != at::MemOverlap::Yes, list.name, "[", i,
                        "] has elements that share memory (an expanded tensor): it cannot be written to.");
      contiguous = contiguous && tensor.is_contiguous();
      same_order = same_order && dense && (contiguous || tensor.strides() == model.strides());
      negative = negative || tensor.is_neg();
      // mutable data of what is only read would copy copy-on-write tensors; of what is written, it ends their sharing
      void* data = list.written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
      TORCH_CHECK_VALUE(has_memory(tensor), list.name, "[", i, "]", kNoMemory);
      const bool idle = list.idle_beside != nullptr && tensor.is_same((*list.idle_beside)[i]);
      operands_[which].push_back({data, counts_[i] * size_of(type), type, dense, idle});
    }
    if (negative || !(contiguous || same_order)) indirect.push_back(i);
  }
  check_overlap(lists);
  for (const Scalar& scalar : scalars) check_apart(lists, scalar);

  for (std::size_t which = 0; which < width; ++which) {
    if (!lists[which].written) continue;
    for (std::size_t i = 0; i < size; ++i) {
      // a copy of a tensor onto itself writes nothing
      if (!operands_[which][i].idle) bump_version(lists[which].tensors[i]);
    }
  }
  for (const std::size_t i : indirect) {
    for (std::size_t which = 0; which < width; ++which) {
      const List& list = lists[which];
      const at::Tensor& tensor = list.tensors[i];
      at::Tensor temporary;
      if (list.read) {
        temporary = tensor.resolve_neg().clone(at::MemoryFormat::Contiguous);
      } else {
        temporary = at::empty(tensor.sizes(), tensor.options());
      }
      if (list.written && !operands_[which][i].idle) back_.emplace_back(tensor, temporary);
      operands_[which][i].data = temporary.mutable_data_ptr();
      temporaries_.push_back(std::move(temporary));
    }
  }
}

void Flat::finish() const {
  // the versions were counted when the lists were checked
  const at::AutoDispatchBelowADInplaceOrView once;
  for (const auto& [tensor, temporary] : back_) tensor.copy_(temporary);
}

void check_own(const char* name, const at::Tensor& tensor, bool written) {
  TORCH_CHECK_VALUE(has_memory(tensor), name, kNoMemory);
  TORCH_CHECK_VALUE(!written || is_writable(tensor), name, kNotWritable);
}

void check_scalar(const char* name, const at::Tensor& scalar, c10::Device device, c10::ScalarType type, bool written) {
  TORCH_CHECK_VALUE(!scalar.is_neg(), name, " has its negative bit set: give ", name, ".resolve_neg().");
  TORCH_CHECK_VALUE(scalar.numel() == 1 && scalar.scalar_type() == type, name, " has shape ", shape_of(scalar), " and dtype ",
                    name_of(scalar.scalar_type()), ": one element of ", name_of(type), " is expected.");
  TORCH_CHECK_NOT_IMPLEMENTED(scalar.device() == device, name, " is on ", scalar.device(), " and the first tensor on ", device,
                              ": one call of the compiled op serves one device.");
  check_own(name, scalar, written);
}

void check_scalar(const char* name, const std::optional<at::Tensor>& scalar, c10::Device device, bool written) {
  if (scalar.has_value()) check_scalar(name, *scalar, device, c10::ScalarType::Float, written);
}

void bump_version(const at::Tensor& tensor) { tensor.unsafeGetTensorImpl()->bump_version(); }

void bump_version(const std::optional<at::Tensor>& tensor) {
  if (tensor.has_value()) bump_version(*tensor);
}

Flat check_call(std::initializer_list<List> lists, c10::DeviceType device_type, std::initializer_list<Scalar> scalars) {
  const c10::Device device = device_of(lists.begin()->tensors, scalars);
  for (const Scalar& scalar : scalars) check_scalar(scalar.name, scalar.tensor, device, scalar.written);
  Flat flat(lists, device_type, scalars);
  for (const Scalar& scalar : scalars) {
    if (scalar.written && flat.size() > 0) bump_version(scalar.tensor);
  }
  return flat;
}

void check_table(const char* name, const at::Tensor& table, at::IntArrayRef shape, c10::ScalarType type, c10::Device device,
                 bool written) {
  TORCH_CHECK_VALUE(table.scalar_type() == type && table.sizes() == shape && table.is_contiguous(), name, " has shape ",
                    shape_of(table), " and dtype ", name_of(table.scalar_type()), ": ", shape_of(shape), " of ", name_of(type),
                    " is expected.");
  TORCH_CHECK_VALUE(!table.is_neg(), name, " has its negative bit set: give ", name, ".resolve_neg().");
  TORCH_CHECK_NOT_IMPLEMENTED(table.device() == device, name, " is on ", table.device(), " and the first tensor on ", device,
                              ": one call of the compiled op serves one device.");
  check_own(name, table, written);
}

Flat check_exponents(at::TensorList tensors, const at::Tensor& counts, const at::Tensor& largest, c10::DeviceType device_type) {
  const auto size = static_cast<std::int64_t>(tensors.size());
  const std::optional<at::Tensor> tables[] = {largest, counts};
  const Scalar scalars[] = {{"largest", tables[0], true}, {"counts", tables[1], true}};
  const c10::Device device = device_of(tensors, scalars);
  check_table("counts", counts, {size, kExponents}, at::kLong, device, true);
  check_table("largest", largest, {size}, at::kFloat, device, true);
  const auto* first = static_cast<const char*>(counts.const_data_ptr());
  const auto* second = static_cast<const char*>(largest.const_data_ptr());
  TORCH_CHECK_VALUE(first + counts.nbytes() <= second || second + largest.nbytes() <= first,
                    "counts and largest share memory: give each memory of its own.");
  Flat flat({{"tensors", tensors}}, device_type, scalars);
  if (size > 0) {
    for (const at::Tensor* written : {&counts, &largest}) bump_version(*written);
  }
  return flat;
}

std::tuple<at::Tensor, at::Tensor> new_norms(at::TensorList tensors, c10::Device device, bool per_tensor) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  const auto count = per_tensor ? static_cast<std::int64_t>(tensors.size()) : 0;
  return {at::empty({}, options), at::empty({count}, options)};
}

void check_refresh_types(at::TensorList weights, at::TensorList masters) {
  for (std::size_t i = 0; i < weights.size(); ++i) {
    TORCH_CHECK_VALUE(weights[i].scalar_type() == at::kHalf || weights[i].scalar_type() == at::kBFloat16, "weights[", i,
                      "] has dtype ", name_of(weights[i].scalar_type()), ": float16 or bfloat16 is expected.");
  }
  for (std::size_t i = 0; i < masters.size(); ++i) {
    TORCH_CHECK_VALUE(masters[i].scalar_type() == at::kFloat, "masters[", i, "] has dtype ", name_of(masters[i].scalar_type()),
                      ": float32 is expected.");
  }
}

ScaleUpdate scale_rule(double growth_factor, double backoff_factor, std::int64_t growth_interval, std::int64_t hysteresis,
                       std::optional<double> min_scale, std::optional<double> max_scale) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  return ScaleUpdate{
      static_cast<float>(growth_factor),
      static_cast<float>(backoff_factor),
      min_scale.has_value() ? static_cast<float>(*min_scale) : std::numeric_limits<float>::min(),
      max_scale.has_value() ? static_cast<float>(*max_scale) : std::numeric_limits<float>::infinity(),
      static_cast<std::int32_t>(std::min(growth_interval, kMost)),
      static_cast<std::int32_t>(std::min(hysteresis, kMost)),
  };
}

void check_scale_state(const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& hysteresis_tracker,
                       const at::Tensor& found_inf) {
  const std::pair<const char*, const at::Tensor*> others[] = {
      {"growth_tracker", &growth_tracker}, {"hysteresis_tracker", &hysteresis_tracker}, {"found_inf", &found_inf}};
  for (const auto& [name, tensor] : others) {
    TORCH_CHECK_VALUE(tensor->device() == scale.device(), name, " is on ", tensor->device(), " and scale on ", scale.device(),
                      ": they belong on one device.");
  }
  check_scalar("scale", scale, scale.device(), at::kFloat, true);
  check_scalar("growth_tracker", growth_tracker, scale.device(), at::kInt, true);
  check_scalar("hysteresis_tracker", hysteresis_tracker, scale.device(), at::kInt, true);
  check_scalar("found_inf", found_inf, scale.device());
  for (const at::Tensor* state : {&scale, &growth_tracker, &hysteresis_tracker}) bump_version(*state);
}

}  // namespace amp_wrapper
