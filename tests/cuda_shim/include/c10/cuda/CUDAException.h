#pragma once

#include <c10/util/Exception.h>

#define C10_CUDA_CHECK(error) TORCH_CHECK((error) == 0, "a launch failed")
