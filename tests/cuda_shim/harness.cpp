// Runs the CUDA kernels of csrc/cuda on a CPU and compares them, bit for bit, with the CPU kernels: harness SEED ROUNDS.

#include "material.h"
#include "shim.h"

#include "../../csrc/cpu/kernels.h"
#include "../../csrc/cuda/launch.h"
#include "../../csrc/cuda/list_kernels.cuh"
#include "../../csrc/cuda/step_kernels.cuh"

using namespace amp_wrapper;
using cuda::TensorSlot;
using cuda::Work;
using Counts = std::vector<std::int64_t>;

namespace {

const cpu::Kernels& on_cpu = cpu::kDefault;

// One more tensor than a launch has room for, and some.
template <int kLists>
constexpr int kTooMany = Work<TensorSlot<kLists>, cuda::kMostBytes>::kMost + 3;

// Slots of the tensors that have elements; a list may be missing, and so may single tensors.
template <int kLists, typename F>
cuda::Slots<kLists> slots_of(const Counts& counts, F operand) {
  cuda::Slots<kLists> slots;
  std::int32_t start = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    TensorSlot<kLists> slot{{}, counts[i], start, static_cast<std::int32_t>(i), {}};
    for (int list = 0; list < kLists; ++list) {
      const Operand one = operand(list, i);
      slot.data[list] = one.data;
      slot.types[list] = one.type;
    }
    slots.push_back(slot);
    start += static_cast<std::int32_t>(chunks_of(counts[i]));
  }
  return slots;
}

// Calls kernel(work) by every thread of every launch: with a table in half of the calls, and in pieces in the others.
template <typename Slot, typename F>
void run(const std::vector<Slot>& slots, F kernel, int threads = shim::kThreads) {
  static int calls = 0;
  Tables tables;
  cuda::for_launches(slots, ++calls % 2 ? tables.upload() : cuda::Upload(), [&](const auto& work, unsigned blocks) {
    shim::launch(blocks, threads, [&] { kernel(work); });
    return cudaGetLastError();
  });
}

template <int kLists, typename F>
void run(const Counts& counts, const std::vector<const List*>& lists, F kernel) {
  run(slots_of<kLists>(counts, [&](int list, std::size_t i) { return (*lists[list])[i].operand(); }), kernel);
}

// Calls body(tensor, first element, count) for every chunk, as the ops on a CPU do.
template <typename F>
void for_chunks(const Counts& counts, F body) {
  for (std::size_t i = 0; i < counts.size(); ++i) {
    for (std::int64_t first = 0; first < counts[i]; first += kChunk) body(i, first, std::min(kChunk, counts[i] - first));
  }
}

void compare(const List& ours, const List& expected, const char* what) {
  for (std::size_t i = 0; i < ours.size(); ++i) expect(ours[i].same(expected[i]), what, i);
}

// -- lists

void test_scale(Random& random, const Counts& counts, bool in_place) {
  const List sources = random.list(counts, 3);
  const List others = random.list(counts, 3);
  const List& targets = in_place ? sources : others;
  const List old(sources);
  const List expected(targets);
  const float given = random.chance(50) ? 1.0f / 3.0f : 0x1p-16f;
  const float* scale = random.chance(50) ? &given : nullptr;
  float found = 0.0f;
  float* flag = random.chance(80) ? &found : nullptr;
  run<2>(counts, {&sources, &targets}, [&](const auto& work) { cuda::scale_kernel(work, scale, flag); });
  bool bad = false;
  for_chunks(counts, [&](std::size_t i, std::int64_t first, std::int64_t count) {
    bad |= on_cpu.scale(old[i].operand(first), expected[i].operand(first), count, scale == nullptr ? 1.0f : given, false);
  });
  compare(targets, expected, "scale");
  expect(found == (bad && flag != nullptr ? 1.0f : 0.0f), "flag of scale", counts.size());
}

void test_axpby(Random& random, const Counts& counts) {
  const List xs = random.list(counts, 3);
  const List ys = random.list(counts, 3);
  const List expected(ys);
  const float a = 1.0f / 3.0f;
  const float b = 7.0f;
  const float* given_a = random.chance(70) ? &a : nullptr;
  const float* given_b = random.chance(70) ? &b : nullptr;
  float found = 0.0f;
  run<2>(counts, {&xs, &ys}, [&](const auto& work) { cuda::axpby_kernel(work, given_a, given_b, &found); });
  const Axpby function{given_a == nullptr ? 1.0f : a, given_b == nullptr ? 1.0f : b};
  bool bad = false;
  for_chunks(counts, [&](std::size_t i, std::int64_t first, std::int64_t count) {
    bad |= on_cpu.axpby(xs[i].operand(first), expected[i].operand(first), count, function);
  });
  compare(ys, expected, "axpby");
  expect(found == (bad ? 1.0f : 0.0f), "flag of axpby", counts.size());
}

float tree(std::vector<float> values) {
  if (values.empty()) return 0.0f;
  while (values.size() > 1) {
    if (values.size() % 2) values.push_back(0.0f);
    for (std::size_t i = 0; i < values.size() / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    values.resize(values.size() / 2);
  }
  return values[0];
}

void test_norm(Random& random, const Counts& counts) {
  const List tensors = random.list(counts, 3);
  // exactly as long as it has to be, and full of what would be seen
  std::vector<float> chunks(static_cast<std::size_t>(Plan(counts).chunks()), 77.0f);
  float found = 0.0f;
  float by_itself = 0.0f;
  run<1>(counts, {&tensors}, [&](const auto& work) { cuda::sum_of_squares_kernel(work, chunks.data(), &found); });
  run<1>(counts, {&tensors}, [&](const auto& work) { cuda::nonfinite_kernel(work, &by_itself); });
  std::vector<float> expected;
  bool bad = false;
  bool any = false;
  for_chunks(counts, [&](std::size_t i, std::int64_t first, std::int64_t count) {
    expected.push_back(on_cpu.sum_of_squares(tensors[i].operand(first), count, &bad));
    any |= on_cpu.has_nonfinite(tensors[i].operand(first), count);
    expect(bits_of(chunks[expected.size() - 1]) == bits_of(expected.back()), "a sum of squares", i);
  });
  expect(bad == any && found == (bad ? 1.0f : 0.0f), "flag of sum of squares", counts.size());
  expect(by_itself == (bad ? 1.0f : 0.0f), "flag of nonfinite", counts.size());
}

// Trees that need several rounds: more values than a block of threads takes at once.
void test_trees(Random& random) {
  for (const std::size_t count : {0, 1, 2, 511, 513, 2500}) {
    std::vector<float> values(count);
    for (float& value : values) value = std::fabs(random.value());
    const float half = 0.5f;
    const float* given = count % 2 ? &half : nullptr;
    const float expected = std::sqrt(tree(values)) * (count % 2 ? half : 1.0f);
    float norm = -1.0f;
    shim::launch(1, shim::kThreads,
                 [&] { cuda::norm_kernel(values.data(), static_cast<std::int64_t>(values.size()), given, &norm); });
    expect(bits_of(norm) == bits_of(expected), "a norm", count);
  }
}

// Where a block begins in tensors that no memory holds: beyond 2^31 elements, and at the last block of a grid.
void test_chunks() {
  constexpr std::int32_t kLarge = (std::int64_t{1} << 31) - 170;
  static Work<TensorSlot<1>, cuda::kFewBytes> work;
  work.size = 70;
  char* base = reinterpret_cast<char*>(std::uintptr_t{1} << 50);
  for (int i = 0; i < 70; ++i) work.slots[i] = {{base + i}, 100, 100 + i, i, {Type::kBfloat}};
  work.slots[69] = {{base}, (std::int64_t{kLarge} + 1) * kChunk - 5, 169, 69, {Type::kHalf}};
  for (const std::int32_t block : {0, 1, 31, 32, 33, 63, 64, 68, 69, 70, 65536 + 69, 70001, kLarge + 69}) {
    static cuda::Chunk<1> chunk;
    shim::launch(1, shim::kThreads, [&] {
      blockIdx.x = static_cast<unsigned>(block);
      cuda::find_chunk(chunk, work);
    });
    const int tensor = std::min(block, 69);
    const std::int64_t inside = block - tensor;
    const std::uintptr_t begin = (std::uintptr_t{1} << 50) + (tensor == 69 ? inside * kChunk * 2 : tensor);
    expect(chunk.tensor == tensor && chunk.number == block + 100, "the tensor of a block", static_cast<std::size_t>(block));
    expect(reinterpret_cast<std::uintptr_t>(chunk.operands[0].data) == begin, "the begin of a block",
           static_cast<std::size_t>(block));
    expect(chunk.aligned[0] == (begin % 8 == 0), "the alignment of a block", static_cast<std::size_t>(block));
    const std::int64_t count = tensor < 69 ? 100 : inside == kLarge ? kChunk - 5 : kChunk;
    expect(chunk.count == count, "the elements of a block", static_cast<std::size_t>(block));
  }
}

// -- a step

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
    for (int i = 0; i < kDecision; ++i) {
      equal = equal && (decision[i] == other.decision[i] || (std::isnan(decision[i]) && std::isnan(other.decision[i])));
    }
    return equal && std::equal(counts, counts + 3, other.counts);
  }
};

void fill_hyper(Random& random, Kind kind, double (&hyper)[kHyper]) {
  const double adam[kHyper] = {1e-2,
                               random.chance(20) ? 0.25 : 0.9,
                               0.99,
                               1e-8,
                               random.chance(50) ? 0.1 : 0.0,
                               random.chance(30) * 1.0,
                               random.chance(50) * 1.0};
  const double sgd[kHyper] = {
      1e-1, 0.9, random.chance(30) ? 0.1 : 0.0, random.chance(50) * 1.0, random.chance(50) ? 0.1 : 0.0, random.chance(30) * 1.0,
      0.0};
  std::copy_n(kind == Kind::kAdam ? adam : sgd, kHyper, hyper);
}

void test_prologue(Random& random, int size) {
  const Kind kind = random.chance(50) ? Kind::kAdam : Kind::kSgd;
  const float rate = 0.03125f;
  std::vector<float> steps(static_cast<std::size_t>(size));
  std::vector<float> expected_steps;
  std::vector<cuda::ParameterSlot> slots(steps.size());
  for (int i = 0; i < size; ++i) {
    steps[i] = static_cast<float>(random.chance(30) ? 0 : random.below(100000));
    fill_hyper(random, kind, slots[i].hyper);
    slots[i].rate = random.chance(30) ? &rate : nullptr;
    slots[i].step = &steps[i];
  }
  expected_steps = steps;
  const float found = random.chance(30) ? 1.0f : 0.0f;
  const float norm = 7.5f;
  const bool moves = random.chance(80);
  std::vector<float> rows(steps.size() * kRow, -1.0f);
  std::vector<float> expected_rows(rows);
  State state;
  State expected;
  for (int i = 0; i < size; ++i) {
    fill_row(kind, slots[i].hyper, slots[i].rate, &expected_steps[i], found == 0.0f, &expected_rows[i * kRow]);
  }
  expected.decide(&found, &norm, moves)(expected.decision);
  const Decide decide = state.decide(&found, &norm, moves);
  const auto kernel = [&](const auto& work) { cuda::prologue_kernel(work, decide, kind, rows.data(), state.decision, size); };
  if (size == 0) {
    const Work<cuda::ParameterSlot, cuda::kFewBytes> none{};
    shim::launch(1, cuda::kPrologueThreads, [&] { kernel(none); });
  }
  run(slots, kernel, cuda::kPrologueThreads);
  expect(state == expected, "a decision", size);
  expect(steps == expected_steps, "step counts", size);
  for (int i = 0; i < size; ++i) {
    expect(std::equal(&rows[i * kRow], &rows[i * kRow] + kRow, &expected_rows[i * kRow]), "a row", i);
  }
}

// Gradients, parameters, states and partners, of types that fit together.
std::vector<List> make_lists(Random& random, const Counts& counts, int states) {
  std::vector<List> lists;
  for (int i = 0; i < 2 + states; ++i) lists.push_back(random.list(counts, 3));
  for (int i = 3; i < 2 + states; ++i) {
    // second moments are not negative
    for (const Tensor& tensor : lists[i]) {
      for (std::int64_t k = 0; k < tensor.count; ++k) tensor.set(k, std::fabs(tensor.get(k)));
    }
  }
  List partners;
  partners.reserve(counts.size());
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const bool is_wide = lists[1][i].type == Type::kFloat;
    const Type type = !is_wide ? Type::kShort : random.chance(50) ? Type::kHalf : Type::kBfloat;
    const Tensor& made = partners.emplace_back(type, counts[i], random.chance(30) ? 1 + random.below(7) : 0);
    for (std::int64_t k = 0; type == Type::kShort && k < counts[i]; ++k) {
      *static_cast<std::int16_t*>(made.at(k)) = static_cast<std::int16_t>(random.below(1 << 12) - (1 << 11));
    }
  }
  lists.push_back(std::move(partners));
  return lists;
}

// kernel(work, rows) and `expected`, a function of the CPU, over the same lists; `optional` is missing in half of the cases.
template <int kLists, typename K>
void test_update(Random& random, const Counts& counts, Kind kind, int optional, bool has_optional, const float* decision,
                 decltype(cpu::Kernels::adam) on_cpu_kernel, const std::vector<const char*>& names, K kernel) {
  const std::vector<List> lists = make_lists(random, counts, kLists - 3);
  const std::vector<List> expected(lists);
  std::vector<bool> has_partner;
  std::vector<float> rows(counts.size() * kRow);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    has_partner.push_back(random.chance(60));
    double hyper[kHyper];
    fill_hyper(random, kind, hyper);
    float step = static_cast<float>(random.below(3));
    fill_row(kind, hyper, nullptr, &step, true, &rows[i * kRow]);
  }
  const auto operand = [&](const std::vector<List>& from, int list, std::size_t i, std::int64_t first) {
    const bool missing = (list == kLists - 1 && !has_partner[i]) || (list == optional && !has_optional);
    return missing ? Operand{nullptr, Type::kFloat} : from[list][i].operand(first);
  };
  run(slots_of<kLists>(counts, [&](int list, std::size_t i) { return operand(lists, list, i, 0); }),
      [&](const auto& work) { kernel(work, rows.data()); });
  for_chunks(counts, [&](std::size_t i, std::int64_t first, std::int64_t count) {
    Operand operands[kLists];
    for (int list = 0; list < kLists; ++list) operands[list] = operand(expected, list, i, first);
    if (decision[kSkip] == 0.0f) on_cpu_kernel(operands, count, &rows[i * kRow], decision);
  });
  for (int list = 0; list < kLists; ++list) {
    compare(lists[list], expected[list], decision[kSkip] != 0.0f ? "a skipped step" : names[list]);
  }
}

template <bool kAmsgrad>
void test_adam(Random& random, const Counts& counts, const float* decision) {
  test_update<kAdamLists>(
      random, counts, Kind::kAdam, kAdamMost, kAmsgrad, decision, on_cpu.adam,
      {"a gradient", "a parameter of adam", "a first moment", "a second moment", "a maximum", "a partner of adam"},
      [&](const auto& work, const float* rows) { cuda::adam_kernel<kAmsgrad>(work, rows, decision); });
}

template <bool kMomentums>
void test_sgd(Random& random, const Counts& counts, const float* decision) {
  test_update<kSgdLists>(random, counts, Kind::kSgd, kSgdBuffer, kMomentums, decision, on_cpu.sgd,
                         {"a gradient", "a parameter of sgd", "a momentum", "a partner of sgd"},
                         [&](const auto& work, const float* rows) { cuda::sgd_kernel<kMomentums>(work, rows, decision); });
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 0u;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 3;
  Random random(seed);
  for (int round = 0; round < rounds; ++round) {
    const float taken[kDecision] = {0.0f, 0x1p-3f, 0.75f, round % 2 ? INFINITY : 2.0f};
    const float skipped[kDecision] = {1.0f, 0x1p-3f, 0.75f, INFINITY};
    // more tensors than a launch holds, once
    const bool last = round == rounds - 1;
    for (const bool in_place : {false, true}) test_scale(random, random.counts(last && in_place ? kTooMany<2> : 0), in_place);
    for (int i = 0; i < 4; ++i) test_axpby(random, random.counts(i * 7));
    test_norm(random, random.counts(last ? kTooMany<1> : 0));
    for (const int size : {0, random.below(70)}) test_prologue(random, size);
    if (last) test_prologue(random, Work<cuda::ParameterSlot, cuda::kMostBytes>::kMost + 3);
    test_adam<false>(random, random.counts(last ? kTooMany<kAdamLists> : 0), taken);
    test_adam<true>(random, random.counts(20), taken);
    test_adam<false>(random, random.counts(5), skipped);
    test_sgd<false>(random, random.counts(20), taken);
    test_sgd<true>(random, random.counts(last ? kTooMany<kSgdLists> : 0), taken);
    test_sgd<true>(random, random.counts(5), skipped);
  }
  test_chunks();
  test_trees(random);
  std::printf("%d rounds, %d wrong\n", rounds, failures);
  return failures == 0 ? 0 : 1;
}
