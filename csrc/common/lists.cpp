#include "lists.h"

#include <c10/util/Exception.h>

namespace amp_wrapper {
namespace {

Type type_of(const List& list, const at::Tensor& tensor, std::size_t index) {
  const c10::ScalarType type = tensor.scalar_type();
  if (type == at::kFloat) return Type::kFloat;
  if (type == at::kHalf) return Type::kHalf;
  if (type == at::kBFloat16) return Type::kBfloat;
  TORCH_CHECK_VALUE(type == at::kShort && list.shorts, list.name, "[", index, "] has dtype ", type,
                    ": the compiled ops take float32, float16 and bfloat16.");
  return Type::kShort;
}

// Whether elements that pair up lie at the same offsets. Strides of dimensions with one element say nothing.
bool have_one_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return true;
  for (std::int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != 1 && a.stride(i) != b.stride(i)) return false;
  }
  return a.is_non_overlapping_and_dense() && b.is_non_overlapping_and_dense();
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Name& name) {
  out << name.argument;
  return name.index < 0 ? out : out << "[" << name.index << "]";
}

Lists::Lists(c10::Device device, std::initializer_list<List> lists, OptionalTensor flag) {
  const List& first = *lists.begin();
  const std::size_t size = first.tensors.size();
  std::vector<at::MaterializedITensorListRef> found;
  for (const List& list : lists) {
    TORCH_CHECK_VALUE(list.tensors.size() == size || (list.optional && list.tensors.empty()), first.name, " has ", size,
                      " tensors and ", list.name, " ", list.tensors.size(), ": the lists must pair up.");
    found.push_back(list.tensors.materialize());
    for (std::size_t i = 0; i < list.tensors.size(); ++i) {
      const at::Tensor& tensor = found.back()[i];
      const at::Tensor& partner = found.front()[i];
      TORCH_CHECK_VALUE(tensor.device() == device, list.name, "[", i, "] is on ", tensor.device(),
                        ": all tensors of a call lie on ", device, ".");
      type_of(list, tensor, i);
      TORCH_CHECK_VALUE(tensor.sizes() == partner.sizes(), first.name, "[", i, "] has shape ", partner.sizes(), " and ",
                        list.name, "[", i, "] ", tensor.sizes(), ".");
      TORCH_CHECK_VALUE(have_one_layout(partner, tensor), first.name, "[", i, "] has strides ", partner.strides(), " and ",
                        list.name, "[", i, "] ", tensor.strides(), ": tensors without gaps, laid out alike, are expected.");
    }
  }
  count_version(flag);
  for (const at::Tensor& tensor : found.front()) counts_.push_back(tensor.numel());
  for (const List& list : lists) {
    const at::MaterializedITensorListRef& tensors = found[operands_.size()];
    std::vector<Operand>& operands = operands_.emplace_back(size, Operand{nullptr, Type::kFloat});
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = tensors[i];
      if (list.unless_in >= 0 && tensor.is_same(found[list.unless_in][i])) continue;
      if (list.written) count_version(tensor);
      // mutable data would end the sharing of copy-on-write memory
      void* data = list.written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
      operands[i] = {static_cast<char*>(data), type_of(list, tensor, i)};
    }
  }
}

c10::Device device_of(c10::DeviceType type, TensorList tensors,
                      std::initializer_list<const std::optional<at::Tensor>*> scalars) {
  c10::Device device = type;
  for (const auto* scalar : scalars) {
    if (scalar->has_value()) device = (*scalar)->device();
  }
  if (!tensors.empty()) device = tensors.front().device();
  TORCH_CHECK_VALUE(device.type() == type, "The first tensor is on ", device, " and others on a device of type ", type,
                    ": all tensors of a call lie on one device.");
  return device;
}

void* check_scalar(Name name, const at::Tensor& scalar, c10::Device device, c10::ScalarType type) {
  TORCH_CHECK_VALUE(scalar.numel() == 1 && scalar.scalar_type() == type && scalar.device() == device, name, " has shape ",
                    scalar.sizes(), " and dtype ", scalar.scalar_type(), " on ", scalar.device(), ": one element of ", type,
                    " on ", device, " is expected.");
  return scalar.mutable_data_ptr();
}

void check_table(const char* name, const at::Tensor& table, at::IntArrayRef shape, c10::ScalarType type, c10::Device device) {
  TORCH_CHECK_VALUE(table.scalar_type() == type && table.sizes() == shape && table.is_contiguous() && table.device() == device,
                    name, " has shape ", table.sizes(), " and dtype ", table.scalar_type(), " on ", table.device(), ": ", shape,
                    " of ", type, " on ", device, ", contiguous, is expected.");
}

void count_version(const at::Tensor& tensor) { tensor.unsafeGetTensorImpl()->bump_version(); }

void count_version(OptionalTensor tensor) {
  if (tensor.has_value()) count_version(*tensor);
}

}  // namespace amp_wrapper
