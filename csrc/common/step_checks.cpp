#include "step_checks.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace amp_wrapper {
namespace {

constexpr const char* kOneDevice = ": one call of the compiled op serves one device.";

void check_decision(const at::Tensor& decision, bool written, c10::DeviceType device) {
  TORCH_CHECK_VALUE(
      decision.scalar_type() == at::kFloat && decision.dim() == 1 && decision.size(0) == kDecision && decision.is_contiguous(),
      "decision has shape ", shape_of(decision), " and dtype ", name_of(decision.scalar_type()), ": ",
      static_cast<int>(kDecision), " float32 numbers in a row are expected.");
  check_own("decision", decision, written);
  TORCH_CHECK_NOT_IMPLEMENTED(decision.device().type() == device, "decision is on ", decision.device(), kOneDevice);
}

bool is_table(const at::Tensor& table, std::size_t rows, std::int64_t columns) {
  return table.dim() == 2 && table.size(0) == static_cast<std::int64_t>(rows) && table.size(1) == columns &&
         table.is_contiguous();
}

void check_rows(const at::Tensor& rows, std::size_t count, const at::Tensor& decision, bool written) {
  TORCH_CHECK_VALUE(rows.scalar_type() == at::kFloat && is_table(rows, count, kRow), "rows has shape ", shape_of(rows),
                    " and dtype ", name_of(rows.scalar_type()), ": (", count, ", ", static_cast<int>(kRow),
                    ") of torch.float32 is expected.");
  check_own("rows", rows, written);
  TORCH_CHECK_NOT_IMPLEMENTED(rows.device() == decision.device(), "rows is on ", rows.device(), " and decision on ",
                              decision.device(), kOneDevice);
}

bool is_half(c10::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

void check_partners(at::TensorList params, at::TensorList partners) {
  // what does not pair up is told of with the other lists
  if (params.size() != partners.size()) return;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const c10::ScalarType kind = params[i].scalar_type();
    const c10::ScalarType other = partners[i].scalar_type();
    if (partners[i].is_same(params[i])) continue;
    const bool fits = other == at::kShort ? is_half(kind) : other == kind || (is_half(other) && kind == at::kFloat);
    TORCH_CHECK_VALUE(
        fits, "partners[", i, "] has dtype ", name_of(other), " beside a parameter of ", name_of(kind),
        ": a copy of the same type, a float16 or bfloat16 copy of a float32 parameter, or the int16 remainder of a "
        "16-bit one, is expected.");
  }
}

template <typename T>
T* data_of(const std::optional<at::Tensor>& scalar) {
  if (!scalar.has_value()) return nullptr;
  if constexpr (std::is_const_v<T>) {
    return static_cast<T*>(scalar->const_data_ptr());
  } else {
    return static_cast<T*>(scalar->mutable_data_ptr());
  }
}

// check_scalar of each. Names are put together for an error only.
void check_each(const char* list, at::TensorList scalars, c10::Device device, bool written) {
  for (std::size_t i = 0; i < scalars.size(); ++i) {
    const at::Tensor& scalar = scalars[i];
    TORCH_CHECK_NOT_IMPLEMENTED(scalar.layout() == c10::Layout::Strided, list, "[", i, "] is not dense.");
    const bool fits = scalar.numel() == 1 && scalar.scalar_type() == at::kFloat && scalar.device() == device &&
                      !scalar.is_inference() && scalar.storage().nbytes() > 0;
    if (fits) continue;
    const std::string name = std::string(list) + "[" + std::to_string(i) + "]";
    check_scalar(name.c_str(), scalar, device, at::kFloat, written);
  }
}

struct Named {
  const char* name;
  const std::optional<at::Tensor>& tensor;
};

// What is written shares memory with nothing else that has a name.
void check_distinct(const std::vector<Scalar>& all) {
  const auto begin_of = [](const Scalar& one) { return reinterpret_cast<std::uintptr_t>(one.tensor->const_data_ptr()); };
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!all[i].written || !all[i].tensor.has_value()) continue;
    for (std::size_t j = 0; j < all.size(); ++j) {
      if (i == j || !all[j].tensor.has_value()) continue;
      const bool apart = begin_of(all[i]) + all[i].tensor->nbytes() <= begin_of(all[j]) ||
                         begin_of(all[j]) + all[j].tensor->nbytes() <= begin_of(all[i]);
      TORCH_CHECK_VALUE(apart, all[i].name, " and ", all[j].name, " share memory: give each memory of its own.");
    }
  }
}

// What the prologue writes beside the steps shares memory with no scalar.
void check_apart(const at::Tensor& decision, const at::Tensor& rows, at::ArrayRef<Scalar> scalars) {
  for (const Scalar& scalar : scalars) {
    if (!scalar.tensor.has_value()) continue;
    const auto begin = reinterpret_cast<std::uintptr_t>(scalar.tensor->const_data_ptr());
    const std::uintptr_t end = begin + scalar.tensor->nbytes();
    for (const auto& [name, written] : {std::pair{"decision", &decision}, std::pair{"rows", &rows}}) {
      const auto place = reinterpret_cast<std::uintptr_t>(written->const_data_ptr());
      TORCH_CHECK_VALUE(written->nbytes() == 0 || place + written->nbytes() <= begin || end <= place, scalar.name, " and ",
                        name, "[0] share memory: give each memory of its own.");
    }
  }
}

ScaleUpdate rule_of(at::ArrayRef<double> rule) {
  if (rule.empty()) return {};
  const auto whole = [](double value) {
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    const double most = static_cast<double>(kMost);
    return static_cast<std::int64_t>(value < -most ? -most : value < most ? value : most);
  };
  return scale_rule(rule[0], rule[1], whole(rule[2]), whole(rule[3]), rule[4], rule[5]);
}

}  // namespace

Update check_update(at::TensorList grads, at::TensorList params, std::initializer_list<State> states, at::TensorList partners,
                    const at::Tensor& rows, const at::Tensor& decision, c10::DeviceType device) {
  check_decision(decision, false, device);
  check_rows(rows, params.size(), decision, false);
  check_partners(params, partners);
  for (const at::Tensor& grad : grads.slice(0, std::min<std::size_t>(grads.size(), 1))) {
    TORCH_CHECK_NOT_IMPLEMENTED(grad.device() == decision.device(), "grads[0] is on ", grad.device(), " and decision on ",
                                decision.device(), kOneDevice);
  }
  std::vector<List> lists{{"grads", grads}, {"params", params, true}};
  std::vector<int> places;
  for (const State& state : states) {
    const bool missing = state.optional && state.tensors.empty();
    places.push_back(missing ? -1 : static_cast<int>(lists.size()));
    if (!missing) lists.push_back({state.name, state.tensors, true});
  }
  const int last = partners.empty() ? -1 : static_cast<int>(lists.size());
  if (!partners.empty()) lists.push_back({"partners", partners, true, true, &params, true});
  const std::optional<at::Tensor> shared[] = {decision, rows};
  return {Flat(lists.data(), lists.size(), device, {{"decision", shared[0]}, {"rows", shared[1]}}), std::move(places), last,
          static_cast<const float*>(rows.const_data_ptr()), static_cast<const float*>(decision.const_data_ptr())};
}

Prologue check_prologue(const PrologueArguments& a, c10::DeviceType device_type) {
  check_decision(a.decision, true, device_type);
  const c10::Device device = a.decision.device();
  check_rows(a.rows, a.steps.size(), a.decision, true);
  TORCH_CHECK_VALUE(a.hyper.dim() == 2 && a.groups.dim() == 1, "hyper must have two dimensions and groups one.");
  const std::int64_t groups = a.hyper.size(0);
  TORCH_CHECK_VALUE(a.hyper.scalar_type() == at::kDouble && is_table(a.hyper, groups, kHyper), "hyper has shape ",
                    shape_of(a.hyper), " and dtype ", name_of(a.hyper.scalar_type()), ": (", groups, ", ", kHyper,
                    ") of torch.float64 is expected.");
  TORCH_CHECK_VALUE(a.groups.scalar_type() == at::kLong && a.groups.numel() == static_cast<std::int64_t>(a.steps.size()) &&
                        a.groups.is_contiguous(),
                    "groups has shape ", shape_of(a.groups), " and dtype ", name_of(a.groups.scalar_type()), ": (",
                    a.steps.size(), ",) of torch.int64 is expected.");
  TORCH_CHECK_VALUE(a.hyper.is_cpu() && a.groups.is_cpu(), "hyper and groups belong on the CPU.");
  TORCH_CHECK_VALUE(a.kind == 0 || a.kind == 1, "kind=", a.kind, ": 0 (Adam) or 1 (SGD) is expected.");
  TORCH_CHECK_VALUE(a.rates.size() == a.rated.size(), "rates has ", a.rates.size(), " tensors and rated ", a.rated.size(),
                    " groups: they must pair up.");
  check_own("hyper", a.hyper, false);
  check_own("groups", a.groups, false);
  const auto* group_of = static_cast<const std::int64_t*>(a.groups.const_data_ptr());
  for (std::size_t i = 0; i < a.steps.size(); ++i) {
    TORCH_CHECK_VALUE(group_of[i] >= 0 && group_of[i] < groups, "groups[", i, "] is ", group_of[i], ", and hyper has ", groups,
                      " rows.");
  }
  for (std::size_t i = 0; i < a.rated.size(); ++i) {
    TORCH_CHECK_VALUE(a.rated[i] >= 0 && a.rated[i] < groups, "rated[", i, "] is ", a.rated[i], ", and hyper has ", groups,
                      " rows.");
  }
  const bool moves = !a.rule.empty();
  TORCH_CHECK_VALUE(!moves || a.rule.size() == 6, "rule has ", a.rule.size(), " numbers: 6 or none are expected.");
  TORCH_CHECK_VALUE(!moves || (a.scale.has_value() && a.growth_tracker.has_value() && a.hysteresis_tracker.has_value()),
                    "rule needs scale, growth_tracker and hysteresis_tracker.");
  TORCH_CHECK_VALUE(!a.max_norm.has_value() || a.norm.has_value(), "max_norm needs norm.");
  for (std::size_t i = 0; i < a.rule.size(); ++i) {
    const bool counts = i == 2 || i == 3;
    TORCH_CHECK_VALUE(!std::isnan(a.rule[i]) && !(counts && std::isinf(a.rule[i])), "rule[", i,
                      "] is not a number, or not a finite one where steps are counted.");
  }
  for (const auto& [name, limit] : {std::pair{"max_norm", a.max_norm}, std::pair{"clip_value", a.clip_value}}) {
    TORCH_CHECK_VALUE(!limit.has_value() || !std::isnan(*limit), name, " is not a number.");
  }
  check_each("steps", a.steps, device, true);
  check_each("rates", a.rates, device, false);
  check_scalar("found_inf", a.found_inf, device);
  check_scalar("learned", a.learned, device);
  check_scalar("norm", a.norm, device);
  if (a.scale.has_value()) check_scalar("scale", *a.scale, device, at::kFloat, moves);
  if (a.growth_tracker.has_value()) check_scalar("growth_tracker", *a.growth_tracker, device, at::kInt, moves);
  if (a.hysteresis_tracker.has_value()) check_scalar("hysteresis_tracker", *a.hysteresis_tracker, device, at::kInt, moves);
  if (a.counts.has_value()) {
    const at::Tensor& counts = *a.counts;
    TORCH_CHECK_VALUE(counts.scalar_type() == at::kLong && counts.dim() == 1 && counts.size(0) == 3 && counts.is_contiguous(),
                      "counts has shape ", shape_of(counts), " and dtype ", name_of(counts.scalar_type()),
                      ": (3,) of torch.int64 is expected.");
    check_own("counts", counts, true);
    TORCH_CHECK_NOT_IMPLEMENTED(counts.device() == device, "counts is on ", counts.device(), kOneDevice);
  }
  const std::initializer_list<Scalar> scalars = {{"scale", a.scale, moves},
                                                 {"growth_tracker", a.growth_tracker, moves},
                                                 {"hysteresis_tracker", a.hysteresis_tracker, moves},
                                                 {"counts", a.counts, true},
                                                 {"found_inf", a.found_inf},
                                                 {"learned", a.learned},
                                                 {"norm", a.norm}};
  std::vector<std::optional<at::Tensor>> kept(a.rates.begin(), a.rates.end());
  std::vector<std::string> names;
  for (std::size_t i = 0; i < a.rates.size(); ++i) names.push_back("rates[" + std::to_string(i) + "]");
  const std::optional<at::Tensor> tables[] = {a.decision, a.rows};
  const Scalar decision{"decision", tables[0], true};
  const Scalar rows{"rows", tables[1], true};
  std::vector<Scalar> all(scalars);
  for (std::size_t i = 0; i < kept.size(); ++i) all.push_back({names[i].c_str(), kept[i], false});
  check_apart(a.decision, a.rows, all);
  all.push_back(decision);
  all.push_back(rows);
  Flat steps({{"steps", a.steps, true}}, device_type, all);
  check_distinct(all);
  std::vector<const float*> rates(groups, nullptr);
  for (std::size_t i = 0; i < a.rated.size(); ++i) {
    rates[a.rated[i]] = static_cast<const float*>(a.rates[i].const_data_ptr());
  }
  const Decide decide{
      data_of<const float>(a.found_inf),
      data_of<const float>(a.learned),
      data_of<const float>(a.norm),
      // what is read only must not end the sharing of copy-on-write memory
      moves ? data_of<float>(a.scale) : const_cast<float*>(data_of<const float>(a.scale)),
      moves ? data_of<std::int32_t>(a.growth_tracker) : nullptr,
      moves ? data_of<std::int32_t>(a.hysteresis_tracker) : nullptr,
      data_of<std::int64_t>(a.counts),
      rule_of(a.rule),
      moves,
      a.max_norm.has_value(),
      a.max_norm.has_value() ? static_cast<float>(*a.max_norm) : 0.0f,
      a.clip_value.has_value() ? static_cast<float>(*a.clip_value) : std::numeric_limits<float>::infinity(),
  };
  bump_version(a.decision);
  bump_version(a.rows);
  bump_version(a.counts);
  if (moves) {
    for (const auto* written : {&a.scale, &a.growth_tracker, &a.hysteresis_tracker}) bump_version(*written);
  }
  return {decide,
          static_cast<Kind>(a.kind),
          static_cast<float*>(a.decision.mutable_data_ptr()),
          static_cast<float*>(a.rows.mutable_data_ptr()),
          std::move(steps),
          static_cast<const double*>(a.hyper.const_data_ptr()),
          groups,
          group_of,
          std::move(rates)};
}

}  // namespace amp_wrapper
