// The kernels for AVX-512 F, BW, DQ and VL.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <type_traits>

#include "kernels.h"

// after the headers: what they define may be used by code for every processor
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#endif
#define AMP_WIDTH 16
#define AMP_TABLE kAvx512
#include "vector.inl"

#include "kernels.inl"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
