// Half precision of the stand-in: the compiler's own.
#pragma once

#include "cuda_runtime.h"

struct __half {
    _Float16 value;
};
inline float __half2float(__half half) { return static_cast<float>(half.value); }
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }
