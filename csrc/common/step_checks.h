// The arguments of the ops of an optimizer step, checked as a whole before anything is written. The words are those of
// amp_wrapper/ops/optimizer_step.py.
#pragma once

#include <vector>

#include "lists.h"
#include "step_prologue.h"

namespace amp_wrapper {

// Lists of an update as flat pieces of memory: 0 the gradients, 1 the parameters, then the states and the partners.
struct Update {
  Flat flat;
  // operand of each state that was asked for, and of the partners; -1 for what is not there
  std::vector<int> states;
  int partners;
  // on the device: a row for each parameter, and the decision
  const float* rows;
  const float* decision;

  // whether a parameter has a partner that is written
  bool has_partner(std::size_t index) const { return partners >= 0 && !flat.is_idle(partners, index); }
};

struct State {
  const char* name;
  at::TensorList tensors;
  // whether an empty list stands for none
  bool optional = false;
};

// Counts the versions of what is written. An empty list of partners stands for none.
Update check_update(at::TensorList grads, at::TensorList params, std::initializer_list<State> states, at::TensorList partners,
                    const at::Tensor& rows, const at::Tensor& decision, c10::DeviceType device);

// The arguments of step_prologue, in the order of its schema.
struct PrologueArguments {
  const at::Tensor& decision;
  const at::Tensor& rows;
  at::TensorList steps;
  const at::Tensor& hyper;
  const at::Tensor& groups;
  std::int64_t kind;
  at::TensorList rates;
  at::IntArrayRef rated;
  const std::optional<at::Tensor>& found_inf;
  const std::optional<at::Tensor>& learned;
  const std::optional<at::Tensor>& norm;
  const std::optional<at::Tensor>& scale;
  const std::optional<at::Tensor>& growth_tracker;
  const std::optional<at::Tensor>& hysteresis_tracker;
  const std::optional<at::Tensor>& counts;
  at::ArrayRef<double> rule;
  std::optional<double> max_norm;
  std::optional<double> clip_value;
};

struct Prologue {
  // with pointers to the device's memory
  Decide decide;
  Kind kind;
  float* decision;
  float* rows;
  // list 0, one element each
  Flat steps;
  // on the host: the table of hyper-parameters, and the group of each parameter
  const double* hyper;
  std::int64_t groups_in_all;
  const std::int64_t* groups;
  // for each group, on the device; null where the lr of the table holds
  std::vector<const float*> rates;
};

// Counts the versions of what is written. steps.finish() belongs after the work.
Prologue check_prologue(const PrologueArguments& arguments, c10::DeviceType device);

}  // namespace amp_wrapper
