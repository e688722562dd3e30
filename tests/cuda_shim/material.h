// What the harnesses work on: tensors and lists of them, by chance.
//
// Every tensor has a buffer of its own of exactly its size, so that an address sanitizer sees one byte too many.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "../../csrc/cuda/kernel_args.h"

namespace amp_wrapper {

inline int failures = 0;

inline void expect(bool good, const char* what, std::size_t index) {
  if (good) return;
  std::printf("WRONG: %s, tensor %zu\n", what, index);
  ++failures;
}

// A buffer of exactly `count` elements, which begins `shift` elements behind an aligned place.
class Tensor {
 public:
  Tensor(Type type, std::int64_t count, int shift)
      : type(type),
        count(count),
        offset_(static_cast<std::size_t>(shift * size_of(type))),
        bytes_(offset_ + count * size_of(type)) {
    // malloc aligns to 16 bytes, and ends where it was told to
    memory_ = static_cast<char*>(std::malloc(bytes_ == 0 ? 1 : bytes_));
    std::memset(memory_, 0, bytes_);
  }
  Tensor(const Tensor& other) : Tensor(other.type, other.count, static_cast<int>(other.offset_ / size_of(other.type))) {
    std::memcpy(memory_, other.memory_, bytes_);
  }
  ~Tensor() { std::free(memory_); }
  Tensor& operator=(const Tensor&) = delete;

  char* data() const { return memory_ + offset_; }
  Operand operand(std::int64_t element = 0) const { return {data() + element * size_of(type), type}; }
  void* at(std::int64_t element) const { return data() + element * size_of(type); }
  void set(std::int64_t element, float value) const {
    if (type == Type::kFloat) *static_cast<float*>(at(element)) = value;
    if (type == Type::kHalf) *static_cast<Half*>(at(element)) = from_float<Half>(value);
    if (type == Type::kBfloat) *static_cast<Bfloat*>(at(element)) = from_float<Bfloat>(value);
  }
  float get(std::int64_t element) const {
    if (type == Type::kHalf) return to_float(*static_cast<Half*>(at(element)));
    if (type == Type::kBfloat) return to_float(*static_cast<Bfloat*>(at(element)));
    return *static_cast<float*>(at(element));
  }
  // any NaN is like any other: processors choose among those that go in
  bool same(const Tensor& other) const {
    for (std::int64_t i = 0; i < count; ++i) {
      const bool equal = std::memcmp(at(i), other.at(i), size_of(type)) == 0;
      if (!equal && (type == Type::kShort || !std::isnan(get(i)) || !std::isnan(other.get(i)))) return false;
    }
    return true;
  }

  const Type type;
  const std::int64_t count;

 private:
  std::size_t offset_;
  std::size_t bytes_;
  char* memory_;
};

using List = std::vector<Tensor>;

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}

  int below(int limit) { return static_cast<int>(engine_() % static_cast<unsigned>(limit)); }
  bool chance(int percent) { return below(100) < percent; }

  float value() {
    std::normal_distribution<float> normal;
    return std::ldexp(normal(engine_), below(20) - 10);
  }

  // Of 1 to 6 tensors around blocks and chunks, or of `many` small ones.
  std::vector<std::int64_t> counts(int many = 0) {
    static const std::int64_t sizes[] = {0, 0, 1, 2, 7, 8, 9, 63, 64, 65, 1023, 1024, 1025, 2056, 32767, 32768, 32769, 70001};
    std::vector<std::int64_t> result;
    for (int i = many > 0 ? many : 1 + below(6); i > 0; --i) result.push_back(sizes[below(many > 0 ? 8 : 18)]);
    return result;
  }

  List list(const std::vector<std::int64_t>& counts, int types, int first_type = 0) {
    List result;
    result.reserve(counts.size());
    for (const std::int64_t count : counts) {
      result.emplace_back(static_cast<Type>(first_type + below(types)), count, chance(30) ? 1 + below(7) : 0);
      std::vector<float> values(static_cast<std::size_t>(count));
      for (float& value : values) value = this->value();
      if (count > 0 && chance(10)) values[below(static_cast<int>(count))] = chance(50) ? INFINITY : -INFINITY;
      const Tensor& made = result.back();
      for (std::int64_t i = 0; i < count; ++i) made.set(i, values[i]);
    }
    return result;
  }

 private:
  std::mt19937 engine_;
};

// Tables in memory of exactly their size.
class Tables {
 public:
  cuda::Upload upload() {
    return [this](const void* bytes, std::size_t size) {
      kept_.push_back(std::make_unique<Tensor>(Type::kBfloat, static_cast<std::int64_t>((size + 1) / 2), 0));
      std::memcpy(kept_.back()->data(), bytes, size);
      return kept_.back()->data();
    };
  }

 private:
  std::vector<std::unique_ptr<Tensor>> kept_;
};

}  // namespace amp_wrapper
