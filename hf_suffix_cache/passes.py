"""The passes that compute a planned prompt: the probe, the repair, and the arguments of the last one."""

import time
from contextlib import ExitStack

import numpy as np
import torch

from .attention import Probe
from .bound.features import FULL, LEVEL_NAMES
from .capability import Capability, is_compiled
from .drift import DriftCorrection
from .escalation import Escalation
from .filtering import cannot_filter, deviation_of, run_filtered
from .forwards import Forwards, logits_of
from .grouping import groups_of
from .inputs import PromptBatch
from .narrowing import RowWatch
from .prompt import EXACT, SHIFTED, PlannedRow
from .repair import MIN_PROBE_QUERIES, PROBE_QUERIES, FirstRows, fraction_for, preset
from .report import ReuseReport
from .signals import features, watched_layers
from .view import View

__all__ = ["Passes", "logits_of"]


class Passes(Forwards):
    """
    What one first forward of the caller's becomes. Prompts of a batch that are served differently are split into
    groups, each with `Passes` of its own for everything before the last pass, which is the caller's over all rows.

    Args:
        view (`View`): Holds the served rows.
        batch (`PromptBatch`), rows (list of `PlannedRow`): The prompts and their plans.
        config (`SuffixCacheConfig`), capability (`Capability`): Of this call and its model.
        chunk (`int`, *optional*): Rows that one forward may run.
        whole (`bool`): Whether the logits of every column are wanted, padding included.
        report (`ReuseReport`): Counts the rows that run.
        stack (`ExitStack`): What the last pass needs open; the request closes it when that forward returns.
        rule (*optional*): Predicts the KL of what is served, and says how far repair must go (`bound/`).
        trace (list, *optional*): Run every level of escalation and append what each one gave.
        frequencies (callable): Gives the model's live rotary frequencies by `RotarySpec`.
        reload (callable): Gathers the moved rows of some prompts (a `range` of their numbers) anew.
    """

    def __init__(
        self,
        view: View,
        batch: PromptBatch,
        rows: list[PlannedRow],
        config,
        capability: Capability,
        chunk: int | None,
        whole: bool,
        report: ReuseReport,
        stack: ExitStack,
        rule=None,
        trace: list | None = None,
        frequencies=dict,
        reload=None,
        first_prompt: int = 0,
    ):
        super().__init__(view, batch, config, capability, chunk, report, stack)
        self.rows = rows
        self.whole = whole
        self.rule = rule
        self.trace = trace
        self.frequencies = frequencies
        self.reload = reload
        self.first_prompt = first_prompt  # of the request's, where these are a group of them
        self.attention: np.ndarray | None = None  # of the probe, [batch rows, columns]
        self.logits: torch.Tensor | None = (
            None  # of the prompt's last token after the newest pass, [batch rows, vocab]
        )
        self.watch: RowWatch | None = None
        self.groups: list[Passes] = []  # one for each group of prompts, where they run apart

    # -- all passes but the last ----------------------------------------------------------------------------------

    def run(self, model, kwargs: dict) -> dict:
        """Run all passes but the last; return the last one's arguments."""
        started = time.perf_counter()
        groups = self._groups(model, kwargs)
        if len(groups) > 1:
            for members in groups:
                self._run_group(model, kwargs, members)
            self._say_reasons()
            last = self.only_kept(kwargs)
        else:
            last = self._compute(model, kwargs)
        if any((row.planned_kinds == SHIFTED).any() for row in self.rows):
            self.report.timings["repair"] = time.perf_counter() - started
        self.report.set_spans([row.spans() for row in self.rows])
        return self.last_pass(model, kwargs, np.flatnonzero(last))

    def _compute(self, model, kwargs: dict) -> np.ndarray:
        """Run all passes but the last; bool `[columns]` of that one."""
        new = self.columns(lambda row: row.computed)
        new[0 if self.whole else self.batch.prompt_columns :] = True
        if self.capability.kind == "prefix":
            new[np.argmax(new) :] = True  # such a model is only run on: what follows the first new row is new
        last = new
        if any((row.kinds == SHIFTED).any() for row in self.rows):
            if self.trace is not None or self.config.max_kl is not None:
                last = Escalation(self).run(model, kwargs, new)
            else:
                last = self._repair(model, kwargs, new)
        for row in self.rows:
            row.mark_recomputed(np.flatnonzero(new))  # computed for a neighbour's sake
        return last

    def _groups(self, model, kwargs: dict) -> list[range]:
        """Prompts that run together, neighbours each; all in one where they can't run apart or it doesn't pay."""
        together = [range(len(self.rows))]
        if len(self.rows) == 1 or self.whole or self.trace is not None or is_compiled(model):
            return together
        # such frequencies are those of the longest text in a forward
        if self.capability.length_dependent or isinstance(kwargs.get("logits_to_keep"), torch.Tensor):
            return together
        policy, fraction = preset(self.config.fidelity, self.config.repair, self.config.repair_fraction)
        device = kwargs["input_ids"].device.type
        return groups_of(self.rows, self.batch, self.only_kept(kwargs), policy, fraction, device)

    def _run_group(self, model, kwargs: dict, members: range) -> None:
        """Run everything but the kept columns of some prompts, in the view narrowed to their batch rows."""
        rows = slice(members.start * self.batch.group, members.stop * self.batch.group)
        shared = self.batch.prompt_columns, self.batch.group
        group = Passes(
            self.view,
            PromptBatch(self.batch.ids[rows], self.batch.pads[rows], *shared),
            self.rows[members.start : members.stop],
            self.config,
            self.capability,
            self.chunk,
            False,
            ReuseReport(),
            self._open,
            self.rule,
            None,
            self.frequencies,
            self.reload,
            members.start,
        )
        kwargs = {name: self._of_rows(value, rows) for name, value in kwargs.items()}
        with self.view.narrowed(rows):
            last = group._compute(model, kwargs) & ~self.only_kept(kwargs)
            if last.any():
                group.forward(model, kwargs, np.flatnonzero(last), final=True)
            self.view.watches = ()
        self.groups.append(group)
        self.report.computed_rows += group.report.computed_rows
        self.report.equivalent_rows += group.report.equivalent_rows

    def _say_reasons(self) -> None:
        """The groups' reasons; one that does not hold for all of them names its prompts, counted from 1."""
        parts: dict[str, list[int]] = {}
        for group in self.groups:
            if group.report.reason:
                numbers = range(group.first_prompt + 1, group.first_prompt + 1 + len(group.rows))
                parts.setdefault(group.report.reason, []).extend(numbers)
        for reason, numbers in parts.items():
            if len(numbers) < len(self.rows):
                reason = f"prompt {', '.join(map(str, numbers))} of the batch: {reason}"
            self.report.reason = f"{self.report.reason}; {reason}" if self.report.reason else reason

    def _of_rows(self, value, rows: slice):
        """Some batch rows of an argument `[batch, ...]`; others, and what all rows share, as they are."""
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == self.batch.rows:
            return value[rows]
        return value

    def finish(self, logits: torch.Tensor | None) -> None:
        """The last pass has run and gave `logits`, `[batch, kept, vocabulary]`: say what is to be expected of them."""
        self.view.watches = ()
        if self.groups:
            self._finish_groups(logits)
            return
        if self.report.level is not None:  # escalation has told what it went by, and a full prefill errs by nothing
            self.report.expected_kl = 0.0 if self.report.level == FULL else self.report.expected_kl
            return
        if self.watch is None and self.logits is None:
            return
        # with drafts behind the prompt, the first token's logits stand before those of the drafts
        drafts = self.batch.columns - self.batch.prompt_columns
        known = logits is not None and logits.dim() == 3 and logits.shape[1] > drafts
        self.predict(logits[:, -1 - drafts].detach() if known else None)

    def _finish_groups(self, logits: torch.Tensor | None) -> None:
        """What is to be expected of each group; the batch errs by as much as the worst of them."""
        found, levels, expected = [], [], []
        for group in self.groups:
            first = group.first_prompt * self.batch.group
            group.finish(None if logits is None else logits[first : first + group.batch.rows])
            found += group.report.features or [{} for _ in group.rows]
            levels += [group.report.level] if group.report.level else []
            expected += [group.report.expected_kl] if group.report.level or any(group.report.features) else []
        if not expected:
            return
        self.report.take_features(found, self.rule)
        self.report.expected_kl = None if None in expected else max(expected)
        # the batch was not held to more than the prompt that was repaired least
        self.report.level = min(levels, key=LEVEL_NAMES.index) if levels else None

    @property
    def reach(self) -> np.ndarray | None:
        """How far the rows that were last run looked, `[batch rows, columns, distances]`; None if none was read."""
        found = super().reach
        for group in self.groups:
            read, first = group.reach, group.first_prompt * self.batch.group
            if read is None:
                continue
            if found is None:
                found = np.full((self.batch.rows, *read.shape[1:]), np.nan, dtype=np.float16)
            place = found[first : first + group.batch.rows]
            place[:] = np.where(np.isnan(place), read, place)
        return found

    def predict(self, logits: torch.Tensor | None) -> list[dict]:
        """Features of every prompt after a pass that gave `logits`, `[batch, vocabulary]`; the report takes them."""
        found = []
        for number, row in enumerate(self.rows):
            first = number * self.batch.group
            seen = self.attention_of(number)
            pair = [None if part is None else part[first] for part in (logits, self.logits)]
            found.append(features(row, first, len(self.view.layers), seen, self.watch, *pair))
        self.logits = logits
        self.report.take_features(found, self.rule)
        return found

    def attention_of(self, number: int) -> np.ndarray | None:
        """The probe's attention to the tokens of a prompt, `[tokens]`."""
        if self.attention is None:
            return None
        row = self.rows[number]
        return self.attention[number * self.batch.group, row.pad : row.pad + len(row.ids)]

    def columns(self, of_row) -> np.ndarray:
        """Union over the prompts: bool `[columns]`. One forward runs the same columns of every batch row."""
        union = np.zeros(self.batch.columns, dtype=bool)
        for row in self.rows:
            union[row.pad : row.pad + len(row.ids)] |= of_row(row)
        return union

    def mark(self, columns: np.ndarray) -> None:
        """These columns, bool `[columns]`, were served and are recomputed."""
        for row in self.rows:
            row.mark_recomputed(np.flatnonzero(columns))

    def restore(self, columns: np.ndarray) -> None:
        """The repair of these columns, bool `[columns]`, is undone: moved rows are as they were served."""
        for row in self.rows:
            row.unmark_recomputed(columns[row.pad : row.pad + len(row.ids)])
        self.reload(range(self.first_prompt, self.first_prompt + len(self.rows)))

    # -- repair ---------------------------------------------------------------------------------------------------

    def _repair(self, model, kwargs: dict, new: np.ndarray) -> np.ndarray:
        """Run what the policy needs before the last pass; bool `[columns]` of that one."""
        seams = self.columns(lambda row: row.seams)
        policy, fraction = preset(self.config.fidelity, self.config.repair, self.config.repair_fraction)
        if self.config.repair is None and self.config.fidelity == "balanced":
            fraction = fraction_for([row.repair_request(fraction) for row in self.rows], fraction)
        policy = self._usable(model, policy, new, seams, fraction)
        if getattr(policy, "filters_layers", False):
            run_filtered(self, model, kwargs, new, seams, policy)
            return self.only_kept(kwargs)
        probed = False
        if getattr(policy, "needs_attention", False) and (fraction > 0 or seams.any()):
            probed = True
            if self.probe(model, kwargs, new) is None:
                self.report.reason = "the model's attention can't be read: the first rows of each run were repaired"
                policy = FirstRows()
        deviation = deviation_of(self, model, kwargs, new) if getattr(policy, "needs_deviation", False) else None
        chosen = seams | self.select(policy, fraction, deviation)
        last = new | chosen
        if probed:
            # rows left of the first repaired one are final already; the answer's logits come from this pass
            last &= chosen.cumsum() > 0
            last |= self.only_kept(kwargs)
        self.watch_rows(chosen)
        self.mark(chosen)
        if is_compiled(model):  # rows are looked up by column while it runs, which is not for a graph
            self.forward(model, kwargs, np.flatnonzero(last), eager=True)
            self.view.watches = ()
            return self.only_kept(kwargs)
        return last

    def _usable(self, model, policy, new: np.ndarray, seams: np.ndarray, fraction: float):
        """The policy, or the first rows of each run where the model or the prompt has no use for it."""
        if getattr(policy, "filters_layers", False):
            reason = cannot_filter(self, model)
        elif getattr(policy, "needs_deviation", False) and cannot_filter(self, model):
            reason = cannot_filter(self, model)
        elif not getattr(policy, "needs_attention", False):
            reason = None
        elif not self.capability.reads_attention:
            reason = "the model's attention can't be read: the first rows of each run were repaired"
        elif not self._probe_pays(new, seams, fraction):
            reason = "a probe would cost what reuse saves; the first rows of each run were repaired"
        elif not self.can_probe(new):
            reason = "too few new rows to ask about; the first rows of each run were repaired"
        else:
            reason = None
        if reason is None:
            return policy
        self.report.reason = reason
        return FirstRows()

    def _probe_pays(self, new: np.ndarray, seams: np.ndarray, fraction: float) -> bool:
        """Whether probe and repair together run fewer rows than a prefill behind the exact prefix would."""
        shifted = self.columns(lambda row: row.kinds == SHIFTED)
        repaired = max(seams.sum(), sum(row.repair_request(fraction).budget for row in self.rows))
        twice = new[np.argmax(shifted) :].sum()  # new rows behind the first moved one run again with the repaired ones
        plain = self.columns(lambda row: row.kinds != EXACT).sum()
        return new.sum() + repaired + twice < plain

    def can_probe(self, new: np.ndarray) -> bool:
        """Whether the last columns of the prompts are new and enough to ask."""
        asked = new[: self.batch.prompt_columns]
        queries = int(np.count_nonzero(asked[-PROBE_QUERIES:]))
        return queries >= MIN_PROBE_QUERIES and bool(asked[-queries:].all())

    def probe(self, model, kwargs: dict, new: np.ndarray) -> np.ndarray | None:
        """
        Run the new rows, without drafts behind the prompt, and read what the last of them attend to; None if no layer
        could be read.
        """
        columns = np.flatnonzero(new[: self.batch.prompt_columns])
        queries = int(np.count_nonzero(new[: self.batch.prompt_columns][-PROBE_QUERIES:]))
        probe = Probe(queries, first_layer=len(self.view.layers) // 2)
        self.logits = self.forward(model, kwargs, columns, probe)
        attention = probe.attention()
        self.attention = None if attention is None else attention.numpy()
        self.mark(new)  # what one prompt of a batch has new here may be a moved row of another, which is final now
        return self.attention

    def watch_rows(self, chosen: np.ndarray) -> None:
        """
        From here on compare the rows of these columns, not yet marked as recomputed, with what takes their place, and
        correct those that stay by it.
        """
        self.watch = RowWatch(np.flatnonzero(chosen), watched_layers(len(self.view.layers)))
        corrections = []
        if self.config.drift:
            for number, row in enumerate(self.rows):
                drift = row.add_drift(chosen[row.pad : row.pad + len(row.ids)])
                batch_rows = range(number * self.batch.group, (number + 1) * self.batch.group)
                corrections.append(DriftCorrection(self.view, drift, row.pad, batch_rows, self.frequencies()))
        self.view.watches = (self.watch, *corrections)

    def select(self, policy, fraction: float, deviation: np.ndarray | None = None) -> np.ndarray:
        """Columns that the policy wants recomputed: bool `[columns]`. `deviation` is `[batch rows, columns]`."""
        chosen = np.zeros(self.batch.columns, dtype=bool)
        for number, row in enumerate(self.rows):
            columns = slice(row.pad, row.pad + len(row.ids))
            seen = self.attention_of(number)
            changed = None if deviation is None else deviation[number * self.batch.group, columns]
            request = row.repair_request(fraction, seen, changed, row.outside_mass())
            if getattr(policy, "needs_attention", False) and (seen is None or not request.spare):
                continue
            positions = _positions(policy, policy.select(request))
            if len(positions) and not (positions.min() >= 0 and positions.max() < len(row.ids)):
                raise ValueError(
                    f"{type(policy).__name__}.select named positions from {positions.min()} to {positions.max()} in a "
                    f"prompt of {len(row.ids)} tokens."
                )
            if len(positions) and not request.shifted[positions].all():
                named = positions[~request.shifted[positions]]
                more = f" and {len(named) - 8} more" if len(named) > 8 else ""
                raise ValueError(
                    f"{type(policy).__name__}.select named rows that are not shifted: {named[:8].tolist()}{more}; "
                    "choose among `request.candidates`."
                )
            chosen[row.pad + positions] = True
        return chosen


def _positions(policy, chosen) -> np.ndarray:
    """What a policy's `select` gave, as int64 `[rows]`; `TypeError` for anything but positions."""
    name = f"{type(policy).__name__}.select"
    try:
        chosen = np.asarray(chosen)
    except ValueError as error:
        raise TypeError(f"{name} must give an array of positions: {error}.") from error
    if chosen.dtype == bool:
        raise TypeError(f"{name} must give positions, got a bool mask; use np.flatnonzero(mask).")
    if chosen.ndim != 1 or (len(chosen) and chosen.dtype.kind not in "iu"):
        raise TypeError(f"{name} must give a 1-D array of integers, got {chosen.dtype} of shape {chosen.shape}.")
    return chosen.astype(np.int64)
