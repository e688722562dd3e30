// The kernels for any processor.
#include <cmath>
#include <type_traits>

#include "kernels.h"

#define AMP_WIDTH 4
#define AMP_TABLE kDefault
#include "vector.inl"

#include "kernels.inl"
