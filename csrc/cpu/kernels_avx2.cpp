// The kernels for AVX2, F16C and FMA.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <type_traits>

#include "kernels.h"

// after the headers: what they define may be used by code for every processor
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma")
#endif
#define AMP_WIDTH 8
#define AMP_TABLE kAvx2
#include "vector.inl"

#include "kernels.inl"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
