// Hash table of stored windows: one source for CPU and GPU, raw pointers only, no torch headers.
//
// A multimap from uint64 keys to int64 values. Two arrays of slots are open-addressed with linear probing: `heads` finds
// the newest node of a key, `pairs` the node of a (key, value). The nodes of one key form a doubly linked list, newest
// first. kernels.py holds the reference in numpy, which works on the same memory: slots that hold -1 are empty, -2 were
// used. All indices have 64 bits. What is read from memory is checked against the sizes before it is used as an index, and
// every walk is bounded: a damaged link ends a list early, it never reads outside.
//
// Every operation is a step that works on entry `i` of a batch. `run` is a loop in lookup.cpp, a kernel in lookup.cu.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define LOOKUP_FN __host__ __device__ __forceinline__
#else
#define LOOKUP_FN inline
#endif

namespace lookup {

constexpr int64_t EMPTY = -1;
constexpr int64_t TOMBSTONE = -2;

struct Table {
    int64_t* heads;   // [capacity]
    int64_t* pairs;   // [capacity]
    uint64_t* keys;   // [nodes], like all that follow
    int64_t* values;
    int64_t* next;  // older node of the same key
    int64_t* prev;  // newer node of the same key
    uint8_t* alive;
    int64_t* used;     // [2]: slots of heads and of pairs that are not empty
    int64_t capacity;  // a power of two
    int64_t nodes;
};

LOOKUP_FN uint64_t mix(uint64_t x) {  // finaliser of splitmix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

LOOKUP_FN int64_t home(const Table& t, uint64_t key) {
    return static_cast<int64_t>(mix(key) & static_cast<uint64_t>(t.capacity - 1));
}

LOOKUP_FN int64_t pair_home(const Table& t, uint64_t key, int64_t value) {
    return home(t, key + mix(static_cast<uint64_t>(value)));
}

LOOKUP_FN int64_t after(const Table& t, int64_t slot) { return (slot + 1) & (t.capacity - 1); }
LOOKUP_FN int64_t before(const Table& t, int64_t slot) { return (slot - 1) & (t.capacity - 1); }
LOOKUP_FN bool valid(const Table& t, int64_t node) { return node >= 0 && node < t.nodes; }
LOOKUP_FN int64_t checked(const Table& t, int64_t node) { return valid(t, node) ? node : -1; }

// Puts `wanted` where `expected` stands; returns what stood there. Other threads of a GPU may want the same place.
LOOKUP_FN int64_t exchange(int64_t* place, int64_t expected, int64_t wanted) {
#ifdef __CUDA_ARCH__
    return static_cast<int64_t>(atomicCAS(reinterpret_cast<unsigned long long*>(place),
                                          static_cast<unsigned long long>(expected),
                                          static_cast<unsigned long long>(wanted)));
#elif defined(LOOKUP_THREADS)  // tests run the steps of a GPU in threads of the CPU
    __atomic_compare_exchange_n(place, &expected, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
#else
    const int64_t found = *place;
    if (found == expected) *place = wanted;
    return found;
#endif
}

LOOKUP_FN void count(int64_t* counter, int64_t by) {
#ifdef __CUDA_ARCH__
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(by));
#elif defined(LOOKUP_THREADS)
    __atomic_fetch_add(counter, by, __ATOMIC_SEQ_CST);
#else
    *counter += by;
#endif
}

LOOKUP_FN void prefetch(const void* address) {
#if !defined(__CUDA_ARCH__) && defined(__GNUC__)
    __builtin_prefetch(address);
#else
    (void)address;
#endif
}

// Slot of `heads` that holds the list of a key, or -1.
LOOKUP_FN int64_t find_head(const Table& t, uint64_t key) {
    int64_t slot = home(t, key);
    for (int64_t step = 0; step < t.capacity; step++, slot = after(t, slot)) {
        const int64_t node = t.heads[slot];
        if (node == EMPTY) return -1;
        if (valid(t, node) && t.keys[node] == key) return slot;
    }
    return -1;
}

// Slot of `pairs` that holds the node of a pair, or -1.
LOOKUP_FN int64_t find_pair(const Table& t, uint64_t key, int64_t value) {
    int64_t slot = pair_home(t, key, value);
    for (int64_t step = 0; step < t.capacity; step++, slot = after(t, slot)) {
        const int64_t node = t.pairs[slot];
        if (node == EMPTY) return -1;
        if (valid(t, node) && t.keys[node] == key && t.values[node] == value) return slot;
    }
    return -1;
}

// A node that is not in `slots` goes to the first free slot from `slot` on. The caller has made sure that there is one.
LOOKUP_FN void put(const Table& t, int64_t* slots, int64_t slot, int64_t node, int64_t* used) {
    for (int64_t step = 0; step < t.capacity; step++, slot = after(t, slot)) {
        int64_t seen = slots[slot];
        while (seen < 0) {
            const int64_t found = exchange(&slots[slot], seen, node);
            if (found == seen) {
                if (seen == EMPTY) count(used, 1);
                return;
            }
            seen = found;
        }
    }
}

// Frees a slot. It becomes empty, and used ones before it too, where no search can go past it any more.
LOOKUP_FN void clear(const Table& t, int64_t* slots, int64_t slot, int64_t* used) {
    slots[slot] = TOMBSTONE;
    if (slots[after(t, slot)] != EMPTY) return;
    for (int64_t step = 0; step < t.capacity; step++, slot = before(t, slot)) {
        if (exchange(&slots[slot], TOMBSTONE, EMPTY) != TOMBSTONE) return;
        count(used, -1);
    }
}

// Takes a list's part from `first`, dead, to its last dead neighbour out of the list.
LOOKUP_FN void bridge(const Table& t, int64_t first) {
    int64_t following = checked(t, t.next[first]);
    for (int64_t step = 0; step < t.nodes && following >= 0 && !t.alive[following]; step++)
        following = checked(t, t.next[following]);
    const int64_t previous = checked(t, t.prev[first]);
    if (following >= 0) t.prev[following] = previous;
    if (previous >= 0) {
        t.next[previous] = following;
        return;
    }
    const int64_t slot = find_head(t, t.keys[first]);
    if (slot < 0) return;
    if (following >= 0)
        t.heads[slot] = following;
    else
        clear(t, t.heads, slot, t.used);
}

LOOKUP_FN void wipe(const Table& t, int64_t node) {
    t.keys[node] = 0;
    t.values[node] = t.next[node] = t.prev[node] = -1;
}

struct Probe {  // values of each key, newest first, -1 behind the last one
    Table t;
    const uint64_t* asked;
    int64_t limit;
    int64_t* found;  // [n, limit]

    LOOKUP_FN void far(int64_t i) const { prefetch(&t.heads[home(t, asked[i])]); }
    LOOKUP_FN void near(int64_t i) const {
        const int64_t node = t.heads[home(t, asked[i])];
        if (!valid(t, node)) return;
        prefetch(&t.keys[node]);
        prefetch(&t.values[node]);
        prefetch(&t.next[node]);
    }
    LOOKUP_FN void operator()(int64_t i) const {
        const int64_t slot = find_head(t, asked[i]);
        int64_t node = slot < 0 ? -1 : t.heads[slot];
        for (int64_t column = 0; column < limit; column++) {
            found[i * limit + column] = node < 0 ? -1 : t.values[node];
            if (node >= 0) node = checked(t, t.next[node]);
        }
    }
};

struct Find {  // slot of each pair in `pairs`, or -1
    Table t;
    const uint64_t* keys;
    const int64_t* values;
    int64_t* slots;

    LOOKUP_FN void far(int64_t i) const { prefetch(&t.pairs[pair_home(t, keys[i], values[i])]); }
    LOOKUP_FN void near(int64_t) const {}
    LOOKUP_FN void operator()(int64_t i) const { slots[i] = find_pair(t, keys[i], values[i]); }
};

struct Place {  // each node's pair gets a slot; with `heads`, so does the first node of each list
    Table t;
    const int64_t* nodes;  // null: node i is entry i
    bool heads;

    LOOKUP_FN int64_t node(int64_t i) const { return nodes == nullptr ? i : nodes[i]; }
    LOOKUP_FN void far(int64_t i) const {
        const int64_t at = node(i);
        if (!valid(t, at)) return;
        prefetch(&t.pairs[pair_home(t, t.keys[at], t.values[at])]);
        if (heads) prefetch(&t.heads[home(t, t.keys[at])]);
    }
    LOOKUP_FN void near(int64_t) const {}
    LOOKUP_FN void operator()(int64_t i) const {
        const int64_t at = node(i);
        if (!valid(t, at)) return;
        put(t, t.pairs, pair_home(t, t.keys[at], t.values[at]), at, t.used + 1);
        if (heads && t.prev[at] < 0) put(t, t.heads, home(t, t.keys[at]), at, t.used);
    }
};

struct Link {  // new nodes, sorted by key, oldest first, are chained to each other and to the list of their key
    Table t;
    const int64_t* nodes;

    LOOKUP_FN void far(int64_t) const {}
    LOOKUP_FN void near(int64_t) const {}
    LOOKUP_FN void operator()(int64_t i) const {
        const int64_t node = nodes[i];
        if (!valid(t, node)) return;
        const int64_t older = i > 0 ? checked(t, nodes[i - 1]) : -1;
        if (older >= 0 && t.keys[older] == t.keys[node]) {
            t.next[node] = older;
            t.prev[older] = node;
            return;
        }
        const int64_t slot = find_head(t, t.keys[node]);
        const int64_t head = slot < 0 ? -1 : t.heads[slot];
        t.next[node] = head;
        if (head >= 0) t.prev[head] = node;
    }
};

struct Lead {  // the newest of the nodes of each key, sorted as for `Link`, becomes the head of its list
    Table t;
    const int64_t* nodes;
    int64_t n;

    LOOKUP_FN void far(int64_t) const {}
    LOOKUP_FN void near(int64_t) const {}
    LOOKUP_FN void operator()(int64_t i) const {
        const int64_t node = nodes[i];
        if (!valid(t, node)) return;
        const int64_t newer = i + 1 < n ? checked(t, nodes[i + 1]) : -1;
        if (newer >= 0 && t.keys[newer] == t.keys[node]) return;
        const int64_t slot = find_head(t, t.keys[node]);
        if (slot >= 0)
            t.heads[slot] = node;
        else
            put(t, t.heads, home(t, t.keys[node]), node, t.used);
    }
};

struct Kill {  // the pairs in these slots, each given once, are no more
    Table t;
    const int64_t* slots;
    const int64_t* nodes;  // what stood there

    LOOKUP_FN void far(int64_t) const {}
    LOOKUP_FN void near(int64_t) const {}
    LOOKUP_FN void operator()(int64_t i) const {
        if (!valid(t, nodes[i]) || slots[i] < 0 || slots[i] >= t.capacity) return;
        t.alive[nodes[i]] = 0;
        clear(t, t.pairs, slots[i], t.used + 1);
    }
};

struct Bridge {  // lists close over dead nodes: the first of neighbours that died together does it for all of them
    Table t;
    const int64_t* nodes;

    LOOKUP_FN void far(int64_t) const {}
    LOOKUP_FN void near(int64_t) const {}
    LOOKUP_FN void operator()(int64_t i) const {
        if (!valid(t, nodes[i])) return;
        const int64_t previous = checked(t, t.prev[nodes[i]]);
        if (previous < 0 || t.alive[previous]) bridge(t, nodes[i]);
    }
};

struct Wipe {  // nothing of a removed pair is left
    Table t;
    const int64_t* nodes;

    LOOKUP_FN void far(int64_t) const {}
    LOOKUP_FN void near(int64_t) const {}
    LOOKUP_FN void operator()(int64_t i) const {
        if (valid(t, nodes[i])) wipe(t, nodes[i]);
    }
};

template <class Step>
int run(const Step& step, int64_t n, void* stream);  // 0, or an error's number

}  // namespace lookup

// What Python calls, for memory on this source's device. `stream` is a CUDA stream, unused on the CPU.
extern "C" {

int lookup_probe(const lookup::Table* t, const uint64_t* keys, int64_t n, int64_t limit, int64_t* found, void* stream) {
    return lookup::run(lookup::Probe{*t, keys, limit, found}, n, stream);
}

int lookup_find(const lookup::Table* t, const uint64_t* keys, const int64_t* values, int64_t n, int64_t* slots,
                void* stream) {
    return lookup::run(lookup::Find{*t, keys, values, slots}, n, stream);
}

// New nodes whose keys and values are written; `sorted` holds the same numbers by key, oldest first.
int lookup_enter(const lookup::Table* t, const int64_t* sorted, int64_t n, void* stream) {
    int error = lookup::run(lookup::Place{*t, sorted, false}, n, stream);
    if (!error) error = lookup::run(lookup::Link{*t, sorted}, n, stream);
    return error ? error : lookup::run(lookup::Lead{*t, sorted, n}, n, stream);
}

// Pairs in `slots`, each given once; `nodes` are what stands there.
int lookup_drop(const lookup::Table* t, const int64_t* slots, const int64_t* nodes, int64_t n, void* stream) {
    int error = lookup::run(lookup::Kill{*t, slots, nodes}, n, stream);
    if (!error) error = lookup::run(lookup::Bridge{*t, nodes}, n, stream);
    return error ? error : lookup::run(lookup::Wipe{*t, nodes}, n, stream);
}

// Slots for the nodes `[0, n)` of a table whose slots are all empty.
int lookup_rebuild(const lookup::Table* t, int64_t n, void* stream) {
    return lookup::run(lookup::Place{*t, nullptr, true}, n, stream);
}
}
