// Rows copied from one slab tensor to another, keys turned on the way, and differences of rows taken and added: see
// store/gather.py and differences.py, which call this and have the slow forms of it beside them.
//
// A slab tensor is [layers, kv_heads, rows, dim], rows packed. Work is handed out by (layer, head). Products and sums
// are rounded one by one (compile with -ffp-contract=off), in fp32 for half precision, so that the results are those
// of rope.turn to the bit; not-a-number stays one, whatever its payload.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace {

enum Kind : int64_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3, kByte = 4 };

constexpr int64_t kThreadBytes = 1 << 20;  // a thread of its own costs as much as copying about a quarter of this

int64_t item_size(int64_t kind) {
    switch (kind) {
        case kFloat32: return 4;
        case kFloat64: return 8;
        case kBFloat16:
        case kFloat16: return 2;
        case kByte: return 1;
        default: return 0;
    }
}

struct BFloat16 {
    uint16_t bits;
};

inline float load(float value) { return value; }
inline double load(double value) { return value; }
inline float load(BFloat16 value) {
    const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &wide, sizeof(result));
    return result;
}

inline void store(float value, float* out) { *out = value; }
inline void store(double value, double* out) { *out = value; }
inline void store(float value, double* out) { *out = value; }
inline void store(float value, BFloat16* out) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof(wide));
    const uint32_t even = 0x7FFFu + ((wide >> 16) & 1u);  // to the nearest, halves to even
    const bool number = (wide & 0x7FFFFFFFu) <= 0x7F800000u;
    out->bits = number ? static_cast<uint16_t>((wide + even) >> 16) : static_cast<uint16_t>(0x7FC0u);
}
#ifdef __FLT16_MAX__  // g++ has it on x86 from version 12 on
inline float load(_Float16 value) { return static_cast<float>(value); }
inline void store(float value, _Float16* out) { *out = static_cast<_Float16>(value); }
#endif

// One row [dim]; pair i is (i, i + pairs), or (2i, 2i + 1) if interleaved, of the dimensions from `start` on.
template <typename Stored, typename Wide, bool interleaved>
void turn_row(const Stored* __restrict__ in, Stored* __restrict__ out, const Wide* __restrict__ cos,
              const Wide* __restrict__ sin, int64_t dim, int64_t pairs, int64_t start) {
    const int64_t stop = start + 2 * pairs;
    if (start > 0) std::memcpy(out, in, start * sizeof(Stored));
    if (stop < dim) std::memcpy(out + stop, in + stop, (dim - stop) * sizeof(Stored));
    const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
    in += start;
    out += start;
    for (int64_t i = 0; i < pairs; ++i) {
        const Wide first = load(in[step * i]), second = load(in[step * i + apart]);
        store(first * cos[i] - second * sin[i], out + step * i);
        store(second * cos[i] + first * sin[i], out + step * i + apart);
    }
}

struct Job {
    const char* source;
    int64_t source_layer, source_head;
    char* target;
    int64_t target_layer, target_head;
    int64_t layers, heads, dim, kind;
    int64_t runs;
    const int64_t *from, *to, *length, *turn;
    const void *cos, *sin;
    int64_t pairs, start, interleaved;
};

template <typename Stored, typename Wide>
void turn_run(const Job& job, const char* in, char* out, int64_t rows, int64_t which) {
    const Wide* cos = static_cast<const Wide*>(job.cos) + which * job.pairs;
    const Wide* sin = static_cast<const Wide*>(job.sin) + which * job.pairs;
    const Stored* from = reinterpret_cast<const Stored*>(in);
    Stored* to = reinterpret_cast<Stored*>(out);
    const auto one = job.interleaved ? turn_row<Stored, Wide, true> : turn_row<Stored, Wide, false>;
    for (int64_t row = 0; row < rows; ++row, from += job.dim, to += job.dim) {
        one(from, to, cos, sin, job.dim, job.pairs, job.start);
    }
}

void copy_head(const Job& job, int64_t unit) {
    const int64_t layer = unit / job.heads, head = unit % job.heads, row_bytes = job.dim * item_size(job.kind);
    const char* source = job.source + layer * job.source_layer + head * job.source_head;
    char* target = job.target + layer * job.target_layer + head * job.target_head;
    for (int64_t run = 0; run < job.runs; ++run) {
        const char* in = source + job.from[run] * row_bytes;
        char* out = target + job.to[run] * row_bytes;
        const int64_t rows = job.length[run], which = job.turn[run];
        if (which < 0) {
            std::memcpy(out, in, rows * row_bytes);
            continue;
        }
        switch (job.kind) {
            case kFloat32: turn_run<float, float>(job, in, out, rows, which); break;
            case kFloat64: turn_run<double, double>(job, in, out, rows, which); break;
            case kBFloat16: turn_run<BFloat16, float>(job, in, out, rows, which); break;
#ifdef __FLT16_MAX__
            case kFloat16: turn_run<_Float16, float>(job, in, out, rows, which); break;
#endif
            default: break;  // rows_copy has refused it
        }
    }
}

// Calls work(unit) for every unit. Threads are its own: a second OpenMP pool beside torch's would spin against it.
template <typename Work>
void share(int64_t units, int64_t bytes, int64_t threads, const Work& work) {
    std::atomic<int64_t> next{0};
    const auto take = [&work, &next, units] {
        for (int64_t unit = next++; unit < units; unit = next++) work(unit);
    };
    std::vector<std::thread> helpers;
    try {
        for (int64_t helper = 1; helper < threads && helper < units && helper * kThreadBytes < bytes; ++helper) {
            helpers.emplace_back(take);
        }
    } catch (const std::system_error&) {  // no more threads to be had: those there are do the work
    }
    take();
    for (std::thread& helper : helpers) helper.join();
}

bool can_turn(int64_t kind) {
#ifndef __FLT16_MAX__
    if (kind == kFloat16) return false;
#endif
    return kind != kByte;
}

// Tables of a turn in fp32; none if `cos` is null. `pairs` members each, of the dimensions from `start` on.
struct Turn {
    const float *cos, *sin;
    int64_t pairs, start, interleaved;

    // Turns the row `in` [dim] by row `which` of the tables; gives where the result is.
    const float* operator()(const float* in, float* spare, int64_t dim, int64_t which) const {
        if (cos == nullptr) return in;
        const auto one = interleaved ? turn_row<float, float, true> : turn_row<float, float, false>;
        one(in, spare, cos + which * pairs, sin + which * pairs, dim, pairs, start);
        return spare;
    }
};

// Memory of one slot of one batch row, [heads, rows, dim]; strides in bytes.
struct Rows {
    const char* data;
    int64_t head_step, row_step;

    template <typename Stored>
    Stored* at(int64_t head, int64_t row) const {
        return reinterpret_cast<Stored*>(const_cast<char*>(data) + head * head_step + row * row_step);
    }
};

constexpr int64_t kRowsAtOnce = 64;

template <typename Stored>
void subtract(const Rows& fresh, const Rows& old, int64_t heads, int64_t dim, int64_t count, const int64_t* place,
              const int64_t* columns, const int64_t* into, float* out, const Turn& turn, int64_t threads) {
    share((count + kRowsAtOnce - 1) / kRowsAtOnce, count * heads * dim * 4, threads, [&](int64_t unit) {
        std::vector<float> difference(dim), spare(dim);
        const int64_t stop = std::min(count, (unit + 1) * kRowsAtOnce);
        for (int64_t i = unit * kRowsAtOnce; i < stop; ++i) {
            for (int64_t head = 0; head < heads; ++head) {
                const Stored *now = fresh.at<Stored>(head, place[i]), *before = old.at<Stored>(head, columns[i]);
                for (int64_t d = 0; d < dim; ++d) {
                    difference[d] = static_cast<float>(load(now[d])) - static_cast<float>(load(before[d]));
                }
                const float* turned = turn(difference.data(), spare.data(), dim, into[i]);
                std::memcpy(out + (into[i] * heads + head) * dim, turned, dim * sizeof(float));
            }
        }
    });
}

template <typename Stored>
void add(const Rows& rows, int64_t heads, int64_t dim, int64_t count, const int64_t* columns, const int64_t* which,
         const float* estimate, const Turn& turn, int64_t threads) {
    share((count + kRowsAtOnce - 1) / kRowsAtOnce, count * heads * dim * 4, threads, [&](int64_t unit) {
        std::vector<float> spare(dim);
        const int64_t stop = std::min(count, (unit + 1) * kRowsAtOnce);
        for (int64_t i = unit * kRowsAtOnce; i < stop; ++i) {
            for (int64_t head = 0; head < heads; ++head) {
                const float* turned = turn(estimate + (which[i] * heads + head) * dim, spare.data(), dim, which[i]);
                Stored* row = rows.at<Stored>(head, columns[i]);
                for (int64_t d = 0; d < dim; ++d) store(static_cast<float>(load(row[d])) + turned[d], row + d);
            }
        }
    });
}

// Call `run` with a value of the type that a kind of floats is stored in.
template <typename Run>
void run_for(int64_t kind, const Run& run) {
    switch (kind) {
        case kFloat32: run(float{}); break;
        case kFloat64: run(double{}); break;
        case kBFloat16: run(BFloat16{}); break;
#ifdef __FLT16_MAX__
        case kFloat16: run(_Float16{}); break;
#endif
    }
}

}  // namespace

// Run i copies rows [from[i], from[i] + length[i]) of every layer and head to rows from to[i] on, turned by row
// turn[i] of the tables [.., pairs] (fp64 for fp64, else fp32), or to the bit as they are where turn[i] is -1. Strides
// are in bytes. Source and target rows don't overlap, nor do the targets of two runs. Gives 0, or 1 and nothing is
// done: a kind that this build can't copy, or can't turn.
extern "C" int64_t rows_copy(const void* source, int64_t source_layer, int64_t source_head, void* target,
                             int64_t target_layer, int64_t target_head, int64_t layers, int64_t heads, int64_t dim,
                             int64_t kind, int64_t runs, const int64_t* from, const int64_t* to, const int64_t* length,
                             const int64_t* turn, const void* cos, const void* sin, int64_t pairs, int64_t start,
                             int64_t interleaved, int64_t threads) {
    if (item_size(kind) == 0) return 1;
    int64_t rows = 0;
    for (int64_t run = 0; run < runs; ++run) {
        if (turn[run] >= 0 && !can_turn(kind)) return 1;
        rows += length[run];
    }
    const Job job{static_cast<const char*>(source), source_layer, source_head, static_cast<char*>(target),
                  target_layer, target_head, layers, heads, dim, kind, runs, from, to, length, turn, cos, sin, pairs,
                  start, interleaved};
    share(layers * heads, layers * heads * rows * dim * item_size(kind), threads,
          [&job](int64_t unit) { copy_head(job, unit); });
    return 0;
}

// out[into[i]] = fresh[place[i]] - old[columns[i]], turned by row into[i] of the tables, in fp32: `fresh` and `old` are
// [heads, rows, dim] of one kind, `out` is [.., heads, dim]. Gives 0, or 1 and nothing is done.
extern "C" int64_t rows_subtract(const void* fresh, int64_t fresh_head, int64_t fresh_row, const void* old,
                                 int64_t old_head, int64_t old_row, int64_t heads, int64_t dim, int64_t kind,
                                 int64_t count, const int64_t* place, const int64_t* columns, const int64_t* into,
                                 float* out, const float* cos, const float* sin, int64_t pairs, int64_t start,
                                 int64_t interleaved, int64_t threads) {
    if (!can_turn(kind) || item_size(kind) == 0) return 1;
    const Rows now{static_cast<const char*>(fresh), fresh_head, fresh_row};
    const Rows before{static_cast<const char*>(old), old_head, old_row};
    const Turn turn{cos, sin, pairs, start, interleaved};
    const auto run = [&](auto stored) {
        subtract<decltype(stored)>(now, before, heads, dim, count, place, columns, into, out, turn, threads);
    };
    run_for(kind, run);
    return 0;
}

// rows[columns[i]] += estimate[which[i]], turned by row which[i] of the tables, in fp32: `rows` is [heads, rows, dim],
// `estimate` [.., heads, dim]. Gives 0, or 1 and nothing is done.
extern "C" int64_t rows_add(void* rows, int64_t head_step, int64_t row_step, int64_t heads, int64_t dim, int64_t kind,
                            int64_t count, const int64_t* columns, const int64_t* which, const float* estimate,
                            const float* cos, const float* sin, int64_t pairs, int64_t start, int64_t interleaved,
                            int64_t threads) {
    if (!can_turn(kind) || item_size(kind) == 0) return 1;
    const Rows target{static_cast<const char*>(rows), head_step, row_step};
    const Turn turn{cos, sin, pairs, start, interleaved};
    const auto run = [&](auto stored) {
        add<decltype(stored)>(target, heads, dim, count, columns, which, estimate, turn, threads);
    };
    run_for(kind, run);
    return 0;
}
