// The arguments of the ops of an optimizer step, checked as a whole before anything is written.
#pragma once

#include <vector>

#include "lists.h"
#include "step_lists.h"
#include "step_prologue.h"

namespace amp_wrapper {

struct Update {
  Lists lists;
  // on the device: a row for each parameter, and the decision
  const float* rows;
  const float* decision;
};

// After check_prologue(). The last list are the partners: each is the parameter itself for none, a copy of the same type, a
// 16-bit copy of a float32 parameter, or the int16 remainder of a 16-bit one.
Update check_update(std::initializer_list<List> lists, const at::Tensor& rows, const at::Tensor& decision);

// What decides on a step: the arguments of its op beside the lists, in the order of the schema.
struct DecisionArguments {
  // of Adam alone
  at::ITensorListRef steps;
  const at::Tensor& decision;
  const at::Tensor& hyper;
  const at::Tensor& groups;
  at::TensorList rates;
  at::IntArrayRef rated;
  OptionalTensor found_inf;
  OptionalTensor learned;
  OptionalTensor norm;
  OptionalTensor scale;
  OptionalTensor growth_tracker;
  OptionalTensor hysteresis_tracker;
  OptionalTensor counts;
  at::ArrayRef<double> rule;
  std::optional<double> max_norm;
  std::optional<double> clip_value;
};

// What the prologue knows of one parameter.
struct Parameter {
  // of its group, kHyper numbers on the host
  const double* hyper;
  // on the device; the rate is null where the lr among the hyper-parameters holds
  const float* rate;
  // null for SGD
  float* step;
};

struct Prologue {
  // with pointers to the device's memory, as those that follow
  Decide decide;
  Kind kind;
  float* decision;
  float* rows;
  std::vector<Parameter> parameters;
};

// Writes `rows`, which the update reads.
Prologue check_prologue(const DecisionArguments& arguments, Kind kind, const at::Tensor& rows, c10::DeviceType type);

}  // namespace amp_wrapper
