// Lists of tensors as the kernels see them: memory without gaps, checked as a whole before anything is written.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <ostream>
#include <vector>

#include "element.h"

namespace amp_wrapper {

using OptionalTensor = const std::optional<at::Tensor>&;
// The tensors stay where torch keeps them: copies would count references.
using TensorList = const at::ITensorListRef&;

// An argument of an op.
struct List {
  const char* name;
  at::ITensorListRef tensors;
  bool written = false;
  // no tensors stand for none beside any of the others
  bool optional = false;
  // int16 as well
  bool shorts = false;
  // a tensor that is also that list's, one before this, stands for none
  int unless_in = -1;
};

class Lists {
 public:
  // Raises ValueError, with list and index, where a kernel would read or write wrong memory: tensors pair up, lie on `device`
  // and as their partners do, without gaps, and are float32, float16 or bfloat16. Counts the versions of what is written, and
  // that of `flag`.
  Lists(c10::Device device, std::initializer_list<List> lists, OptionalTensor flag = std::nullopt);

  std::size_t size() const { return counts_.size(); }
  const std::vector<std::int64_t>& counts() const { return counts_; }
  Operand operand(std::size_t list, std::size_t index) const { return operands_[list][index]; }
  Operand operand(std::size_t list, std::size_t index, std::int64_t element) const {
    const Operand whole = operands_[list][index];
    return {whole.data == nullptr ? nullptr : whole.at(element), whole.type};
  }

 private:
  std::vector<std::int64_t> counts_;
  std::vector<std::vector<Operand>> operands_;
};

// The device of the tensors, or of the first scalar where there are none, which has to be of `type`.
c10::Device device_of(c10::DeviceType type, TensorList tensors,
                      std::initializer_list<const std::optional<at::Tensor>*> scalars);

// An argument, or one of a list.
struct Name {
  Name(const char* argument, std::int64_t index = -1) : argument(argument), index(index) {}

  const char* argument;
  std::int64_t index;
};
std::ostream& operator<<(std::ostream& out, const Name& name);

// Raises ValueError unless the tensor is one element of `type` on `device`; returns where it lies.
void* check_scalar(Name name, const at::Tensor& scalar, c10::Device device, c10::ScalarType type = at::kFloat);
// null for none
template <typename T = float>
T* check_scalar(Name name, OptionalTensor scalar, c10::Device device, c10::ScalarType type = at::kFloat) {
  return scalar.has_value() ? static_cast<T*>(check_scalar(name, *scalar, device, type)) : nullptr;
}

// A contiguous table: raises ValueError unless it has this shape and type, and lies on `device`.
void check_table(const char* name, const at::Tensor& table, at::IntArrayRef shape, c10::ScalarType type, c10::Device device);

// Tells autograd of a write. A tensor that was made in inference mode raises outside of it.
void count_version(const at::Tensor& tensor);
void count_version(OptionalTensor tensor);

}  // namespace amp_wrapper
