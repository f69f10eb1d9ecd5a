// lookup.cuh on the CPU, and what only the CPU does: pairs one by one, and runs of equal tokens around hits.
#include "lookup.cuh"

#include <algorithm>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lookup {

constexpr int64_t FAR = 16;  // entries ahead whose slots are fetched from memory, and whose nodes are
constexpr int64_t NEAR = 8;

template <class Step>
int run(const Step& step, int64_t n, void*) {
    for (int64_t i = 0; i < n; i++) {
        if (i + FAR < n) step.far(i + FAR);
        if (i + NEAR < n) step.near(i + NEAR);
        step(i);
    }
    return 0;
}

// Node numbers: those of removed pairs first, then fresh ones.
struct Numbers {
    int64_t* free;   // [nodes]
    int64_t* counts; // [3]: entries of `free`, numbers ever given out, living nodes
};

bool insert_one(const Table& t, const Numbers& numbers, uint64_t key, int64_t value, int64_t max_used) {
    if (find_pair(t, key, value) >= 0) return true;
    if (t.used[0] >= max_used || t.used[1] >= max_used) return false;
    int64_t node = -1;
    if (numbers.counts[0] > 0 && numbers.counts[0] <= t.nodes)
        node = numbers.free[--numbers.counts[0]];
    else if (numbers.counts[1] < t.nodes)
        node = numbers.counts[1]++;
    if (!valid(t, node)) return false;
    numbers.counts[2]++;
    t.keys[node] = key;
    t.values[node] = value;
    t.alive[node] = 1;
    t.prev[node] = -1;
    put(t, t.pairs, pair_home(t, key, value), node, t.used + 1);
    const int64_t slot = find_head(t, key);
    const int64_t head = slot < 0 ? -1 : t.heads[slot];
    t.next[node] = head;
    if (head >= 0) t.prev[head] = node;
    if (slot >= 0)
        t.heads[slot] = node;
    else
        put(t, t.heads, home(t, key), node, t.used);
    return true;
}

struct Span {
    int64_t start, stop, place;
};

// Runs of tokens that a prompt and the stored text have in common (store/index.py holds the reference).
struct Finder {
    const int64_t* ids;
    int64_t n, first, min_match, check, window, max_candidates;
    const int64_t* tokens;
    int64_t used;

    std::vector<int64_t> places;  // of all hits, by position, newest first
    std::vector<int64_t> hits;    // positions that have any, ascending
    std::vector<int64_t> ends;    // end of the places of each of them
    std::vector<uint8_t> cover;   // how many runs hold each position
    std::unordered_map<int64_t, std::vector<std::pair<int64_t, int64_t>>> seen;  // by diagonal, what was grown
    std::vector<Span> spans;

    Finder(const int64_t* ids, int64_t n, int64_t first, int64_t min_match, int64_t check, int64_t window,
           int64_t max_candidates, const int64_t* tokens, int64_t used)
        : ids(ids),
          n(n),
          first(first),
          min_match(min_match),
          check(check),
          window(window),
          max_candidates(max_candidates),
          tokens(tokens),
          used(used) {}

    bool equal(int64_t position, int64_t place) const {
        if (place < 0 || place > used - window) return false;
        for (int64_t k = 0; k < window; k++)
            if (ids[position + k] != tokens[place + k]) return false;
        return true;
    }

    // Whether a hit lies in a common run of `check` tokens inside [first, n).
    bool reaches(int64_t position, int64_t place) const {
        int64_t length = window;
        for (int64_t k = window; length < check && position + k < n && place + k < used; k++, length++)
            if (ids[position + k] != tokens[place + k]) break;
        for (int64_t k = 1; length < check && position - k >= first && place - k >= 0; k++, length++)
            if (ids[position - k] != tokens[place - k]) break;
        return length >= check;
    }

    void grow(int64_t start, int64_t place) {
        auto& done = seen[place - start];
        auto later = std::upper_bound(done.begin(), done.end(), std::make_pair(start, n));
        if (later != done.begin() && std::prev(later)->second > start) return;
        int64_t right = start, left = start;
        const int64_t shift = place - start;
        while (right < n && right + shift < used && ids[right] == tokens[right + shift] && cover[right] < max_candidates)
            right++;
        while (left > first && left + shift > 0 && ids[left - 1] == tokens[left - 1 + shift] &&
               cover[left - 1] < max_candidates)
            left--;
        done.insert(later, {left, right});
        if (right - left < min_match) return;
        for (int64_t i = left; i < right; i++) cover[i]++;
        spans.push_back({left, right, left + shift});
    }

    void close(int64_t i) {  // all hits of the window at first + i are in `places`
        if (places.size() == (ends.empty() ? 0 : static_cast<size_t>(ends.back()))) return;
        hits.push_back(first + i);
        ends.push_back(static_cast<int64_t>(places.size()));
    }

    void look_up(const Table& t, const uint64_t* hashes, int64_t positions) {
        const Probe ahead{t, hashes, 1, nullptr};
        for (int64_t i = 0; i < positions; i++) {
            if (i + FAR < positions) ahead.far(i + FAR);
            if (i + NEAR < positions) ahead.near(i + NEAR);
            if (i + NEAR / 2 < positions) {
                const int64_t node = t.heads[home(t, hashes[i + NEAR / 2])];
                if (valid(t, node) && t.values[node] < used) prefetch(&tokens[t.values[node]]);
            }
            const int64_t slot = find_head(t, hashes[i]);
            int64_t node = slot < 0 ? -1 : t.heads[slot], number = 0;
            for (int64_t step = 0; step < t.nodes && node >= 0 && number < max_candidates; step++) {
                if (equal(first + i, t.values[node])) {
                    places.push_back(t.values[node]);
                    number++;
                }
                node = checked(t, t.next[node]);
            }
            close(i);
        }
    }

    bool take(const int64_t* found, int64_t limit, int64_t positions) {
        for (int64_t i = 0; i < positions; i++, found += limit) {
            int64_t number = 0;
            for (int64_t column = 0; column < limit && found[column] >= 0 && number < max_candidates; column++)
                if (equal(first + i, found[column])) {
                    places.push_back(found[column]);
                    number++;
                }
            if (number < max_candidates && found[limit - 1] >= 0) return false;  // more of them may lie deeper
            close(i);
        }
        return true;
    }

    void grow_all() {  // rare windows first, from left to right
        std::vector<int64_t> of_count(max_candidates + 2, 0), order(hits.size());
        for (size_t k = 0; k < hits.size(); k++) of_count[ends[k] - begin(k) + 1]++;
        for (int64_t number = 1; number <= max_candidates + 1; number++) of_count[number] += of_count[number - 1];
        for (size_t k = 0; k < hits.size(); k++) order[of_count[ends[k] - begin(k)]++] = static_cast<int64_t>(k);
        cover.assign(n, 0);
        for (const int64_t k : order)
            for (int64_t at = begin(k); at < ends[k] && cover[hits[k]] < max_candidates; at++)
                if (reaches(hits[k], places[at])) grow(hits[k], places[at]);
    }

    int64_t begin(size_t k) const { return k ? ends[k - 1] : 0; }
};

}  // namespace lookup

extern "C" {

// Pairs in order, those that are present stay. Returns how many were taken: fewer than n if the table must grow first.
int64_t lookup_insert(const lookup::Table* t, const uint64_t* keys, const int64_t* values, int64_t n, int64_t* free,
                      int64_t* counts, int64_t max_used) {
    const lookup::Find ahead{*t, keys, values, nullptr};
    for (int64_t i = 0; i < n; i++) {
        if (i + lookup::FAR < n) {
            ahead.far(i + lookup::FAR);
            lookup::prefetch(&t->heads[lookup::home(*t, keys[i + lookup::FAR])]);
        }
        if (!lookup::insert_one(*t, {free, counts}, keys[i], values[i], max_used)) return i;
    }
    return n;
}

void lookup_remove(const lookup::Table* t, const uint64_t* keys, const int64_t* values, int64_t n, int64_t* free,
                   int64_t* counts) {
    const lookup::Find ahead{*t, keys, values, nullptr};
    for (int64_t i = 0; i < n; i++) {
        if (i + lookup::FAR < n) ahead.far(i + lookup::FAR);
        const int64_t slot = lookup::find_pair(*t, keys[i], values[i]);
        if (slot < 0) continue;
        const int64_t node = t->pairs[slot];
        lookup::clear(*t, t->pairs, slot, t->used + 1);
        t->alive[node] = 0;
        lookup::bridge(*t, node);
        lookup::wipe(*t, node);
        counts[2]--;
        if (counts[0] >= 0 && counts[0] < t->nodes) free[counts[0]++] = node;
    }
}

// Common runs of `ids[first:n]` and `tokens[:used]`, grown from the windows whose hashes are stored, rare ones first.
//
// `t` is probed for `hashes`; where it is null, `found` holds the newest `limit` values of each. Spans come as
// (start, stop, place) in `out`, which has room for `room` of them. Returns their number; -1 if `room` is too small, -2 if
// `found` is not deep enough to hold `max_candidates` windows of equal tokens, -3 if memory ran out.
int64_t lookup_spans(const lookup::Table* t, const uint64_t* hashes, const int64_t* found, int64_t limit,
                     const int64_t* ids, int64_t n, int64_t first, int64_t min_match, int64_t check, int64_t window,
                     int64_t max_candidates, const int64_t* tokens, int64_t used, int64_t* out, int64_t room) {
    const int64_t positions = n - first - window + 1;
    if (positions <= 0) return 0;
    try {
        lookup::Finder finder{ids, n, first, min_match, check, window, max_candidates, tokens, used};
        if (t != nullptr)
            finder.look_up(*t, hashes, positions);
        else if (!finder.take(found, limit, positions))
            return -2;
        finder.grow_all();
        if (static_cast<int64_t>(finder.spans.size()) > room) return -1;
        for (size_t k = 0; k < finder.spans.size(); k++) {
            out[3 * k] = finder.spans[k].start;
            out[3 * k + 1] = finder.spans[k].stop;
            out[3 * k + 2] = finder.spans[k].place;
        }
        return static_cast<int64_t>(finder.spans.size());
    } catch (const std::bad_alloc&) {
        return -3;
    }
}
}
