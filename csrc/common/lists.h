// Lists of tensors as the ops see them: checked as a whole before anything is written, then flat pieces of memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "functors.h"

namespace amp_wrapper {

struct List {
  const char* name;
  at::TensorList tensors;
  bool written = false;
  // a written list whose old values count as well
  bool read = true;
  // a list where the same tensor in the same place means that there is nothing to do for this one
  const at::TensorList* idle_beside = nullptr;
  // int16 as well
  bool shorts = false;
};

// A scalar argument beside the lists, which may be missing.
struct Scalar {
  const char* name;
  const std::optional<at::Tensor>& tensor;
  bool written = false;
};

// Tensors without gaps whose elements pair up in memory are used in place. Others are read into temporaries, all of them
// before anything is written, and written back by finish() in the order of the list.
class Flat {
 public:
  // Raises ValueError for what is wrong, naming list and index, and NotImplementedError for what is right but left to plain
  // torch: several devices, or a type beside float32, float16 and bfloat16.
  Flat(std::initializer_list<List> lists, c10::DeviceType device, at::ArrayRef<Scalar> scalars = {})
      : Flat(lists.begin(), lists.size(), device, scalars) {}
  Flat(const List* lists, std::size_t width, c10::DeviceType device, at::ArrayRef<Scalar> scalars = {});

  std::size_t size() const { return counts_.size(); }
  // that of the tensors; without any, that of the last scalar there is, or the CPU
  c10::Device device() const { return device_; }
  const std::vector<std::int64_t>& counts() const { return counts_; }
  void* data(std::size_t list, std::size_t index) const { return operands_[list][index].data; }
  Type type(std::size_t list, std::size_t index) const { return operands_[list][index].type; }
  // the same tensor as in the list that this one may be idle beside
  bool is_idle(std::size_t list, std::size_t index) const { return operands_[list][index].idle; }
  // whether all are used in place
  bool is_direct() const { return temporaries_.empty(); }
  void finish() const;

 private:
  struct Operand {
    void* data;
    std::int64_t bytes;
    Type type;
    // without gaps, so that the bytes from data on are those of its elements
    bool dense;
    bool idle;
  };
  void check_overlap(const List* lists) const;
  void check_apart(const List* lists, const Scalar& scalar) const;

  c10::Device device_ = c10::kCPU;
  std::vector<std::vector<Operand>> operands_;
  std::vector<std::int64_t> counts_;
  std::vector<at::Tensor> temporaries_;
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;
};

// A scalar argument: one float32 element on `device`. The name goes into the error.
void check_scalar(const char* name, const at::Tensor& scalar, c10::Device device, c10::ScalarType type = c10::ScalarType::Float,
                  bool written = false);
void check_scalar(const char* name, const std::optional<at::Tensor>& scalar, c10::Device device, bool written = false);

// The lists of an op, with its scalars of one float32 element: checked, and the written ones counted as such where there are
// tensors.
Flat check_call(std::initializer_list<List> lists, c10::DeviceType device, std::initializer_list<Scalar> scalars);

// Any argument: it has memory, and may be written where it is.
void check_own(const char* name, const at::Tensor& tensor, bool written);

// A contiguous table of numbers beside the lists.
void check_table(const char* name, const at::Tensor& table, at::IntArrayRef shape, c10::ScalarType type, c10::Device device,
                 bool written);

// The arguments of multi_tensor_exponents, and the versions of what is written counted where there are tensors.
Flat check_exponents(at::TensorList tensors, const at::Tensor& counts, const at::Tensor& largest, c10::DeviceType device_type);

// As Python writes a shape, and a dtype.
std::string shape_of(at::IntArrayRef sizes);
std::string shape_of(const at::Tensor& tensor);
std::string name_of(c10::ScalarType type);

// Autograd must learn of the write before it happens, so that a tensor that may not be written raises with nothing done.
void bump_version(const at::Tensor& tensor);
void bump_version(const std::optional<at::Tensor>& tensor);

// Room for the results of a norm: a float32 scalar, and one float32 element for each tensor, or none.
std::tuple<at::Tensor, at::Tensor> new_norms(at::TensorList tensors, c10::Device device, bool per_tensor);

// float16 or bfloat16 weights, float32 masters.
void check_refresh_types(at::TensorList weights, at::TensorList masters);

// What the Python numbers of update_scale are as float32, and the tensors it changes, checked and marked as written.
ScaleUpdate scale_rule(double growth_factor, double backoff_factor, std::int64_t growth_interval, std::int64_t hysteresis,
                       std::optional<double> min_scale, std::optional<double> max_scale);
void check_scale_state(const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& hysteresis_tracker,
                       const at::Tensor& found_inf);

}  // namespace amp_wrapper
