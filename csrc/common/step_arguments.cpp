#include "step_arguments.h"

#include <c10/util/Exception.h>

#include <limits>

namespace amp_wrapper {
namespace {

bool is_half(c10::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

ScaleUpdate rule_of(at::ArrayRef<double> rule) {
  if (rule.empty()) return {};
  const auto whole = [](double value) {
    constexpr double kMost = std::numeric_limits<std::int32_t>::max();
    return static_cast<std::int32_t>(value < -kMost ? -kMost : value < kMost ? value : kMost);
  };
  const auto number = [&](std::size_t i) { return static_cast<float>(rule[i]); };
  return {number(0), number(1), number(4), number(5), whole(rule[2]), whole(rule[3])};
}

}  // namespace

Update check_update(std::initializer_list<List> lists, const at::Tensor& rows, const at::Tensor& decision) {
  const at::ITensorListRef params = lists.begin()[kAdamParameter].tensors;
  const at::ITensorListRef partners = (lists.end() - 1)->tensors;
  auto param = params.begin();
  auto partner = partners.begin();
  for (std::size_t i = 0; i < std::min(params.size(), partners.size()); ++i, ++param, ++partner) {
    const c10::ScalarType type = (*param).scalar_type();
    const c10::ScalarType other = (*partner).scalar_type();
    const bool fits = other == at::kShort ? is_half(type) : other == type || (is_half(other) && type == at::kFloat);
    TORCH_CHECK_VALUE(
        fits, "partners[", i, "] has dtype ", other, " beside a parameter of ", type,
        ": a copy of the same type, a 16-bit copy of a float32 parameter, or the int16 remainder of a 16-bit one, is "
        "expected.");
  }
  return {Lists(decision.device(), lists), static_cast<const float*>(rows.const_data_ptr()),
          static_cast<const float*>(decision.const_data_ptr())};
}

Prologue check_prologue(const DecisionArguments& a, Kind kind, const at::Tensor& rows, c10::DeviceType type) {
  const c10::Device device = a.decision.device();
  TORCH_CHECK_VALUE(device.type() == type, "decision is on ", device, ": all tensors of a call lie on one device.");
  const std::int64_t size = rows.size(0);
  const std::int64_t groups = a.hyper.dim() == 2 ? a.hyper.size(0) : 0;
  check_table("decision", a.decision, {kDecision}, at::kFloat, device);
  check_table("hyper", a.hyper, {groups, kHyper}, at::kDouble, at::kCPU);
  check_table("groups", a.groups, {size}, at::kLong, at::kCPU);
  const std::int64_t counted = kind == Kind::kAdam ? size : 0;
  TORCH_CHECK_VALUE(static_cast<std::int64_t>(a.steps.size()) == counted, "steps has ", a.steps.size(), " tensors: ", counted,
                    " are expected.");
  TORCH_CHECK_VALUE(a.rates.size() == a.rated.size(), "rates has ", a.rates.size(), " tensors and rated ", a.rated.size(),
                    " numbers: the lists must pair up.");
  const bool moves = !a.rule.empty();
  TORCH_CHECK_VALUE(!moves || a.rule.size() == 6, "rule has ", a.rule.size(), " numbers: 6 or none are expected.");
  TORCH_CHECK_VALUE(!moves || (a.scale.has_value() && a.growth_tracker.has_value() && a.hysteresis_tracker.has_value()),
                    "rule needs scale, growth_tracker and hysteresis_tracker.");
  TORCH_CHECK_VALUE(!a.max_norm.has_value() || a.norm.has_value(), "max_norm needs norm.");
  std::vector<const float*> rates(groups, nullptr);
  for (std::size_t i = 0; i < a.rates.size(); ++i) {
    TORCH_CHECK_VALUE(a.rated[i] >= 0 && a.rated[i] < groups, "rated[", i, "] is ", a.rated[i], ", and hyper has ", groups,
                      " rows.");
    rates[a.rated[i]] = static_cast<const float*>(check_scalar({"rates", static_cast<std::int64_t>(i)}, a.rates[i], device));
  }
  const auto* hyper = static_cast<const double*>(a.hyper.const_data_ptr());
  const auto* group_of = static_cast<const std::int64_t*>(a.groups.const_data_ptr());
  std::vector<Parameter> parameters;
  const at::MaterializedITensorListRef steps = a.steps.materialize();
  for (std::int64_t i = 0; i < size; ++i) {
    const std::int64_t group = group_of[i];
    TORCH_CHECK_VALUE(group >= 0 && group < groups, "groups[", i, "] is ", group, ", and hyper has ", groups, " rows.");
    auto* step = i < counted ? static_cast<float*>(check_scalar({"steps", i}, steps[i], device)) : nullptr;
    parameters.push_back({hyper + group * kHyper, rates[group], step});
  }
  if (a.counts.has_value()) check_table("counts", *a.counts, {3}, at::kLong, device);
  const Decide decide{
      check_scalar("found_inf", a.found_inf, device),
      check_scalar("learned", a.learned, device),
      check_scalar("norm", a.norm, device),
      check_scalar("scale", a.scale, device),
      moves ? check_scalar<std::int32_t>("growth_tracker", a.growth_tracker, device, at::kInt) : nullptr,
      moves ? check_scalar<std::int32_t>("hysteresis_tracker", a.hysteresis_tracker, device, at::kInt) : nullptr,
      a.counts.has_value() ? static_cast<std::int64_t*>(a.counts->mutable_data_ptr()) : nullptr,
      rule_of(a.rule),
      moves,
      a.max_norm.has_value(),
      static_cast<float>(a.max_norm.value_or(0.0)),
      static_cast<float>(a.clip_value.value_or(std::numeric_limits<double>::infinity())),
  };
  for (const at::Tensor& step : steps) count_version(step);
  count_version(a.decision);
  count_version(a.counts);
  if (moves) {
    for (const auto* state : {&a.scale, &a.growth_tracker, &a.hysteresis_tracker}) count_version(*state);
  }
  return {decide, kind, static_cast<float*>(a.decision.mutable_data_ptr()), static_cast<float*>(rows.mutable_data_ptr()),
          std::move(parameters)};
}

}  // namespace amp_wrapper
