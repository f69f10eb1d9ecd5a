"""Rolling hashes of token windows, and the hash table that maps them to stored places: the reference, in numpy."""

import numpy as np

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by its powers loses no bits
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_EMPTY = -1
_TOMBSTONE = -2
_MIN_CAPACITY = 64
_HEADS, _PAIRS = 0, 1
_FREE, _GIVEN, _LIVE = 0, 1, 2


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Finaliser of splitmix64: a bijection of uint64 that spreads every input bit over all output bits."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def window_hashes(ids: np.ndarray, window: int = 8) -> np.ndarray:
    """
    Hash of every window of `window` consecutive tokens: a polynomial modulo 2**64, then `splitmix64`.

    It depends on tokens and their order only, so it is the same in every process. Equal hashes do not prove equal
    tokens: whoever looks a hash up compares tokens.

    Args:
        ids (`np.ndarray` of int64, `[n]`): Token ids.
        window (`int`, *optional*, defaults to 8): Tokens in a window.

    Returns:
        `np.ndarray` of uint64, `[max(0, n - window + 1)]`: Entry `i` belongs to `ids[i : i + window]`.
    """
    if window < 1:
        raise ValueError(f"`window` must be at least 1, got {window}.")
    ids = np.asarray(ids, dtype=np.int64)
    count = len(ids) - window + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    terms = ids.astype(np.uint64) + np.uint64(1)  # +1: a leading zero must count
    hashes = terms[:count].copy()
    for k in range(1, window):
        hashes *= _BASE
        hashes += terms[k : k + count]
    return splitmix64(hashes)


class HashTable:
    """
    Multimap from uint64 keys to int64 values; a (key, value) pair is kept once.

    Open addressing with linear probing over a power-of-two number of slots. A slot holds the number of a *node*; the
    values of one key are a doubly linked list of nodes behind its slot, newest first, so 10^5 values of one key
    lengthen nobody's probe. A second slot array finds the node of a pair, so that removal needs no walk either.
    Numbers of removed nodes are given out again, and their slots become empty where no search can go past them: pairs
    may come and go for ever without a rebuild; only growing is one.

    Every method works on whole batches: Python loops run over probe distances, never over keys. This is the reference
    of `csrc/lookup.cuh`, which works on the same memory (lookup.py).

    Args:
        load (`float`, *optional*, defaults to 0.5): Most nodes per slot, up to 0.9.
    """

    def __init__(self, load: float = 0.5):
        if not 0 < load <= 0.9:
            raise ValueError(f"`load` must be above 0 and at most 0.9, got {load}.")
        self._load = load
        self.rebuilds = 0
        self._reset(_MIN_CAPACITY)

    def __len__(self) -> int:
        """Number of pairs."""
        return int(self._counts[_LIVE])

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return len(self._heads)

    def insert(self, keys: np.ndarray, values: np.ndarray) -> None:
        """
        Add pairs; later entries of a batch count as newer. Pairs that are already present stay where they are.

        Args:
            keys (`np.ndarray` of uint64, `[n]`): Keys.
            values (`np.ndarray` of int64, `[n]`): Values, at least 0.
        """
        keys, values = unique_pairs(*checked_pairs(keys, values))
        absent = self._find_pairs(keys, values) < 0
        keys, values = keys[absent], values[absent]
        if not len(keys):
            return
        room = min(len(self._keys) - len(self), self._max_used() - int(self._used.max()))
        if len(keys) > room:
            self._rehash(len(keys))
        nodes = self._new_nodes(len(keys))
        self._keys[nodes], self._values[nodes], self._alive[nodes] = keys, values, True
        self._next[nodes] = self._prev[nodes] = -1
        self._place(_PAIRS, self._pair_home(keys, values), nodes)
        self._link(nodes)

    def remove(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Drop pairs; those that are not present are ignored. Arguments as for `insert`."""
        slots = self._find_pairs(*unique_pairs(*checked_pairs(keys, values)))
        slots = slots[slots >= 0]
        dead = self._pair_slots[slots]
        if not len(dead):
            return
        self._counts[_LIVE] -= len(dead)
        if not len(self):
            self._reset(_MIN_CAPACITY)
            return
        self._clear(_PAIRS, slots)
        self._alive[dead] = False
        self._unlink(dead)
        self._keys[dead], self._values[dead], self._next[dead], self._prev[dead] = 0, -1, -1, -1
        free = int(self._counts[_FREE])
        self._free[free : free + len(dead)] = dead
        self._counts[_FREE] += len(dead)

    def probe(self, keys: np.ndarray, limit: int) -> np.ndarray:
        """
        Values of each key, newest first.

        Args:
            keys (`np.ndarray` of uint64, `[n]`): Keys; they may repeat.
            limit (`int`): Most values per key.

        Returns:
            `np.ndarray` of int64, `[n, limit]`: Filled up with -1 on the right.
        """
        keys = np.asarray(keys, dtype=np.uint64)
        found = np.full((len(keys), limit), -1, dtype=np.int64)
        slots = self._find_heads(keys)
        rows = np.flatnonzero(slots >= 0)
        nodes = self._heads[slots[rows]]
        for column in range(limit):
            if not len(rows):
                break
            found[rows, column] = self._values[nodes]
            nodes = self._next[nodes]
            more = nodes >= 0
            rows, nodes = rows[more], nodes[more]
        return found

    def _reset(self, capacity: int) -> None:
        nodes = int(capacity * self._load)
        self._heads = np.full(capacity, _EMPTY, dtype=np.int64)
        self._pair_slots = np.full(capacity, _EMPTY, dtype=np.int64)
        # what belongs to a node is written when its number is given out: until then it takes no memory
        self._keys = np.zeros(nodes, dtype=np.uint64)
        self._values, self._next, self._prev = (np.zeros(nodes, dtype=np.int64) for _ in range(3))
        self._alive = np.zeros(nodes, dtype=bool)
        self._free = np.zeros(nodes, dtype=np.int64)  # numbers of removed nodes
        self._counts = np.zeros(3, dtype=np.int64)  # entries of `_free`, numbers ever given out, living nodes
        self._used = np.zeros(2, dtype=np.int64)  # slots that are not empty, of `_heads` and `_pair_slots`

    def _max_used(self) -> int:
        """Used slots, those of removed nodes included, past which the table is built anew: some must stay empty."""
        return int(self.capacity * (1 + self._load) / 2)

    def _rehash(self, extra: int) -> None:
        """Room for `extra` more pairs: a new table of the living nodes, at most half as full as it may get."""
        given = int(self._counts[_GIVEN])
        live, links = slice(0, given), (self._next[:given], self._prev[:given])
        if len(self) < given:
            live = np.flatnonzero(self._alive)
            renumber = np.full(given + 1, -1, dtype=np.int64)  # the last entry keeps -1 at -1
            renumber[live] = np.arange(len(live))
            links = [renumber[link[live]] for link in links]
        keys, values, (following, previous), count = self._keys[live], self._values[live], links, len(self)
        self._reset(capacity_for(count + extra, self._load))
        self.rebuilds += 1
        self._counts[:] = 0, count, count
        self._keys[:count], self._values[:count], self._alive[:count] = keys, values, True
        self._next[:count], self._prev[:count] = following, previous
        self._place_all(count)

    def _place_all(self, count: int) -> None:
        """Slots for the nodes `[0, count)` of a table whose slots are all empty."""
        keys = self._keys[:count]
        self._place(_PAIRS, self._pair_home(keys, self._values[:count]), np.arange(count))
        first = np.flatnonzero(self._prev[:count] < 0)
        self._place(_HEADS, self._head_home(keys[first]), first)

    def _new_nodes(self, count: int) -> np.ndarray:
        """Numbers for so many more nodes."""
        free, given, _ = self._counts.tolist()
        reused = min(free, count)
        nodes = np.concatenate([self._free[free - reused : free], np.arange(given, given + count - reused)])
        self._counts += (-reused, count - reused, count)
        return nodes

    def _head_home(self, keys: np.ndarray) -> np.ndarray:
        return (splitmix64(keys) & np.uint64(self.capacity - 1)).astype(np.int64)

    def _pair_home(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        return self._head_home(keys + splitmix64(values.astype(np.uint64)))

    def _find_heads(self, keys: np.ndarray) -> np.ndarray:
        return self._find(self._heads, self._head_home(keys), lambda node, i: self._keys[node] == keys[i])

    def _find_pairs(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        def same(node, i):
            return (self._keys[node] == keys[i]) & (self._values[node] == values[i])

        return self._find(self._pair_slots, self._pair_home(keys, values), same)

    def _find(self, table: np.ndarray, slots: np.ndarray, same) -> np.ndarray:
        """The slot where each entry lies, or -1. `same(nodes, entries)` compares; half of the slots are empty."""
        result = np.full(len(slots), -1, dtype=np.int64)
        entries = np.arange(len(slots))
        while len(entries):
            nodes = table[slots]
            hit = nodes >= 0
            hit[hit] = same(nodes[hit], entries[hit])
            result[entries[hit]] = slots[hit]
            go_on = ~hit & (nodes != _EMPTY)
            entries, slots = entries[go_on], (slots[go_on] + 1) & (self.capacity - 1)
        return result

    def _place(self, which: int, slots: np.ndarray, nodes: np.ndarray) -> None:
        """Put nodes that are in no slot yet into the first free one from `slots` on."""
        table = (self._heads, self._pair_slots)[which]
        while len(nodes):
            seen = table[slots]
            free = seen < 0
            table[slots[free]] = nodes[free]  # where several want one slot, one of them gets it ...
            placed = table[slots] == nodes
            self._used[which] += np.count_nonzero(placed & (seen == _EMPTY))
            nodes, slots = nodes[~placed], (slots[~placed] + 1) & (self.capacity - 1)  # ... and the others go on

    def _clear(self, which: int, slots: np.ndarray) -> None:
        """Free slots. They become empty, and used ones before them too, where no search can go past any more."""
        table, mask = (self._heads, self._pair_slots)[which], self.capacity - 1
        table[slots] = _TOMBSTONE
        while len(slots):
            slots = np.unique(slots[(table[slots] == _TOMBSTONE) & (table[(slots + 1) & mask] == _EMPTY)])
            table[slots] = _EMPTY
            self._used[which] -= len(slots)
            slots = (slots - 1) & mask

    def _link(self, nodes: np.ndarray) -> None:
        """Put new nodes, oldest first, in front of the lists of their keys."""
        nodes = nodes[np.argsort(self._keys[nodes], kind="stable")]
        keys = self._keys[nodes]
        same_as_before = np.concatenate(([False], keys[1:] == keys[:-1]))
        older, newer = nodes[:-1][same_as_before[1:]], nodes[same_as_before]
        self._next[newer], self._prev[older] = older, newer
        tails, heads = nodes[~same_as_before], nodes[np.append(~same_as_before[1:], True)]
        slots = self._find_heads(self._keys[heads])
        known = slots >= 0
        old_heads = self._heads[slots[known]]
        self._next[tails[known]], self._prev[old_heads] = old_heads, tails[known]
        self._heads[slots[known]] = heads[known]
        self._place(_HEADS, self._head_home(self._keys[heads[~known]]), heads[~known])

    def _unlink(self, dead: np.ndarray) -> None:
        """Take nodes marked as dead out of their lists: neighbours in one list may die in the same batch."""
        for links in (self._next, self._prev):
            while True:  # pointer doubling: each round halves the way to the nearest live neighbour
                target = links[dead]
                blocked = (target >= 0) & ~self._alive[target]
                if not blocked.any():
                    break
                links[dead[blocked]] = links[target[blocked]]
        following, previous = self._next[dead], self._prev[dead]
        self._next[previous[previous >= 0]] = following[previous >= 0]
        self._prev[following[following >= 0]] = previous[following >= 0]
        first = previous < 0
        slots = self._find_heads(self._keys[dead[first]])
        following = following[first]
        self._heads[slots[following >= 0]] = following[following >= 0]
        self._clear(_HEADS, slots[following < 0])


def capacity_for(pairs: int, load: float) -> int:
    """Slots of a table in which so many pairs are at most half of those that it may hold."""
    return max(_MIN_CAPACITY, 1 << (int(np.ceil(2 * pairs / load)) - 1).bit_length())


def checked_pairs(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys (uint64) and values (int64), one behind the other in memory, or ValueError."""
    keys, values = np.ascontiguousarray(keys, dtype=np.uint64), np.ascontiguousarray(values, dtype=np.int64)
    if keys.ndim != 1 or keys.shape != values.shape:
        raise ValueError(f"`keys` and `values` must be 1-D of one length, got shapes {keys.shape}, {values.shape}.")
    if len(values) and values.min() < 0:
        raise ValueError(f"`values` must be at least 0 (-1 marks an empty place), got {values.min()}.")
    return keys, values


def unique_pairs(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs without repetitions, in the order of their first occurrence."""
    order = np.lexsort((values, keys))
    repeated = (keys[order][1:] == keys[order][:-1]) & (values[order][1:] == values[order][:-1])
    first = np.ones(len(keys), dtype=bool)
    first[order[1:][repeated]] = False
    return keys[first], values[first]
