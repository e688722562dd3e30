// The CUDA kernel that counts elements by their power of two.
#pragma once

#include "norm_kernels.cuh"

namespace amp_wrapper::cuda {

// Adds the elements of a chunk to the columns of this warp, and returns the largest finite magnitude that the thread has seen.
template <typename T>
__device__ inline std::int32_t count_elements(const T* data, int count, unsigned* columns) {
  std::int32_t most = 0;
  const auto add = [&](float value) {
    const std::int32_t magnitude = magnitude_of(value);
    atomicAdd(columns + column_of(magnitude), 1u);
    if (magnitude < kExponent) most = Largest::join(most, magnitude);
  };
  int done = 0;
  if (is_aligned(data)) {
    const int vectors = count / kVector;
    done = vectors * kVector;
#pragma unroll 2
    for (int v = static_cast<int>(threadIdx.x); v < vectors; v += kThreads) {
      const Pack<T> pack = load_pack(data + v * kVector);
#pragma unroll
      for (int i = 0; i < kVector; ++i) add(pack.get(i));
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < count; i += kThreads) add(to_float(data[i]));
  return most;
}

// The second list holds the row of counts of each tensor, the third its largest magnitude, which is read as an integer: floats
// that are not negative have the order of their bits. Blocks of one tensor add to the same row; integers have no order.
__global__ void __launch_bounds__(kThreads) exponents_kernel(const __grid_constant__ Work<3> work) {
  // each warp has its own, so that fewer threads wait for the same place
  __shared__ unsigned columns[kWarps][kExponents];
  const auto place = place_of(work);
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * kExponents; i += kThreads)
    columns[i / kExponents][i % kExponents] = 0;
  __syncthreads();
  unsigned* own = columns[threadIdx.x / 32];
  std::int32_t most = with_type(place.types[0], [&](auto* t) {
    return count_elements(data_of<const std::remove_pointer_t<decltype(t)>>(place, 0), place.count, own);
  });
  // every thread has counted when this ends
  most = join_block<Largest>(join_warp<Largest>(most, 1));
  auto* row = in_global(static_cast<unsigned long long*>(place.data[1]));
  for (int column = static_cast<int>(threadIdx.x); column < kExponents; column += kThreads) {
    unsigned sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += columns[warp][column];
    if (sum > 0) atomicAdd(row + column, static_cast<unsigned long long>(sum));
  }
  if (threadIdx.x == 0) atomicMax(in_global(static_cast<int*>(place.data[2])), most);
}

}  // namespace amp_wrapper::cuda
