"""The forwards that compute a planned prompt: the probe, the repair, and the arguments of the last pass."""

import time
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from .attention import Probe, open_pass
from .bound.features import FULL
from .capability import Capability, is_compiled
from .drift import DriftCorrection
from .escalation import Escalation
from .filtering import cannot_filter, deviation_of, run_filtered
from .inputs import PromptBatch
from .narrowing import RowWatch
from .prompt import EXACT, SHIFTED, PlannedRow
from .reach import ReachProbe
from .repair import MIN_PROBE_QUERIES, PROBE_QUERIES, FirstRows, fraction_for, preset
from .report import ReuseReport
from .signals import features, watched_layers
from .view import View


class Passes:
    """
    What one first forward of the caller's becomes.

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
        reload (callable): Gathers the moved rows of every prompt anew.
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
    ):
        self.view = view
        self.batch = batch
        self.rows = rows
        self.config = config
        self.capability = capability
        self.chunk = chunk
        self.whole = whole
        self.report = report
        self.rule = rule
        self.trace = trace
        self.frequencies = frequencies
        self.reload = reload
        self.attention: np.ndarray | None = None  # of the probe, [batch rows, columns]
        self.logits: torch.Tensor | None = (
            None  # of the prompt's last token after the newest pass, [batch rows, vocab]
        )
        self.watch: RowWatch | None = None
        self.reach: np.ndarray | None = None  # how far the last pass' rows looked, [batch rows, columns, distances]
        self._reach_probe: ReachProbe | None = None
        self._open = stack

    # -- all passes but the last ----------------------------------------------------------------------------------

    def run(self, model, kwargs: dict) -> dict:
        """Run all passes but the last; return the last one's arguments."""
        new = self.columns(lambda row: row.computed)
        new[0 if self.whole else self.batch.prompt_columns :] = True
        if self.capability.kind == "prefix":
            new[np.argmax(new) :] = True  # such a model is only run on: what follows the first new row is new
        last = new
        if any((row.kinds == SHIFTED).any() for row in self.rows):
            started = time.perf_counter()
            if self.trace is not None or self.config.max_kl is not None:
                last = Escalation(self).run(model, kwargs, new)
            else:
                last = self._repair(model, kwargs, new)
            self.report.timings["repair"] = time.perf_counter() - started
        for row in self.rows:
            row.mark_recomputed(np.flatnonzero(new))  # computed for a neighbour's sake
        self.report.set_spans([row.spans() for row in self.rows])
        return self._last_pass(model, kwargs, np.flatnonzero(last))

    def finish(self, logits: torch.Tensor | None) -> None:
        """The last pass has run and gave `logits`, `[batch, kept, vocabulary]`: say what is to be expected of them."""
        self.view.watches = ()
        read = None if self._reach_probe is None else self._reach_probe.reach()
        if read is not None:
            self.reach = np.full((self.batch.rows, self.batch.columns, read.shape[2]), np.nan, dtype=np.float16)
            self.reach[:, self._reach_probe.columns] = read
        if self.report.level is not None:  # escalation has told what it went by, and a full prefill errs by nothing
            self.report.expected_kl = 0.0 if self.report.level == FULL else self.report.expected_kl
            return
        if self.watch is None and self.logits is None:
            return
        # with drafts behind the prompt, the first token's logits stand before those of the drafts
        drafts = self.batch.columns - self.batch.prompt_columns
        known = logits is not None and logits.dim() == 3 and logits.shape[1] > drafts
        self.predict(logits[:, -1 - drafts].detach() if known else None)

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

    def kept(self, kwargs: dict) -> int:
        """Columns at the end whose logits are needed."""
        asked = kwargs.get("logits_to_keep", 0)
        return asked if isinstance(asked, int) and asked > 0 else 1

    def mark(self, columns: np.ndarray) -> None:
        """These columns, bool `[columns]`, were served and are recomputed."""
        for row in self.rows:
            row.mark_recomputed(np.flatnonzero(columns))

    def restore(self, columns: np.ndarray) -> None:
        """The repair of these columns, bool `[columns]`, is undone: moved rows are as they were served."""
        for row in self.rows:
            row.unmark_recomputed(columns[row.pad : row.pad + len(row.ids)])
        self.reload()

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

    # -- forwards -------------------------------------------------------------------------------------------------

    def forward(
        self,
        model,
        kwargs: dict,
        columns: np.ndarray,
        probe: Probe | None = None,
        explicit_masks: bool = False,
        eager: bool = False,
    ) -> torch.Tensor | None:
        """
        A scattered forward of our own, in chunks if the caller asked for them; gives the last column's logits,
        `[batch, vocabulary]`; `eager`: not compiled. Columns behind a chunk may not have been written yet, and are not
        handed out.
        """
        output = None
        for part in self._chunks(columns):
            reader, total = probe if part[-1] == columns[-1] else None, int(part[-1]) + 1
            with torch.no_grad(), self._placed(model, part, total, reader, explicit_masks):
                # a probe's attention function is not the one that a compiled forward was compiled for
                special = reader is not None or explicit_masks or eager
                forward = torch.compiler.disable(model.forward) if special else model.forward
                output = forward(**self._arguments(kwargs, part, total, last=False))
            self.count(len(part))
        return last_logits(output)

    def count(self, rows: int, share: float = 1.0) -> None:
        """Rows of one forward that the first layer saw; `share` of the layers' work on them was done."""
        self.report.computed_rows += self.batch.rows * rows
        self.report.equivalent_rows += self.batch.rows * rows * share

    def only_kept(self, kwargs: dict) -> np.ndarray:
        """Everything is final: the last pass, bool `[columns]`, only has to give the logits."""
        last = np.zeros(self.batch.columns, dtype=bool)
        last[min(self.batch.columns - self.kept(kwargs), self.batch.prompt_columns - 1) :] = True
        return last

    @contextmanager
    def _placed(
        self, model, columns: np.ndarray, total: int, probe: Probe | None = None, explicit_masks: bool = False
    ):
        """
        Where the forward inside writes its rows: behind those before them, or scattered among them. A probe wants to
        see every key, which a layer with a window hands out to scattered rows only.
        """
        if columns[-1] - columns[0] + 1 == len(columns) and probe is None and not explicit_masks:
            self.view.set_length(int(columns[0]))
            yield
        else:
            with open_pass(model, probe, explicit_masks), self.view.scatter(columns, total):
                yield

    def _last_pass(self, model, kwargs: dict, columns: np.ndarray) -> dict:
        """Arguments of the forward that transformers itself runs; what it needs open stays open until it returns."""
        *before, part = self._chunks(columns)
        for early in before:
            self.forward(model, kwargs, early)
        self.count(len(part))
        if self._keeps_reach(model):
            self._reach_probe = ReachProbe(part, self.batch.pads)
        elif len(part) == self.batch.columns:
            self.view.set_length(0)
            return kwargs
        self._open.enter_context(self._placed(model, part, self.batch.columns, self._reach_probe))
        return self._arguments(kwargs, part, self.batch.columns, last=True)

    def _keeps_reach(self, model) -> bool:
        """Whether the rows of the last pass are asked how far they look."""
        wanted = getattr(self.config.repair, "needs_outside_mass", False) and self.config.store
        return wanted and self.capability.reads_attention and not is_compiled(model)

    def _chunks(self, columns: np.ndarray) -> list[np.ndarray]:
        if not self.chunk or len(columns) <= self.chunk:
            return [columns]
        return np.array_split(columns, range(self.chunk, len(columns), self.chunk))

    def _arguments(self, kwargs: dict, columns: np.ndarray, total: int, last: bool) -> dict:
        """The call's arguments for some of its columns. A 2-D mask speaks of keys: of the `total` handed-out ones."""
        ids = kwargs["input_ids"]
        index = torch.from_numpy(columns).to(ids.device)
        changed = {**kwargs, "input_ids": ids.index_select(1, index)}
        if self.capability.takes_positions:
            positions = kwargs.get("position_ids")
            if positions is None:
                counted = np.maximum(np.arange(self.batch.columns) - self.batch.pads[:, None], 0)
                positions = torch.from_numpy(counted).to(ids.device)
            changed["position_ids"] = positions.index_select(1, index)
        mask = kwargs.get("attention_mask")
        if mask is not None:
            changed["attention_mask"] = mask[:, :total]
        elif self.view.slots is not None and self.capability.takes_mask:
            # some models make up a mask of as many ones as they count keys, which scattered rows they can't
            changed["attention_mask"] = ids.new_ones(ids.shape[0], total)
        if kwargs.get("token_type_ids") is not None:
            changed["token_type_ids"] = kwargs["token_type_ids"].index_select(1, index)
        if not last and "logits_to_keep" in kwargs:
            changed["logits_to_keep"] = 1
        return changed


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


def last_logits(output) -> torch.Tensor | None:
    """The last column's logits of a forward's output, `[batch, vocabulary]`, if it has any."""
    logits = logits_of(output)
    return None if logits is None else logits[:, -1].detach()


def logits_of(output) -> torch.Tensor | None:
    """Logits of a forward's output, `[batch, columns, vocabulary]`: an output object, or a tuple that begins so."""
    logits = output[0] if isinstance(output, tuple) and output else getattr(output, "logits", None)
    return logits if isinstance(logits, torch.Tensor) and logits.dim() == 3 else None
