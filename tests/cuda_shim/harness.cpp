// Runs the CUDA kernels of csrc/cuda on a CPU and compares them, bit for bit, with the CPU kernels: harness SEED ROUNDS.

#include "material.h"
#include "shim.h"

#include "../../csrc/cpu/kernels.h"
#include "../../csrc/cuda/elementwise_kernels.cuh"
#include "../../csrc/cuda/exponents_kernel.cuh"
#include "../../csrc/cuda/norm_kernels.cuh"

using namespace amp_wrapper;
using cuda::Segments;
using cuda::Work;

namespace {

std::vector<std::int64_t> counts_of(const List& list) {
  std::vector<std::int64_t> counts;
  for (const Tensor& tensor : list) counts.push_back(tensor.count);
  return counts;
}

// Several launches, or one with a table, in turns.
template <int kLists, typename F>
void for_each_launch(const std::vector<const List*>& lists, F body) {
  static int calls = 0;
  Tables tables;
  cuda::for_launches<kLists>(
      counts_of(*lists[0]),
      [&](int list, std::int64_t tensor, std::int64_t element, Type* type) {
        *type = (*lists[list])[tensor].type;
        return (*lists[list])[tensor].at(element);
      },
      [&](const Work<kLists>& work, std::int64_t before) { body(work, before, static_cast<unsigned>(work.chunks)); },
      ++calls % 2 ? tables.upload() : cuda::Upload());
}

void test_scale(Random& random, const std::vector<std::int64_t>& counts, bool scaled) {
  const List sources = random.list(counts, 3);
  List targets = random.list(counts, 3);
  const List expected(targets);
  const float given = random.chance(50) ? 1.0f / 3.0f : 0x1p-16f;
  const float* scale = scaled ? &given : nullptr;
  const float factor = scale == nullptr ? 1.0f : given;
  float found = 0.0f;
  float* flag = random.chance(80) ? &found : nullptr;
  for_each_launch<2>({&sources, &targets}, [&](const auto& work, auto, unsigned blocks) {
    shim::launch(blocks, shim::kThreads, [&, scale, flag] { cuda::scale_kernel(work, scale, flag); });
  });
  bool bad = false;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    bad = cpu::kDefault.scale(sources[i].type, sources[i].data(), expected[i].type, expected[i].data(), counts[i], factor, true,
                              false) ||
          bad;
    expect(targets[i].same(expected[i]), "scale", i);
  }
  expect(found == (bad && flag != nullptr ? 1.0f : 0.0f), "flag of scale", counts.size());
}

void test_scale_in_place(Random& random, const std::vector<std::int64_t>& counts) {
  const List tensors = random.list(counts, 3);
  const List expected(tensors);
  const float factor = 3.0f;
  for_each_launch<2>({&tensors, &tensors}, [&](const auto& work, auto, unsigned blocks) {
    shim::launch(blocks, shim::kThreads, [&] { cuda::scale_kernel(work, &factor, nullptr); });
  });
  for (std::size_t i = 0; i < counts.size(); ++i) {
    cpu::kDefault.scale(expected[i].type, expected[i].data(), expected[i].type, expected[i].data(), counts[i], factor, true,
                        false);
    expect(tensors[i].same(expected[i]), "scale in place", i);
  }
}

void test_copy(Random& random, const std::vector<std::int64_t>& counts) {
  const List sources = random.list(counts, 3);
  for (const Tensor& source : sources) {
    // a NaN with a payload, which a copy into the same type keeps
    const std::uint16_t nan = source.type == Type::kBfloat ? 0x7fa5 : 0x7d55;
    if (source.count > 0 && source.type != Type::kFloat) {
      std::memcpy(source.at(random.below(static_cast<int>(source.count))), &nan, sizeof(nan));
    }
  }
  List targets = random.list(counts, 3);
  const List expected(targets);
  for_each_launch<2>({&sources, &targets}, [&](const auto& work, auto, unsigned blocks) {
    shim::launch(blocks, shim::kThreads, [&] { cuda::copy_kernel(work); });
  });
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    cpu::kDefault.copy(sources[i].type, sources[i].data(), expected[i].type, expected[i].data(), counts[i], false);
    expect(targets[i].same(expected[i]), "copy", i);
  }
}

void test_axpby(Random& random, const std::vector<std::int64_t>& counts) {
  const List xs = random.list(counts, 3);
  const List ys = random.list(counts, 3);
  List targets = random.list(counts, 3);
  const List expected(targets);
  const float third = 1.0f / 3.0f;
  const float seven = 7.0f;
  const float* given_a = random.chance(70) ? &third : nullptr;
  const float* given_b = random.chance(70) ? &seven : nullptr;
  const float a = given_a == nullptr ? 1.0f : third;
  const float b = given_b == nullptr ? 1.0f : seven;
  const int checked = random.below(4);
  float found = 0.0f;
  for_each_launch<3>({&xs, &ys, &targets}, [&](const auto& work, auto, unsigned blocks) {
    shim::launch(blocks, shim::kThreads,
                 [&, given_a, given_b] { cuda::axpby_kernel(work, given_a, given_b, &found, checked); });
  });
  int bad = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    bad |= cpu::kDefault.axpby(xs[i].type, xs[i].data(), ys[i].type, ys[i].data(), expected[i].type, expected[i].data(),
                               counts[i], Axpby{a, b}, true, false);
    // infinity minus infinity is NaN, whose sign no rule settles
    if ((bad & 3) == 0) expect(targets[i].same(expected[i]), "axpby", i);
  }
  expect(found == ((bad & checked) ? 1.0f : 0.0f), "flag of axpby", counts.size());
}

template <typename V, typename J>
V tree(std::vector<V> values, J join) {
  if (values.empty()) return V(0);
  while (values.size() > 1) {
    if (values.size() % 2) values.push_back(V(0));
    for (std::size_t i = 0; i < values.size() / 2; ++i) values[i] = join(values[2 * i], values[2 * i + 1]);
    values.resize(values.size() / 2);
  }
  return values[0];
}

template <typename R, typename K, typename C>
void test_norm(Random& random, const std::vector<std::int64_t>& counts, const char* name, K kernel, C chunk_of) {
  using V = typename R::Value;
  const List tensors = random.list(counts, 3);
  // exactly as long as they have to be, and full of what would be seen
  std::vector<V> chunks(cuda::all_chunks(counts), V(77));
  std::vector<V> values(counts.size(), V(77));
  for_each_launch<1>({&tensors}, [&](const auto& work, std::int64_t before, unsigned blocks) {
    shim::launch(blocks, shim::kThreads, [&, before] { kernel(work, chunks.data() + before); });
  });
  Tables tables;
  cuda::for_segments(
      counts,
      [&](const Segments& segments, std::int64_t base, std::int64_t first) {
        shim::launch(static_cast<unsigned>(segments.count), shim::kThreads,
                     [&, base, first] { cuda::join_tensors_kernel<R>(segments, chunks.data() + base, values.data() + first); });
      },
      random.chance(50) ? tables.upload() : cuda::Upload());
  const float half = 0.5f;
  const float* given = random.chance(70) ? &half : nullptr;
  const float inverse = given == nullptr ? 1.0f : half;
  const bool per_tensor = random.chance(70);
  float total = -1.0f;
  float found = 0.0f;
  std::vector<float> each(counts.size(), -1.0f);
  float* norms = per_tensor ? each.data() : nullptr;
  shim::launch(1, shim::kThreads, [&, given, norms] {
    cuda::join_norms_kernel<R>(values.data(), static_cast<std::int64_t>(counts.size()), given, &total, norms, &found);
  });
  std::vector<V> expected;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    std::vector<V> parts;
    for (std::int64_t begin = 0; begin < counts[i]; begin += kChunk) {
      parts.push_back(chunk_of(tensors[i], begin, std::min(kChunk, counts[i] - begin)));
    }
    expected.push_back(tree(parts, R::join));
    expect(bits_of(each[i]) == bits_of(per_tensor ? R::norm(expected[i]) * inverse : -1.0f), name, i);
  }
  const V all = tree(expected, R::join);
  expect(bits_of(total) == bits_of(R::norm(all) * inverse), name, counts.size());
  expect(found == (R::is_bad(all) ? 1.0f : 0.0f), "flag of a norm", counts.size());
}

void test_norms(Random& random, const std::vector<std::int64_t>& counts) {
  test_norm<cuda::Sum>(
      random, counts, "l2norm", [](const Work<1>& work, float* chunks) { cuda::sum_of_squares_kernel(work, chunks, nullptr); },
      [](const Tensor& tensor, std::int64_t begin, std::int64_t count) {
        bool bad = false;
        return cpu::kDefault.sum_of_squares(tensor.type, tensor.at(begin), count, &bad);
      });
  test_norm<cuda::Largest>(
      random, counts, "maxnorm", [](const Work<1>& work, std::int32_t* chunks) { cuda::largest_kernel(work, chunks, nullptr); },
      [](const Tensor& tensor, std::int64_t begin, std::int64_t count) {
        return cpu::kDefault.largest(tensor.type, tensor.at(begin), count);
      });
}

void test_scale_and_sum(Random& random, const std::vector<std::int64_t>& counts) {
  const List sources = random.list(counts, 3);
  List targets = random.list(counts, 3);
  const List expected(targets);
  const float given = 1.0f / 3.0f;
  const float* scale = random.chance(80) ? &given : nullptr;
  const float factor = scale == nullptr ? 1.0f : given;
  std::vector<float> chunks(cuda::all_chunks(counts), 77.0f);
  float found = 0.0f;
  for_each_launch<2>({&sources, &targets}, [&](const auto& work, std::int64_t before, unsigned blocks) {
    shim::launch(blocks, shim::kThreads,
                 [&, scale, before] { cuda::scale_and_sum_kernel(work, scale, chunks.data() + before, &found); });
  });
  bool bad = false;
  std::size_t chunk = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    for (std::int64_t begin = 0; begin < counts[i]; begin += kChunk) {
      const std::int64_t count = std::min(kChunk, counts[i] - begin);
      const float sum = cpu::kDefault.scale_and_sum(sources[i].type, sources[i].at(begin), expected[i].type,
                                                    expected[i].at(begin), count, factor, false, &bad);
      expect(bits_of(chunks[chunk++]) == bits_of(sum), "a sum beside scale", i);
    }
    expect(targets[i].same(expected[i]), "scale and sum", i);
  }
  expect(found == (bad ? 1.0f : 0.0f), "flag of scale and sum", counts.size());
}

void test_flags(Random& random, const std::vector<std::int64_t>& counts) {
  const List tensors = random.list(counts, 3);
  float by_sum = 0.0f;
  float by_largest = 0.0f;
  std::vector<float> chunks(cuda::all_chunks(counts));
  for_each_launch<1>({&tensors}, [&](const auto& work, std::int64_t before, unsigned blocks) {
    shim::launch(blocks, shim::kThreads, [&, before] { cuda::sum_of_squares_kernel(work, chunks.data() + before, &by_sum); });
    shim::launch(blocks, shim::kThreads, [&] { cuda::largest_kernel(work, nullptr, &by_largest); });
  });
  bool bad = false;
  for (const Tensor& tensor : tensors)
    bad = bad || cpu::kDefault.largest(tensor.type, tensor.data(), tensor.count) >= kExponent;
  expect(by_sum == (bad ? 1.0f : 0.0f), "flag of sum_of_squares", counts.size());
  expect(by_largest == (bad ? 1.0f : 0.0f), "flag of largest", counts.size());
}

void test_exponents(Random& random, const std::vector<std::int64_t>& counts) {
  const List tensors = random.list(counts, 3);
  for (const Tensor& tensor : tensors) {
    // what arithmetic may lose, and zeros
    for (std::int64_t i = random.below(50); i < tensor.count; i += 1 + random.below(200)) {
      tensor.set(i, random.chance(30) ? -0.0f : std::ldexp(random.value(), -random.below(150)));
    }
  }
  // some are there from before; exactly as long as they have to be
  std::vector<std::int64_t> rows(counts.size() * kExponents);
  for (std::int64_t& number : rows) number = random.chance(10) ? (std::int64_t{1} << 33) + random.below(9) : 0;
  std::vector<float> largest(counts.size());
  for (float& value : largest) value = random.chance(30) ? 700.0f : 0.0f;
  std::vector<std::int64_t> expected_rows(rows);
  std::vector<float> expected(largest);
  cuda::for_launches<3>(
      counts,
      [&](int list, std::int64_t tensor, std::int64_t element, Type* type) -> void* {
        if (list == 1) return rows.data() + tensor * kExponents;
        if (list == 2) return largest.data() + tensor;
        *type = tensors[tensor].type;
        return tensors[tensor].at(element);
      },
      [&](const Work<3>& work, auto) {
        shim::launch(static_cast<unsigned>(work.chunks), shim::kThreads, [&] { cuda::exponents_kernel(work); });
      });
  for (std::size_t i = 0; i < counts.size(); ++i) {
    for (std::int64_t begin = 0; begin < counts[i]; begin += kChunk) {
      std::uint32_t columns[kExponents] = {};
      const std::int32_t most =
          cpu::kDefault.exponents(tensors[i].type, tensors[i].at(begin), std::min(kChunk, counts[i] - begin), columns);
      for (int column = 0; column < kExponents; ++column) expected_rows[i * kExponents + column] += columns[column];
      expected[i] = std::max(expected[i], float_of(static_cast<std::uint32_t>(most)));
    }
    expect(std::equal(rows.begin() + i * kExponents, rows.begin() + (i + 1) * kExponents, expected_rows.begin() + i * kExponents),
           "exponents", i);
    expect(bits_of(largest[i]) == bits_of(expected[i]), "the largest beside exponents", i);
  }
}

// A tree that needs several rounds: more values than a block of threads takes at once.
void test_long_tree(Random& random) {
  for (const std::int64_t count : {std::int64_t{1}, std::int64_t{511}, std::int64_t{513}, std::int64_t{2500}}) {
    std::vector<float> values(count);
    for (float& value : values) value = random.value();
    const float expected = tree(values, cuda::Sum::join);
    Segments segments{};
    segments.count = 1;
    segments.starts[1] = static_cast<std::int32_t>(count);
    float result = -1.0f;
    shim::launch(1, shim::kThreads, [&] { cuda::join_tensors_kernel<cuda::Sum>(segments, values.data(), &result); });
    expect(bits_of(result) == bits_of(expected), "a long tree", static_cast<std::size_t>(count));
  }
}

void test_refresh(Random& random, const std::vector<std::int64_t>& counts) {
  const List weights = random.list(counts, 2, 1);
  List masters = random.list(counts, 1);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    const float nan = std::nanf("1");
    if (random.chance(50))
      cpu::kDefault.copy(Type::kFloat, &nan, weights[i].type, weights[i].at(random.below(static_cast<int>(counts[i]))), 1,
                         false);
    // mostly what rounding gives, and some edits
    std::vector<float> values(static_cast<std::size_t>(counts[i]));
    cpu::kDefault.copy(weights[i].type, weights[i].data(), Type::kFloat, values.data(), counts[i], false);
    for (float& value : values) {
      value *= random.chance(2) ? 2.0f : 1.00001f;
      // any NaN is the rounded other, and an edit where only one is
      if (random.chance(1)) value = std::nanf("7");
    }
    std::memcpy(masters[i].data(), values.data(), values.size() * sizeof(float));
  }
  const List expected(masters);
  std::vector<std::uint8_t> flags(counts.size(), 0);
  cuda::for_launches<3>(
      counts,
      [&](int list, std::int64_t tensor, std::int64_t element, Type* type) -> void* {
        if (list == 2) return flags.data() + tensor;
        const Tensor& chosen = list == 0 ? weights[tensor] : masters[tensor];
        *type = chosen.type;
        return chosen.at(element);
      },
      [&](const Work<3>& work, auto) {
        shim::launch(static_cast<unsigned>(work.chunks), shim::kThreads, [&] { cuda::refresh_kernel(work); });
      });
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const bool edited =
        cpu::kDefault.refresh(weights[i].type, weights[i].data(), reinterpret_cast<float*>(expected[i].data()), counts[i]);
    expect(masters[i].same(expected[i]), "refresh", i);
    expect((flags[i] != 0) == edited, "flag of refresh", i);
  }
}

// Where a block begins in tensors that no memory holds: beyond 2^31 elements, and at the last block of a grid.
void test_place() {
  const std::int64_t large = cuda::kMostChunks - 1;
  Work<1> work{};
  work.entries = 2;
  work.starts[1] = static_cast<std::int32_t>(large);
  work.starts[2] = static_cast<std::int32_t>(large + 1);
  work.counts[0] = large * kChunk - 5;
  work.counts[1] = 7;
  for (const std::int64_t chunk :
       {std::int64_t{0}, std::int64_t{65535}, std::int64_t{65536}, std::int64_t{70001}, large - 1, large}) {
    blockIdx.x = static_cast<unsigned>(chunk);
    const auto place = cuda::place_of(work);
    const bool last = chunk == large;
    expect(place.entry == (last ? 1 : 0), "the entry of a block", static_cast<std::size_t>(chunk));
    expect(place.begin == (last ? 0 : chunk * kChunk), "the begin of a block", static_cast<std::size_t>(chunk));
    const std::int64_t count = last ? 7 : chunk == large - 1 ? kChunk - 5 : kChunk;
    expect(place.count == count, "the elements of a block", static_cast<std::size_t>(chunk));
  }
}

void test_update_scale(Random& random) {
  const ScaleUpdate rule{2.0f, 0.5f, 1.0f, 0x1p24f, 3, 2};
  float scale = 0x1p16f;
  float expected_scale = scale;
  std::int32_t state[2] = {0, 2};
  std::int32_t expected_state[2] = {0, 2};
  for (int step = 0; step < 50; ++step) {
    const float found = random.chance(40) ? 1.0f : 0.0f;
    shim::launch(1, 1, [&] { cuda::update_scale_kernel(rule, &scale, &state[0], &state[1], &found); });
    rule(&expected_scale, &expected_state[0], &expected_state[1], found);
    expect(scale == expected_scale && state[0] == expected_state[0] && state[1] == expected_state[1], "update_scale", step);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 0u;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 3;
  Random random(seed);
  for (int round = 0; round < rounds; ++round) {
    const bool many = round % 2 == 1;
    for (const bool scaled : {true, false}) test_scale(random, random.counts(many), scaled);
    test_scale_in_place(random, random.counts(many));
    test_copy(random, random.counts(many));
    test_axpby(random, random.counts(many));
    test_norms(random, random.counts(many));
    test_scale_and_sum(random, random.counts(many));
    test_flags(random, random.counts(many));
    test_refresh(random, random.counts(many));
    test_exponents(random, random.counts(many));
  }
  test_place();
  test_long_tree(random);
  test_update_scale(random);
  std::printf("%d rounds, %d wrong\n", rounds, failures);
  return failures == 0 ? 0 : 1;
}
