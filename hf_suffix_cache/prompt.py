"""One row of a prompt: its plan, where each of its rows comes from, and what becomes of them."""

from dataclasses import dataclass, field

import numpy as np

from .planning import KINDS, Plan, Prefix, Span, plan_prompt
from .reach import outside_mass
from .repair import RepairRequest
from .repair import budget as repair_budget
from .store.corrections import Correction, Drift
from .store.segments import Segment
from .store.shelf import Match, Recipe, Sequence

EXACT, CARRIED, SHIFTED, REPAIRED, NEW = range(len(KINDS))  # in the order of KINDS


@dataclass(eq=False)
class PlannedRow:
    """
    A prompt of the caller's and what serves it. Positions count from its first token, columns from the batch's.

    Args:
        ids (`np.ndarray` of int64, `[tokens]`): Its tokens.
        pad (`int`): Columns of left padding before them.
        plan (`Plan`): What is served.
        prefix (`Prefix`, *optional*): The stored sequence at its front.
    """

    ids: np.ndarray
    pad: int
    plan: Plan
    prefix: Prefix | None
    kinds: np.ndarray = field(init=False)
    planned_kinds: np.ndarray = field(init=False)
    served: Recipe = field(init=False)
    run_start: np.ndarray = field(init=False)
    seams: np.ndarray = field(init=False)
    partial: np.ndarray = field(init=False)
    hops: int = field(init=False, default=0)

    def __post_init__(self):
        tokens = len(self.ids)
        self.kinds = np.full(tokens, NEW, dtype=np.int8)
        self.run_start = np.zeros(tokens, dtype=np.int64)
        self.planned_kinds = self.kinds.copy()
        self.seams = np.zeros(tokens, dtype=bool)
        self.partial = np.zeros(tokens, dtype=bool)  # repaired in the lower layers only
        self.served = Recipe([], np.full(tokens, -1, dtype=np.int32), *np.zeros((2, tokens), dtype=np.int64))

    @classmethod
    def make(cls, ids, pad, match: Match, find_runs, keep_last: int, config) -> "PlannedRow":
        """Plan one prompt. `find_runs(first)` looks up the stored runs from position `first` on."""
        # carried rows have no repair, so a bound could not be held with them: the text is planned anew
        prefix = _choose_prefix(match, "exact" if config.max_kl is not None else config.fidelity)
        start = prefix.length if prefix else 0
        approximate = config.fidelity != "exact" and start < len(ids) - config.tail_tokens
        plan = plan_prompt(
            len(ids),
            prefix,
            find_runs(start) if approximate else [],
            tail_tokens=config.tail_tokens,
            keep_last=keep_last,
            min_match=config.min_match_tokens,
            seam_tokens=config.seam_tokens,
            fidelity=config.fidelity,
        )
        row = cls(ids, pad, plan, prefix)
        row._take_prefix()
        row._take_runs(config.seam_tokens)
        row.planned_kinds = row.kinds.copy()
        return row

    @property
    def drifts(self) -> tuple[Correction, ...]:
        """Corrections of the prefix, as it was stored, and of this call."""
        return self.served.drifts

    @property
    def prefix_sequence(self) -> Sequence | None:
        """The stored sequence that the front is served from, if any of it is."""
        return self.prefix.sequence if self.prefix is not None and self.prefix_length else None

    @property
    def prefix_length(self) -> int:
        """Positions served from a stored sequence's front."""
        return int(np.count_nonzero((self.kinds == EXACT) | (self.kinds == CARRIED)))

    @property
    def carries(self) -> bool:
        """Whether approximate rows of a stored conversation go on."""
        return bool((self.kinds == CARRIED).any())

    @property
    def computed(self) -> np.ndarray:
        """Positions that must be computed: bool `[tokens]`."""
        return self.kinds == NEW

    @property
    def exact(self) -> int:
        """
        Leading positions whose rows are exact when the call ends: all before the first row that stays approximate. New
        and repaired rows there were last run when everything to their left was final.
        """
        approximate = np.flatnonzero((self.kinds == CARRIED) | (self.kinds == SHIFTED) | self.partial)
        return int(approximate[0]) if len(approximate) else len(self.ids)

    def repair_request(self, fraction: float, attention=None, deviation=None, outside_mass=None) -> RepairRequest:
        """What a repair policy needs to know of this row. Rows that were repaired already are moved rows here too."""
        shifted = (self.served.which >= 0) & ((self.kinds == SHIFTED) | (self.kinds == REPAIRED))
        rows = repair_budget(int(shifted.sum()), fraction)
        return RepairRequest(shifted, self.seams, self.run_start, rows, attention, deviation, outside_mass)

    def unmark_recomputed(self, rows: np.ndarray) -> None:
        """These rows, bool `[tokens]`, were marked as recomputed, and are moved rows again."""
        self.kinds[rows & (self.planned_kinds == SHIFTED)] = SHIFTED
        self.served.drifts = tuple(each for each in self.drifts if not rows[each.anchors].any())

    def outside_mass(self) -> np.ndarray | None:
        """
        Attention that each moved row gave to the left of its run when it was computed: `[tokens]`, NaN where it was
        not kept; None where it was for none.
        """
        mass = np.full(len(self.ids), np.nan)
        moved = np.isin(self.kinds, (SHIFTED, REPAIRED)) & (self.served.which >= 0)
        for number, segment in enumerate(self.served.segments):
            rows = np.flatnonzero(moved & (self.served.which == number))
            if segment.reach is not None and len(rows):
                mass[rows] = outside_mass(segment.reach[self.served.offset[rows]], rows - self.run_start[rows])
        return None if np.isnan(mass).all() else mass

    def mark_recomputed(self, columns: np.ndarray) -> None:
        """These columns were served and then recomputed."""
        positions = columns - self.pad
        positions = positions[(positions >= 0) & (positions < len(self.ids))]
        served = positions[self.kinds[positions] != NEW]
        self.kinds[served] = REPAIRED

    def add_drift(self, chosen: np.ndarray) -> Drift:
        """What repairing `chosen`, bool `[tokens]`, corrects in the moved rows that stay; the recipe remembers it."""
        moved = self.kinds == SHIFTED
        anchors, targets = np.flatnonzero(moved & chosen), np.flatnonzero(moved & ~chosen)
        drift = Drift(anchors, targets, self.run_start)
        if len(anchors) and len(targets):
            source = [part[anchors] for part in (self.served.which, self.served.offset, self.served.shift)]
            self.served.drifts += (Correction(drift, *source, np.ones(len(targets), dtype=bool)),)
        return drift

    def recipe(self) -> Recipe:
        """Source of each row when the prompt is done; -1 where it was computed in this call."""
        computed = (self.kinds == NEW) | (self.kinds == REPAIRED)
        which = np.where(computed, -1, self.served.which).astype(np.int32)
        shift = np.where(computed, 0, self.served.shift)  # a repaired row lies where it was computed
        return Recipe(self.served.segments, which, self.served.offset.copy(), shift, self._kept_drifts())

    def _kept_drifts(self) -> tuple[Correction, ...]:
        """Corrections of the rows that are moved rows still, and of those that later ones took differences from."""
        needed, kept = (self.kinds == SHIFTED) | (self.kinds == CARRIED), []
        for correction in reversed(self.drifts):
            part = correction.only(needed)
            if len(part.targets):
                kept.append(part)
            needed[correction.anchors] = True
        return tuple(reversed(kept))

    def spans(self) -> tuple[Span, ...]:
        """The spans of the report."""
        origin = np.where(self.kinds == NEW, -1, self.served.which)
        shift = np.where(self.kinds == NEW, 0, self.served.shift)
        cuts = np.flatnonzero((np.diff(self.kinds) != 0) | (np.diff(shift) != 0) | (np.diff(origin) != 0)) + 1
        borders = [0, *cuts.tolist(), len(self.ids)]
        spans = []
        for start, stop in zip(borders, borders[1:], strict=False):
            segment = self.served.segments[origin[start]].segment_id if origin[start] >= 0 else None
            spans.append(Span(start, stop, KINDS[self.kinds[start]], int(shift[start]), segment))
        return tuple(spans)

    def segments(self) -> list[Segment]:
        """Stored segments that the row refers to."""
        return self.served.segments

    def _take_prefix(self) -> None:
        spans = [span for span in self.plan.spans if span.kind in ("exact", "carried")]
        if not spans:
            return
        length, sequence = spans[-1].stop, self.prefix.sequence
        front = sequence.recipe.head(length)
        self.served.segments.extend(front.segments)
        for name in ("which", "offset", "shift"):
            getattr(self.served, name)[:length] = getattr(front, name)
        for span in spans:
            self.kinds[span.start : span.stop] = KINDS.index(span.kind)
        if spans[-1].kind == "carried":
            self.hops = sequence.hops
            self.served.drifts = front.drifts

    def _take_runs(self, seam_tokens: int) -> None:
        spans = self.plan.shifted
        if not spans:
            return
        numbers = {segment: number for number, segment in enumerate(self.served.segments)}
        for span in spans:
            if span.run.segment not in numbers:
                numbers[span.run.segment] = len(numbers)
                self.served.segments.append(span.run.segment)
        which = np.array([numbers[span.run.segment] for span in spans])
        fields = [(span.start, span.stop, span.offset, span.shift, span.seam) for span in spans]
        start, stop, offset, shift, seam = np.array(fields, dtype=np.int64).T
        seam = seam.astype(bool)
        lengths = stop - start
        of = np.repeat(np.arange(len(spans)), lengths)  # number of the span that each row is in
        rows = np.arange(len(of)) + (start - np.cumsum(lengths) + lengths)[of]
        run_start = np.maximum.accumulate(np.where(seam, start, 0))
        self.kinds[rows] = SHIFTED
        self.served.which[rows] = which[of]
        self.served.offset[rows] = rows + (offset - start)[of]
        self.served.shift[rows] = shift[of]
        self.run_start[rows] = run_start[of]
        self.seams[rows] = (seam & (seam_tokens > 0))[of] & (rows < (start + seam_tokens)[of])
        self.hops = max(self.hops, *(span.hops + 1 for span in spans))


def _choose_prefix(match: Match, fidelity: str) -> Prefix | None:
    """The longest exact or carried prefix."""
    if fidelity != "exact" and match.carried > match.exact:
        sequence = match.carried_sequence
        return Prefix(min(sequence.exact, match.carried), match.carried, 0, sequence)
    if match.exact:
        return Prefix(match.exact, match.exact, 0, match.exact_sequence)
    return None
