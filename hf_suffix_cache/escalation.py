"""Repair that goes on until the calibrated rule says that the bound holds."""

from dataclasses import dataclass

import numpy as np
import torch

from .bound.features import LEVELS
from .prompt import EXACT, SHIFTED
from .repair import FirstRows, QuestionAttention

NAMES = tuple(name for name, _ in LEVELS)


@dataclass(frozen=True)
class TracedLevel:
    """
    What one level gave.

    Args:
        level (`str`): Its name.
        features (`dict`): Of the prompt after it.
        logits (`torch.Tensor`, `[vocabulary]`): Of the first token.
        rows (`int`): Rows run so far, all passes.
    """

    level: str
    features: dict
    logits: torch.Tensor
    rows: int


class Escalation:
    """
    Levels of repair, one after the other. Each begins with the rows as they were served and runs all that it repairs,
    and every new row to the right of the first of them: what it gives does not depend on the levels before it. (Rows
    that stayed as an earlier level left them, behind rows that were not repaired yet, would cap it: on SmolLM2-135M
    the KL of 60 % repaired was 0.010 so, hardly below the 0.012 of 30 %.) The last level is a full prefill behind the
    exact prefix.

    Args:
        passes (`Passes`): Whose rows, view and forwards are used.
    """

    def __init__(self, passes):
        self.passes = passes

    def run(self, model, kwargs: dict, new: np.ndarray) -> np.ndarray:
        """Run levels until the rule accepts one; bool `[columns]` of the last pass."""
        passes = self.passes
        new = new.copy()
        new[passes.batch.prompt_columns :] = False  # drafts of assisted decoding: only the last pass runs them
        shifted = passes.columns(lambda row: row.kinds == SHIFTED) & ~new
        reason = self._at_once(new, shifted)
        if reason is not None and passes.trace is None:
            passes.report.reason = reason
            return self._full(shifted)
        policy = FirstRows()
        if (
            passes.capability.reads_attention
            and passes.can_probe(new)
            and passes.probe(model, kwargs, new) is not None
        ):
            policy = QuestionAttention()
        passes.mark(new)  # computed for a neighbour's sake
        done = np.zeros_like(new)
        level, previous = NAMES[0], None
        while level is not None:
            if level == NAMES[-1] and passes.trace is None:
                passes.report.reason = "the bound `max_kl` could not be had for less than a full prefill"
                return self._full(shifted)
            done = self._run_level(model, kwargs, level, new, shifted, done, policy)
            level, previous = self._next(level, previous), level
        return passes.only_kept(kwargs)

    def _at_once(self, new: np.ndarray, shifted: np.ndarray) -> str | None:
        """Why a full prefill is run without trying less, or None."""
        passes = self.passes
        if passes.rule is not None and passes.rule.foreign:
            return "the calibration is of another model or of other settings, so it says nothing here; see `calibrate`"
        if passes.rule is None or passes.rule.always_full:
            return "no calibration says that less than a full prefill keeps `max_kl`; see `calibrate`"
        twice = new[np.argmax(shifted) :].sum()
        plain = passes.columns(lambda row: row.kinds != EXACT).sum()
        if new.sum() + twice + passes.columns(lambda row: row.seams).sum() >= plain:
            return "the prompt is too short for `max_kl`: asking would cost what reuse saves"
        return None

    def _full(self, shifted: np.ndarray) -> np.ndarray:
        """The last pass of a full prefill: what is not exact, less the new rows to the left that a probe has run."""
        last = self.passes.columns(lambda row: row.kinds != EXACT)
        last[self.passes.batch.prompt_columns :] = True
        if self.passes.logits is not None:
            last[: np.argmax(shifted)] = False
        self.passes.mark(shifted)
        self.passes.report.level = NAMES[-1]
        return last

    def _run_level(self, model, kwargs, level: str, new, shifted, done, policy) -> np.ndarray:
        """Run one level; returns the columns that it repairs."""
        passes = self.passes
        chosen = shifted
        if level != NAMES[-1]:
            chosen = passes.columns(lambda row: row.seams) & shifted | done
            chosen = chosen | passes.select(policy, dict(LEVELS)[level]) & shifted
        if done.any() and not (chosen & ~done).any():
            return self._keep_level(level, chosen)
        columns = chosen | new
        if chosen.any() and passes.logits is not None:
            columns[: np.argmax(chosen)] = False  # final since the first pass
        if done.any():
            passes.restore(done)
        passes.watch_rows(chosen)
        passes.mark(columns)
        logits = passes.forward(model, kwargs, np.flatnonzero(columns), eager=True)
        passes.view.watches = ()
        self._found = passes.predict(logits)
        return self._keep_level(level, chosen)

    def _keep_level(self, level: str, chosen: np.ndarray) -> np.ndarray:
        """Note what a level gave. One that adds no row to the level before it is that level."""
        passes = self.passes
        passes.report.level = level
        if passes.trace is not None:
            logits = passes.logits[0].float().cpu()
            passes.trace.append(TracedLevel(level, self._found[0], logits, passes.report.computed_rows))
        return chosen

    def _next(self, level: str, previous: str | None) -> str | None:
        """The level that the rule wants next: the highest that any prompt of the batch needs; None: this one holds."""
        if level == NAMES[-1]:
            return None
        if self.passes.trace is not None:
            return NAMES[NAMES.index(level) + 1]
        wanted = [self.passes.rule.next_level(level, found, previous) for found in self._found if found]
        wanted = [name for name in wanted if name is not None]
        return max(wanted, key=NAMES.index) if wanted else None
