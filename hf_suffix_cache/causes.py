"""Why a prompt's tokens are served or not: found by looking for what the plan has left out."""

from dataclasses import dataclass, replace

import numpy as np

from .planning import KINDS
from .prompt import NEW, PlannedRow
from .store.index import Run, WindowIndex
from .store.reading import Reading
from .store.scopes import Place
from .store.shelf import Shelf
from .store.store import Store

# What a token is served as; then, of one that is not served, the cause.
CAUSES = {
    "exact": "computed before behind the same text: served as it is",
    "carried": "approximate rows of the same conversation: continued in place",
    "shifted": "computed before, but behind other text, at another place or kept in fewer bits: moved",
    "repaired": "moved, then recomputed",
    "unstored": "not stored",
    "empty": "nothing is stored yet that this call may read",
    "session": "nothing is stored of this session yet, and it reads no other session's rows",
    "state": "stored for this model in another state: weights, adapters, settings or hooks",
    "conditions": "stored under other rotary frequencies, or with token types",
    "hops": "stored, but behind three generations of moved rows, and not moved again",
    "topic": "stored before this session left its topic (`topic_similarity`), and not moved since",
    "front": "stored, but behind other text, and this model's rows can't be moved",
    "unmoved": 'stored, but not exact here, and fidelity="exact" serves nothing else',
    "short": "stored, but in a piece that is too short to move (`min_match_tokens`, `seam_tokens`)",
    "tail": "stored, but the newest `tail_tokens` always run where moved rows may be served",
    "last": "its logits are asked for, which takes running it",
    "tokenised": "stored, but tokenised otherwise",
    "broken": "amid stored text: tokenised otherwise, or edited (`tokenizer=` tells which)",
    "refused": "reuse was refused",
}
NAMES = tuple(CAUSES)

LITTLE = 0.2  # share of a prompt, below which it is worth looking for why no more is served
SHORTEST = 8  # tokens that a stored piece must have in common with the prompt to be named
MAX_OTHERS = 16  # shelves of other states and conditions that are looked through, the newest
NOTED_UNMOVABLE = 64  # segments that are not moved again, the newest: a call that ends must not go through all


@dataclass(frozen=True)
class Search:
    """
    Looks for the causes of what a plan does not serve. Takes no reference to a stored row and changes nothing; it
    reads the shelves that the call may read, and those of its own scopes for other states of the same model.

    Args:
        identity (`Identity`): The model as it is.
        front_only (`bool`): Whether rows are not moved because the model's can't be.
        nothing (`str`): The cause where the call's shelves are empty: `"empty"`, `"session"` or `"state"`.
    """

    identity: object
    front_only: bool
    nothing: str = "empty"

    def note(
        self, report, store: Store, planned: PlannedRow, reading: Reading, place: Place, config, keep_last: int
    ) -> None:
        """Add a prompt's tokens by cause to its `ReuseReport`, if little of it is served; as `causes`."""
        if (planned.planned_kinds != NEW).mean() < LITTLE:
            found = self.causes(store, planned, reading, place, config, keep_last, NOTED_UNMOVABLE)
            counts = np.bincount(found, minlength=len(NAMES)).tolist()
            for name, count in zip(NAMES, counts, strict=True):
                if count:
                    report.causes[name] = report.causes.get(name, 0) + count

    def causes(
        self,
        store: Store,
        planned: PlannedRow,
        reading: Reading,
        place: Place,
        config,
        keep_last: int = 1,
        unmovable: int | None = None,
    ) -> np.ndarray:
        """
        The cause of each token, before repair.

        Args:
            store (`Store`): Its lock is held.
            planned (`PlannedRow`): The prompt, as it is planned now.
            reading (`Reading`): What it was planned from.
            place (`Place`): Whose prompt, under which conditions.
            config (`SuffixCacheConfig`): Of the call.
            keep_last (`int`, *optional*, defaults to 1): Newest tokens whose logits are asked for.
            unmovable (`int`, *optional*): Segments of each shelf that are looked through of those that are not moved
                again, the newest; None: all.

        Returns:
            `np.ndarray` of int, `[tokens]`: Numbers in `NAMES`.
        """
        ids, start = planned.ids, planned.prefix.length if planned.prefix is not None else 0
        new = planned.planned_kinds == NEW
        causes = np.array([NAMES.index(kind if kind != "new" else "unstored") for kind in KINDS])
        causes = causes[planned.planned_kinds]

        def mark(runs: list[Run], cause: str) -> None:
            found = covered(runs, len(ids)) & new
            causes[found] = NAMES.index(cause)

        shelves = [shelf for shelf in (reading.own, reading.shared) if shelf is not None]
        if not any(shelf.segments for shelf in shelves[: 1 if self.nothing == "session" else 2]):
            causes[new] = NAMES.index(self.nothing)
        for cause, shelf in self._others(store, place):
            mark(shelf.runs(ids, 0, SHORTEST), cause)  # the front of a text is as good there as any other part
        for shelf in shelves:
            mark(_unmovable_runs(shelf, ids, start, unmovable), "hops")
        if config.fidelity == "exact":
            for shelf in shelves:
                mark(shelf.runs(ids, start, SHORTEST), "front" if self.front_only else "unmoved")
        else:
            if reading.session is not None and reading.session.cutoff > float("-inf"):
                mark(reading.own.runs(ids, start, SHORTEST), "topic")
            runs = reading.runs(ids, start, SHORTEST)  # without what the session's topic rules out
            mark(runs, "short")
            self._mark_tail(causes, planned, runs, config)
        causes[new & (np.arange(len(ids)) >= len(ids) - keep_last)] = NAMES.index("last")
        return causes

    def _mark_tail(self, causes: np.ndarray, planned: PlannedRow, runs: list[Run], config) -> None:
        """What is stored of the newest tokens, those included that a conversation would go on with."""
        tokens = np.arange(len(planned.ids))
        stored = covered(runs, len(tokens))
        if planned.prefix is not None:
            stored |= tokens < planned.prefix.length
        tail = (planned.planned_kinds == NEW) & (tokens >= len(tokens) - config.tail_tokens)
        causes[stored & tail] = NAMES.index("tail")

    def _others(self, store: Store, place: Place) -> list[tuple[str, Shelf]]:
        """Shelves of the same scopes that hold rows of the same model in another state, or of other conditions."""
        own = {(self.identity, place), (self.identity, place.beside)}
        scopes = (place.scope, place.scope.beside)
        found = [
            ("conditions" if identity is self.identity else "state", shelf)
            for (identity, where), shelf in store.shelves.items()
            if where.scope in scopes
            and (identity, where) not in own
            and (identity is self.identity or identity.model() is self.identity.model())
        ]
        return found[-MAX_OTHERS:]


def covered(runs: list[Run], tokens: int) -> np.ndarray:
    """Which tokens lie in one of these runs: bool `[tokens]`."""
    steps = np.zeros(tokens + 1, dtype=np.int64)
    for run in runs:
        steps[run.start] += 1
        steps[run.stop] -= 1
    return np.cumsum(steps[:-1]) > 0


def _unmovable_runs(shelf: Shelf, ids: np.ndarray, first: int, newest: int | None) -> list[Run]:
    """Runs of segments that are in no index, since they are not moved again."""
    segments = [segment for segment in shelf.segments if not segment.movable]
    segments = segments[-newest:] if newest is not None else segments
    if not segments:
        return []
    index = WindowIndex()
    for segment in segments:
        index.add(replace(segment, hops=0))  # a copy of what describes the rows, which refers to none of them
    return index.find_runs(ids, first=first, min_match=SHORTEST)
