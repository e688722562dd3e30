// Runs the CUDA kernels of an optimizer step on a CPU and compares them, bit for bit, with the same arithmetic element by
// element: step_harness SEED ROUNDS.

#include "material.h"
#include "shim.h"

#include "../../csrc/cuda/step_kernels.cuh"

using namespace amp_wrapper;
using cuda::kAdamLists;
using cuda::kSgdLists;
using cuda::PrologueWork;
using cuda::Work;

namespace {

bool same(float a, float b) { return bits_of(a) == bits_of(b) || (a != a && b != b); }

// -- the prologue ------------------------------------------------------------------------------------------------------

// What the prologue writes beside rows and steps.
struct State {
  float decision[kDecision] = {};
  float scale = 0x1p10f;
  std::int32_t growth = 0;
  std::int32_t hysteresis = 2;
  std::int64_t counts[3] = {5, 2, 1};

  Decide decide(const float* found, const float* norm, bool moves) {
    const ScaleUpdate rule{2.0f, 0.5f, 1.0f, 0x1p24f, 1, 1};
    return {found, nullptr, norm, &scale, &growth, &hysteresis, counts, rule, moves, true, 0.25f, 3.0f};
  }
  bool operator==(const State& other) const {
    bool equal = scale == other.scale && growth == other.growth && hysteresis == other.hysteresis;
    for (int i = 0; i < kDecision; ++i) equal = equal && same(decision[i], other.decision[i]);
    for (int i = 0; i < 3; ++i) equal = equal && counts[i] == other.counts[i];
    return equal;
  }
};

void test_prologue(Random& random) {
  const int groups = 1 + random.below(4);
  const int size = random.below(70);
  const Kind kind = random.chance(50) ? Kind::kAdam : Kind::kSgd;
  std::vector<double> hyper;
  std::vector<float> rate(groups, 0.03125f);
  std::vector<const float*> rates;
  for (int i = 0; i < groups; ++i) {
    const double adam[kHyper] = {1e-3 * (i + 1), 0.9, 0.999, 1e-8, 0.01, i % 2 * 1.0, i / 2 % 2 * 1.0};
    const double sgd[kHyper] = {1e-2 * (i + 1), 0.9, 0.1, i % 2 * 1.0, 5e-4, i / 2 % 2 * 1.0, 0.0};
    hyper.insert(hyper.end(), kind == Kind::kAdam ? adam : sgd, (kind == Kind::kAdam ? adam : sgd) + kHyper);
    rates.push_back(random.chance(30) ? &rate[i] : nullptr);
  }
  std::vector<std::int64_t> group_of;
  std::vector<float> steps;
  for (int i = 0; i < size; ++i) {
    group_of.push_back(random.below(groups));
    steps.push_back(static_cast<float>(random.chance(30) ? 0 : random.below(100000)));
  }
  const float found = random.chance(30) ? 1.0f : 0.0f;
  const float norm = 7.5f;
  const bool moves = random.chance(80);
  std::vector<float> rows(static_cast<std::size_t>(size) * kRow, -1.0f);
  State state;

  State expected;
  std::vector<float> expected_steps(steps);
  std::vector<float> expected_rows(rows);
  for (int i = 0; i < size; ++i) {
    fill_row(kind, &hyper[group_of[i] * kHyper], rates[group_of[i]], &expected_steps[i], found == 0.0f,
             &expected_rows[i * kRow]);
  }
  expected.decide(&found, &norm, moves)(expected.decision);

  const auto work = std::make_unique<PrologueWork>();
  work->decide = state.decide(&found, &norm, moves);
  work->decision = state.decision;
  work->rows = rows.data();
  work->kind = kind;
  cuda::Parameters parameters{hyper.data(), rates, {}, group_of.data()};
  for (float& step : steps) parameters.steps.push_back(&step);
  Tables tables;
  int launches = 0;
  const bool has_table = random.chance(50);
  cuda::for_prologues(
      *work, parameters,
      [&](const PrologueWork& filled) {
        ++launches;
        const int blocks = std::max(1, (filled.parameters + cuda::kPrologueThreads - 1) / cuda::kPrologueThreads);
        shim::launch(static_cast<unsigned>(blocks), cuda::kPrologueThreads, [&] { cuda::prologue_kernel(filled); });
      },
      has_table ? tables.upload() : cuda::Upload());
  expect(!has_table || launches == 1, "launches of a prologue", size);
  expect(state == expected, "a decision", size);
  for (int i = 0; i < size; ++i) expect(same(steps[i], expected_steps[i]), "a step count", i);
  for (int i = 0; i < size * kRow; ++i) expect(same(rows[i], expected_rows[i]), "a row", i / kRow);
}

// -- the updates -------------------------------------------------------------------------------------------------------

// The 16 bits of a weight or a remainder.
std::uint16_t& word_of(const Tensor& tensor, std::int64_t i) { return *static_cast<std::uint16_t*>(tensor.at(i)); }

template <typename T>
float joined(const Tensor& weight, const Tensor& remainder, std::int64_t i) {
  return join_master<Single>(word_of(weight, i), static_cast<std::int16_t>(word_of(remainder, i)),
                             static_cast<const T*>(nullptr));
}

template <typename T>
void put_split(const Tensor& weight, const Tensor& remainder, std::int64_t i, float value) {
  const Parts<Single> parts = split_master<Single>(value, static_cast<const T*>(nullptr));
  word_of(weight, i) = static_cast<std::uint16_t>(parts.weight);
  word_of(remainder, i) = static_cast<std::uint16_t>(parts.remainder);
}

// A parameter and its partner, element by element.
struct Parameter {
  const Tensor& weight;
  // null for none
  const Tensor* partner;

  bool is_split() const { return partner != nullptr && partner->type == Type::kShort; }
  float get(std::int64_t i) const {
    if (!is_split()) return weight.get(i);
    return weight.type == Type::kHalf ? joined<Half>(weight, *partner, i) : joined<Bfloat>(weight, *partner, i);
  }
  void set(std::int64_t i, float value) const {
    if (is_split()) {
      weight.type == Type::kHalf ? put_split<Half>(weight, *partner, i, value) : put_split<Bfloat>(weight, *partner, i, value);
      return;
    }
    weight.set(i, value);
    if (partner != nullptr) partner->set(i, value);
  }
};

bool same(const Tensor& a, const Tensor& b, std::int64_t i) {
  return a.type == Type::kShort ? word_of(a, i) == word_of(b, i) : same(a.get(i), b.get(i));
}

// Tensors of one update: list 0 the gradients, 1 the parameters, then the states and the partners.
struct Lists {
  std::vector<List> lists;
  // lists that this launch has; no partner is null
  std::vector<bool> present;
  std::vector<bool> has_partner;

  const Tensor* partner(std::size_t i) const { return has_partner[i] ? &lists.back()[i] : nullptr; }
};

Lists make_lists(Random& random, const std::vector<std::int64_t>& counts, int states, int present_states) {
  Lists made;
  made.lists.push_back(random.list(counts, 3));
  made.lists.push_back(random.list(counts, 3));
  for (int s = 0; s < states; ++s) {
    made.lists.push_back(random.list(counts, 3));
    // second moments are not negative
    for (const Tensor& tensor : made.lists.back()) {
      for (std::int64_t i = 0; s > 0 && i < tensor.count; ++i) tensor.set(i, std::fabs(tensor.get(i)));
    }
  }
  List partners;
  partners.reserve(counts.size());
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const bool is_wide = made.lists[1][i].type == Type::kFloat;
    const Type type = !is_wide ? Type::kShort : random.chance(50) ? Type::kHalf : Type::kBfloat;
    partners.emplace_back(type, counts[i], random.chance(30) ? 1 + random.below(7) : 0);
    for (std::int64_t k = 0; type == Type::kShort && k < counts[i]; ++k) {
      word_of(partners[i], k) = static_cast<std::uint16_t>(random.below(1 << 12) - (1 << 11));
    }
    made.has_partner.push_back(random.chance(60));
  }
  made.lists.push_back(std::move(partners));
  made.present.assign(2 + static_cast<std::size_t>(present_states), true);
  return made;
}

// Calls launch(work, blocks) for the lists of `made` and the rows.
template <int kLists, typename F>
void launch_update(Random& random, const Lists& made, const std::vector<std::int64_t>& counts, const std::vector<float>& rows,
                   F launch) {
  Tables tables;
  cuda::for_launches<kLists>(
      counts,
      [&](int list, std::int64_t tensor, std::int64_t element, Type* type) -> void* {
        if (list == kLists - 1) return const_cast<float*>(&rows[tensor * kRow]);
        const bool is_partner = list == kLists - 2;
        if (is_partner ? !made.has_partner[tensor] : list >= static_cast<int>(made.present.size())) return nullptr;
        const Tensor& chosen = (is_partner ? made.lists.back() : made.lists[list])[tensor];
        *type = chosen.type;
        return chosen.at(element);
      },
      [&](const Work<kLists>& work, auto) { launch(work, static_cast<unsigned>(work.chunks)); },
      random.chance(50) ? tables.upload() : cuda::Upload());
}

// The last element is spoken of apart, since it may have a vector of its own.
void compare(const Lists& ours, const Lists& expected, const std::vector<const char*>& names, bool skipped, const char* last) {
  for (std::size_t list = 0; list < ours.lists.size(); ++list) {
    for (std::size_t i = 0; i < ours.lists[list].size(); ++i) {
      const Tensor& a = ours.lists[list][i];
      const Tensor& b = expected.lists[list][i];
      for (std::int64_t k = 0; k < a.count; ++k) {
        const char* what = names[list];
        if (k == a.count - 1) what = ours.has_partner[i] ? "the last element beside a partner" : last;
        expect(same(a, b, k), skipped ? "a skipped step" : what, i);
      }
    }
  }
}

// Rows as the prologue fills them, and a decision.
std::vector<float> make_rows(Random& random, Kind kind, std::size_t size) {
  std::vector<float> rows(size * kRow);
  for (std::size_t i = 0; i < size; ++i) {
    float step = static_cast<float>(random.below(3));
    const double adam[kHyper] = {1e-2,
                                 random.chance(20) ? 0.25 : 0.9,
                                 0.99,
                                 1e-8,
                                 random.chance(50) ? 0.1 : 0.0,
                                 random.chance(30) * 1.0,
                                 random.chance(50) * 1.0};
    const double sgd[kHyper] = {1e-1,
                                0.9,
                                random.chance(30) ? 0.1 : 0.0,
                                random.chance(50) * 1.0,
                                random.chance(50) ? 0.1 : 0.0,
                                random.chance(30) * 1.0,
                                0.0};
    fill_row(kind, kind == Kind::kAdam ? adam : sgd, nullptr, &step, true, &rows[i * kRow]);
  }
  return rows;
}

template <bool kAmsgrad>
void test_adam(Random& random, const std::vector<std::int64_t>& counts, const float* decision) {
  const Lists made = make_lists(random, counts, 3, kAmsgrad ? 3 : 2);
  const Lists expected(made);
  const std::vector<float> rows = make_rows(random, Kind::kAdam, counts.size());
  const bool skipped = decision[kSkip] != 0.0f;
  for (std::size_t i = 0; i < counts.size() && !skipped; ++i) {
    const Adam<Single> adam(&rows[i * kRow], decision);
    const auto& lists = expected.lists;
    const Parameter parameter{lists[1][i], expected.partner(i)};
    for (std::int64_t k = 0; k < counts[i]; ++k) {
      float m = lists[2][i].get(k);
      float v = lists[3][i].get(k);
      float x = lists[4][i].get(k);
      parameter.set(k, adam.update<kAmsgrad>(lists[0][i].get(k), parameter.get(k), &m, &v, &x));
      lists[2][i].set(k, m);
      lists[3][i].set(k, v);
      if (kAmsgrad) lists[4][i].set(k, x);
    }
  }
  launch_update<kAdamLists>(random, made, counts, rows, [&](const auto& work, unsigned blocks) {
    shim::launch(blocks, shim::kThreads, [&] { cuda::adam_kernel<kAmsgrad>(work, decision); });
  });
  const std::vector<const char*> names = {"a gradient of adam", "a parameter of adam", "a first moment",
                                          "a second moment",    "a maximum",           "a partner of adam"};
  compare(made, expected, names, skipped, "the last element of adam");
}

template <bool kMomentums>
void test_sgd(Random& random, const std::vector<std::int64_t>& counts, const float* decision) {
  const Lists made = make_lists(random, counts, 1, kMomentums ? 1 : 0);
  const Lists expected(made);
  const std::vector<float> rows = make_rows(random, Kind::kSgd, counts.size());
  const bool skipped = decision[kSkip] != 0.0f;
  for (std::size_t i = 0; i < counts.size() && !skipped; ++i) {
    const Sgd<Single> sgd(&rows[i * kRow], decision);
    const auto& lists = expected.lists;
    const Parameter parameter{lists[1][i], expected.partner(i)};
    for (std::int64_t k = 0; k < counts[i]; ++k) {
      float buffer = lists[2][i].get(k);
      parameter.set(k, sgd.update<kMomentums>(lists[0][i].get(k), parameter.get(k), &buffer));
      if (kMomentums) lists[2][i].set(k, buffer);
    }
  }
  launch_update<kSgdLists>(random, made, counts, rows, [&](const auto& work, unsigned blocks) {
    shim::launch(blocks, shim::kThreads, [&] { cuda::sgd_kernel<kMomentums>(work, decision); });
  });
  const std::vector<const char*> names = {"a gradient of sgd", "a parameter of sgd", "a momentum", "a partner of sgd"};
  compare(made, expected, names, skipped, "the last element of sgd");
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 0u;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 3;
  Random random(seed);
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < 4; ++i) test_prologue(random);
    const float taken[kDecision] = {0.0f, 0x1p-3f, 0.75f, round % 2 ? INFINITY : 2.0f};
    const float skipped[kDecision] = {1.0f, 0x1p-3f, 0.75f, INFINITY};
    test_adam<false>(random, random.counts(false), taken);
    test_adam<false>(random, random.counts(true), taken);
    test_adam<true>(random, random.counts(true), taken);
    test_adam<false>(random, random.counts(true), skipped);
    test_sgd<false>(random, random.counts(true), taken);
    test_sgd<true>(random, random.counts(false), taken);
    test_sgd<true>(random, random.counts(true), skipped);
  }
  std::printf("%d rounds, %d wrong\n", rounds, failures);
  return failures == 0 ? 0 : 1;
}
