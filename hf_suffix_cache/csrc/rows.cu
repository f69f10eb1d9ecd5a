// Rows copied from one slab tensor to another on a GPU, keys turned on the way: rows.cpp says what, store/gather.py
// has the slow form of it.
//
// No torch headers: plain nvcc compiles it in seconds. Products and sums are rounded one by one, so that the results
// are those of rope.turn to the bit; not-a-number stays one, whatever its payload. All indices have 64 bits.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace {

enum Kind : int64_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3, kByte = 4 };

constexpr int kThreads = 256;
constexpr int64_t kVectorBytes = 16;      // what one thread loads at once
constexpr int64_t kUnitsPerThread = 8;    // layers and heads that share the search for a row's run, and its angles
constexpr int64_t kBlocksPerCore = 16;    // twice what a multiprocessor holds; threads go on by strides
constexpr int64_t kMaxGridY = 65535;

struct BFloat16 {
    uint16_t bits;
};

template <typename Stored, int count>
struct alignas(sizeof(Stored) * count) Vector {
    Stored at[count];
};

__device__ inline float load(float value) { return value; }
__device__ inline double load(double value) { return value; }
__device__ inline float load(BFloat16 value) { return __uint_as_float(static_cast<uint32_t>(value.bits) << 16); }
__device__ inline float load(__half value) { return __half2float(value); }

__device__ inline void store(float value, float* out) { *out = value; }
__device__ inline void store(double value, double* out) { *out = value; }
__device__ inline void store(float value, BFloat16* out) {
    const uint32_t wide = __float_as_uint(value);
    const uint32_t even = 0x7FFFu + ((wide >> 16) & 1u);  // to the nearest, halves to even
    const bool number = (wide & 0x7FFFFFFFu) <= 0x7F800000u;
    out->bits = number ? static_cast<uint16_t>((wide + even) >> 16) : static_cast<uint16_t>(0x7FC0u);
}
__device__ inline void store(float value, __half* out) { *out = __float2half_rn(value); }

__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double product(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double sum(double a, double b) { return __dadd_rn(a, b); }

struct Job {
    const char* source;
    int64_t source_layer, source_head;
    char* target;
    int64_t target_layer, target_head;
    int64_t layers, heads, dim;
    int64_t runs;
    const int64_t *from, *to, *ends, *turn;
    const void *cos, *sin;
    int64_t pairs, start, interleaved;
};

// Where a thread's share of a row lies: one vector, or two whose elements are pairs.
struct Share {
    int64_t first, second;  // elements; `second` is -1 if there is but one
    int64_t pair;           // the first pair among them
};

__device__ inline Share share_of(const Job& job, int64_t lane, int64_t count) {
    const int64_t lanes = job.pairs / count;
    if (lane < lanes) {
        const int64_t pair = lane * count;
        if (job.interleaved) return {job.start + 2 * pair, job.start + 2 * pair + count, pair};
        return {job.start + pair, job.start + job.pairs + pair, pair};
    }
    const int64_t rest = (lane - lanes) * count;  // dimensions before `start`, then those behind the turned ones
    return {rest < job.start ? rest : rest + 2 * job.pairs, -1, 0};
}

// The run that row `row` of all runs belongs to: the first whose end lies behind it.
__device__ inline int64_t run_of(const Job& job, int64_t row) {
    int64_t low = 0, high = job.runs - 1;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (job.ends[middle] > row) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

template <bool interleaved, typename Stored, typename Wide, int count>
__device__ inline void turn_share(const Vector<Stored, count>& a, const Vector<Stored, count>& b, const Wide* cos,
                                  const Wide* sin, Vector<Stored, count>* out_a, Vector<Stored, count>* out_b) {
    // element i of both vectors laid end to end, so that one piece of code serves both layouts
    const auto in = [&](int i) { return load(i < count ? a.at[i] : b.at[i - count]); };
    const auto out = [&](int i) { return i < count ? out_a->at + i : out_b->at + i - count; };
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const int one = interleaved ? 2 * i : i, other = interleaved ? 2 * i + 1 : i + count;
        const Wide first = in(one), second = in(other);
        store(sum(product(first, cos[i]), -product(second, sin[i])), out(one));
        store(sum(product(second, cos[i]), product(first, sin[i])), out(other));
    }
}

template <typename Stored, typename Wide, int count>
__global__ void copy_shares(Job job) {
    using Part = Vector<Stored, count>;
    const int64_t lanes = (job.dim - job.pairs) / count, units = job.layers * job.heads;
    const int64_t total = job.ends[job.runs - 1] * lanes;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; item < total; item += step) {
        const int64_t row = item / lanes, run = run_of(job, row);
        const Share share = share_of(job, item % lanes, count);
        const int64_t within = row - (run > 0 ? job.ends[run - 1] : 0), which = job.turn[run];
        const int64_t from = (job.from[run] + within) * job.dim, to = (job.to[run] + within) * job.dim;
        const bool turned = which >= 0 && share.second >= 0;
        Wide cos[count], sin[count];
        if (turned) {
#pragma unroll
            for (int i = 0; i < count; ++i) {
                cos[i] = static_cast<const Wide*>(job.cos)[which * job.pairs + share.pair + i];
                sin[i] = static_cast<const Wide*>(job.sin)[which * job.pairs + share.pair + i];
            }
        }
        for (int64_t unit = blockIdx.y; unit < units; unit += gridDim.y) {
            const int64_t layer = unit / job.heads, head = unit % job.heads;
            const char* source = job.source + layer * job.source_layer + head * job.source_head;
            char* target = job.target + layer * job.target_layer + head * job.target_head;
            const Stored* in = reinterpret_cast<const Stored*>(source) + from;
            Stored* out = reinterpret_cast<Stored*>(target) + to;
            const Part first = *reinterpret_cast<const Part*>(in + share.first);
            if (share.second < 0) {
                *reinterpret_cast<Part*>(out + share.first) = first;
                continue;
            }
            const Part second = *reinterpret_cast<const Part*>(in + share.second);
            Part new_first = first, new_second = second;
            if constexpr (!std::is_same_v<Stored, uint8_t>) {
                if (turned && job.interleaved) {
                    turn_share<true>(first, second, cos, sin, &new_first, &new_second);
                } else if (turned) {
                    turn_share<false>(first, second, cos, sin, &new_first, &new_second);
                }
            }
            *reinterpret_cast<Part*>(out + share.first) = new_first;
            *reinterpret_cast<Part*>(out + share.second) = new_second;
        }
    }
}

// How many rows there are is known on the GPU only: as many blocks as it can hold, less for few layers and heads.
template <typename Stored, typename Wide, int count>
cudaError_t launch(const Job& job, int64_t blocks, cudaStream_t stream) {
    int64_t across = (job.layers * job.heads - 1) / kUnitsPerThread + 1;
    if (across > kMaxGridY) across = kMaxGridY;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>((blocks - 1) / across + 1), static_cast<unsigned>(across));
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, copy_shares<Stored, Wide, count>, job);
}

// Vectors of 16 bytes where everything is a multiple of them, else element by element.
template <typename Stored, typename Wide>
cudaError_t launch_widest(const Job& job, int64_t blocks, cudaStream_t stream) {
    constexpr int count = static_cast<int>(kVectorBytes / sizeof(Stored));
    const int64_t elements = job.dim | job.pairs | job.start;
    const int64_t bytes = static_cast<int64_t>(reinterpret_cast<uintptr_t>(job.source)) | job.source_layer |
                          job.source_head | static_cast<int64_t>(reinterpret_cast<uintptr_t>(job.target)) |
                          job.target_layer | job.target_head;
    if (elements % count == 0 && bytes % kVectorBytes == 0) {
        return launch<Stored, Wide, count>(job, blocks, stream);
    }
    return launch<Stored, Wide, 1>(job, blocks, stream);
}

}  // namespace

// As rows_copy of rows.cpp, but for three of its arguments: all pointers are to memory of one GPU, `ends[i]` is how
// many rows the runs up to and with run i have (in place of `length`), and the work goes on `stream` (in place of
// `threads`). Gives 0, or 1 and nothing is done: a kind that can't be copied, or turned, or a launch that failed.
extern "C" int64_t rows_copy(const void* source, int64_t source_layer, int64_t source_head, void* target,
                             int64_t target_layer, int64_t target_head, int64_t layers, int64_t heads, int64_t dim,
                             int64_t kind, int64_t runs, const int64_t* from, const int64_t* to, const int64_t* ends,
                             const int64_t* turn, const void* cos, const void* sin, int64_t pairs, int64_t start,
                             int64_t interleaved, void* stream) {
    if (kind == kByte && pairs > 0) return 1;
    if (runs <= 0 || layers <= 0 || heads <= 0 || dim <= 0) return 0;
    const Job job{static_cast<const char*>(source), source_layer, source_head, static_cast<char*>(target),
                  target_layer, target_head, layers, heads, dim, runs, from, to, ends, turn, cos, sin, pairs, start,
                  interleaved};
    cudaPointerAttributes about;
    int before = 0, cores = 0;
    if (cudaPointerGetAttributes(&about, source) != cudaSuccess || about.type != cudaMemoryTypeDevice ||
        cudaDeviceGetAttribute(&cores, cudaDevAttrMultiProcessorCount, about.device) != cudaSuccess ||
        cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(about.device) != cudaSuccess) {
        cudaGetLastError();  // ours; torch must not find it
        return 1;
    }
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    const int64_t blocks = cores * kBlocksPerCore;
    cudaError_t error = cudaErrorInvalidValue;
    switch (kind) {
        case kFloat32: error = launch_widest<float, float>(job, blocks, on); break;
        case kFloat64: error = launch_widest<double, double>(job, blocks, on); break;
        case kBFloat16: error = launch_widest<BFloat16, float>(job, blocks, on); break;
        case kFloat16: error = launch_widest<__half, float>(job, blocks, on); break;
        case kByte: error = launch_widest<uint8_t, float>(job, blocks, on); break;
        default: break;
    }
    if (error != cudaSuccess) cudaGetLastError();
    cudaSetDevice(before);
    return error == cudaSuccess ? 0 : 1;
}
