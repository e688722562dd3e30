// The words of CUDA's own header that csrc/cuda uses.
#pragma once

typedef int cudaError_t;
typedef void* cudaStream_t;

inline cudaError_t cudaGetLastError() { return 0; }
