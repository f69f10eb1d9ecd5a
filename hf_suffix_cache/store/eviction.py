"""What a full store gives up first: the policies, what they go by, and who may push out whom."""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .claims import Claims, row_bytes
from .shelf import Recipe, Sequence, Shelf
from .usage import Usage

logger = logging.getLogger("hf_suffix_cache")

VIEW_SHARE = 1 / 8  # of the store: a call may have so many rows for what is worth least, whatever it is worth itself
PAST = 3 / 4  # of the uses of text before it was stored, that count before its first contest for room
NEWCOMER = 1 / 16  # uses that it counts at least, as for text that was never asked for before
CREDIT = 8  # uses that a call counts for which more than such a share would have to go: chats mostly go on


@dataclass(frozen=True)
class Candidates:
    """
    Sequences that may be given up, and what is known of each. All figures are those of its rows that nothing else
    refers to: others are not freed by its going, and stay of use.

    Args:
        sequences (`tuple` of `Sequence`): The sequences, in the order of the arrays.
        last_used (`np.ndarray` of float, `[candidates]`): When any of its rows was last used, by the store's clock.
        uses (`np.ndarray` of float, `[candidates]`): How often a row was asked for on average, also before it was
            given up and stored again.
        recent (`np.ndarray` of float, `[candidates]`): The same, where older requests count less.
        unproven (`np.ndarray` of float, `[candidates]`): The part of `recent` that is the request itself that stored
            rows which were neither used since nor in a contest for room.
        new_bytes (`np.ndarray` of float, `[candidates]`): Bytes of these rows.
        seconds (`np.ndarray` of float, `[candidates]`): What running all its rows would take.
        num_bytes (`np.ndarray` of float, `[candidates]`): Bytes that its going frees.
        max_bytes (`int`): What the store may hold.
    """

    sequences: tuple[Sequence, ...]
    last_used: np.ndarray
    uses: np.ndarray
    recent: np.ndarray
    unproven: np.ndarray
    new_bytes: np.ndarray
    seconds: np.ndarray
    num_bytes: np.ndarray
    max_bytes: int

    def __len__(self) -> int:
        return len(self.last_used)


class EvictionPolicy(Protocol):
    """Says what is to stay. One object may serve several stores; what it remembers it keeps by sequence."""

    def worth(self, candidates: Candidates) -> np.ndarray:
        """What each is worth, float `[candidates]`: the lowest goes first, of equal ones the one used longest ago."""


@dataclass(frozen=True)
class Lru:
    """What was used longest ago goes first."""

    def worth(self, candidates: Candidates) -> np.ndarray:
        """When it was last used."""
        return candidates.last_used


@dataclass(frozen=True)
class Lfu:
    """What was asked for least often goes first, however long ago that was."""

    def worth(self, candidates: Candidates) -> np.ndarray:
        """How often it was asked for."""
        return candidates.uses


@dataclass(frozen=True)
class Gdsf:
    """
    Greedy dual size frequency (Cherkasova 1998): seconds of prefill saved, times how often, for a byte. Two things
    differ. Uses fade with the prompts that have come since, instead of growing by what was given up last, and what is
    new counts as its text was asked for *before*: each text of a loop that is a little too long for the store is asked
    for as often as any other, and would else push out the one that comes next.

    Args:
        past (`float`): Share of its earlier uses that what is new counts. Below 1, so that of two texts which are
            asked for equally often the one that is there stays.
        newcomer (`float`): Uses that what is new counts at least.
    """

    past: float = PAST
    newcomer: float = NEWCOMER

    def worth(self, candidates: Candidates) -> np.ndarray:
        """Seconds saved for a byte."""
        recent, unproven = candidates.recent, candidates.unproven
        as_new = np.maximum(self.past * (recent - unproven), self.newcomer * unproven)
        uses = np.where(unproven > 0, as_new, recent)
        return uses * candidates.seconds / np.maximum(candidates.num_bytes, 1)


POLICIES = {"lru": Lru(), "lfu": Lfu(), "gdsf": Gdsf()}


class Foreign:
    """
    A policy of the caller's. Where it fails, which is logged once, what was used longest ago goes first: a fault in it
    must not take the call's answer.

    Args:
        policy (`EvictionPolicy`): His.
    """

    def __init__(self, policy: EvictionPolicy):
        self.policy = policy
        self._failed = False

    def worth(self, candidates: Candidates) -> np.ndarray:
        """What his says, or when each was last used."""
        try:
            return _checked(self.policy, candidates)
        except Exception:
            if not self._failed:
                logger.warning("the eviction policy failed, what was used longest ago goes first", exc_info=True)
            self._failed = True
            return candidates.last_used


def _checked(policy: EvictionPolicy, candidates: Candidates) -> np.ndarray:
    worth = np.asarray(policy.worth(candidates), dtype=np.float64)
    if worth.shape != (len(candidates),) or np.isnan(worth).any():
        raise ValueError(f"{policy!r} must give one number for each of {len(candidates)} candidates, got {worth!r}.")
    return worth


def policy_of(eviction: str | EvictionPolicy) -> EvictionPolicy:
    """The policy that the setting `eviction` means."""
    return POLICIES[eviction] if isinstance(eviction, str) else Foreign(eviction)


# -- candidates -----------------------------------------------------------------------------------------------------


def evictable(shelves: Collection[Shelf]) -> list[tuple[Shelf, Sequence]]:
    """
    The sequences that may be given up. Pinned ones stay, and so do those in use, and those that take no memory: all of
    their rows lie in files.
    """
    return [
        (shelf, sequence)
        for shelf in shelves
        for sequence in shelf.sequences
        if not sequence.busy and not sequence.pinned and not _is_mapped(shelf, sequence)
    ]


def describe(found: Collection[tuple[Shelf, Sequence]], usage: Usage, claims: Claims) -> Candidates:
    """What is known of sequences, each with its shelf; `claims` are those of all shelves."""
    seconds = usage.row_seconds()
    facts = [
        (number, rows, row_bytes(each), seconds[shelf.pool], each.uses.total, *usage.recent(each))
        for number, (shelf, sequence) in enumerate(found)
        for each, rows in claims.freed(shelf, sequence)
    ]
    owner, rows, size, cost, total, recent, new = np.array(facts, dtype=np.float64).reshape(-1, 7).T
    owner, count = owner.astype(np.int64), len(found)

    def added(values: np.ndarray) -> np.ndarray:
        return np.bincount(owner, rows * values, count)

    all_rows = np.maximum(added(np.ones_like(rows)), 1)
    return Candidates(
        sequences=tuple(sequence for _, sequence in found),
        last_used=np.array([shelf.newest_use(sequence) for shelf, sequence in found], dtype=np.float64),
        uses=added(total) / all_rows,
        recent=added(recent) / all_rows,
        unproven=added(new) / all_rows,
        new_bytes=added(size * (new > 0)),
        seconds=added(cost),
        num_bytes=added(size),
        max_bytes=usage.budget.max_bytes,
    )


def order_of(candidates: Candidates, policy: EvictionPolicy) -> tuple[np.ndarray, np.ndarray]:
    """
    The order in which candidates go, and their worth: `[candidates]` each. What frees nothing goes last, whatever it
    is worth: it would be lost for no byte.
    """
    worth = _checked(policy, candidates)
    return np.lexsort((candidates.last_used, worth, candidates.num_bytes == 0)), worth


def admits(
    shelves: Collection[Shelf],
    shelf: Shelf,
    size: int,
    prompts: Collection[tuple[np.ndarray, Recipe]],
    policy: EvictionPolicy,
    usage: Usage,
    now: float,
    claims: Claims,
) -> bool:
    """
    Whether a call's rows may push out what must go for them: nothing of it may be worth more than they are, with some
    credit.

    Args:
        shelves (sequence of `Shelf`): All shelves of the store.
        shelf (`Shelf`): The call's.
        size (`int`): Bytes of the call's rows.
        prompts (sequence): Its prompts, `[rows]` each, and where their rows were found. Empty: it is not stored.
        policy (`EvictionPolicy`), usage (`Usage`): By which worth is judged.
        now (`float`): The time by the store's clock.
        claims (`Claims`): Of all shelves, and of the call.
    """
    missing = size - (usage.budget.max_bytes - sum(map(_held_bytes, shelves)))
    found = evictable(shelves)
    if missing <= 0 or not found:
        return True
    there = describe(found, usage, claims)
    both = _with(there, _as_newcomer(shelf, size, prompts, usage, now))
    order, worth = order_of(both, policy)
    order = order[order < len(found)]
    last = int(np.searchsorted(np.cumsum(there.num_bytes[order]), missing))
    return last == len(order) or bool(worth[order[last]] <= worth[-1])


def _as_newcomer(shelf: Shelf, size: int, prompts: Collection[tuple], usage: Usage, now: float) -> dict[str, float]:
    """What `Candidates` would say of a call's rows, once they were stored."""
    rows = sum(len(ids) for ids, _ in prompts)
    known = np.array([usage.expected(shelf, ids, recipe) for ids, recipe in prompts]).reshape(-1, 2)
    uses, recent = (known.sum(0) / max(1, rows)).tolist()
    return {
        "last_used": now if rows else -np.inf,
        "uses": uses + CREDIT * bool(rows),
        "recent": recent + CREDIT * bool(rows),
        "unproven": 0.0,
        "new_bytes": 0.0,
        "seconds": usage.row_seconds()[shelf.pool] * size / shelf.pool.row_bytes,
        "num_bytes": size,
    }


def _with(candidates: Candidates, newcomer: dict[str, float]) -> Candidates:
    """The candidates, and a call that is not stored yet as the last one."""
    nobody = Sequence(np.empty(0, dtype=np.int64), Recipe.empty(), 0, 0)
    columns = {name: np.append(getattr(candidates, name), value) for name, value in newcomer.items()}
    return Candidates((*candidates.sequences, nobody), **columns, max_bytes=candidates.max_bytes)


def _held_bytes(shelf: Shelf) -> int:
    """Bytes of a shelf's rows that only giving up sequences frees."""
    return sum(len(each) * row_bytes(each) for each in shelf.segments if not each.is_mean)


def _is_mapped(shelf: Shelf, sequence: Sequence) -> bool:
    segments = sequence.recipe.segments if shelf.pool.mapped and sequence.extent is None else ()
    return bool(segments) and all(shelf.pool.is_mapped(each.addresses) for each in segments)
