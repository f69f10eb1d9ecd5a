// lookup.cuh on a GPU: one thread an entry.
#include <cuda_runtime.h>

#include "lookup.cuh"

namespace lookup {

constexpr int THREADS = 256;
constexpr int64_t MAX_BLOCKS = 1 << 20;  // more entries than threads: each goes on in strides

template <class Step>
__global__ void each(const Step step, const int64_t n) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) step(i);
}

template <class Step>
int run(const Step& step, int64_t n, void* stream) {
    if (n <= 0) return 0;
    const int64_t wanted = (n + THREADS - 1) / THREADS;
    const int blocks = static_cast<int>(wanted < MAX_BLOCKS ? wanted : MAX_BLOCKS);
    each<<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(step, n);
    return static_cast<int>(cudaGetLastError());
}

}  // namespace lookup
