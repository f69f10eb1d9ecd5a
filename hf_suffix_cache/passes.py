"""The forwards that compute a planned prompt: the probe, the repair, and the arguments of the last pass."""

import time
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from .attention import Probe, open_pass
from .capability import Capability
from .inputs import PromptBatch
from .prompt import EXACT, SHIFTED, PlannedRow
from .repair import MIN_PROBE_QUERIES, PROBE_QUERIES, FirstRows, preset
from .report import ReuseReport
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
    ):
        self.view = view
        self.batch = batch
        self.rows = rows
        self.config = config
        self.capability = capability
        self.chunk = chunk
        self.whole = whole
        self.report = report
        self._open = stack

    def run(self, model, kwargs: dict) -> dict:
        """Run all passes but the last; return the last one's arguments."""
        new = self._columns(lambda row: row.computed)
        new[0 if self.whole else self.batch.prompt_columns :] = True
        if self.capability.kind == "prefix":
            new[np.argmax(new) :] = True  # such a model is only run on: what follows the first new row is new
        seams = self._columns(lambda row: row.seams)
        chosen = np.zeros_like(new)
        last = new
        if any((row.kinds == SHIFTED).any() for row in self.rows):
            started = time.perf_counter()
            policy, fraction = preset(self.config.fidelity, self.config.repair, self.config.repair_fraction)
            probed, attention = False, None
            if policy.needs_attention and not self.capability.reads_attention:
                self.report.reason = "the model's attention can't be read: the first rows of each run were repaired"
                policy = FirstRows()
            elif policy.needs_attention and not self._probe_pays(new, seams, fraction):
                self.report.reason = "a probe would cost what reuse saves; the first rows of each run were repaired"
                policy = FirstRows()
            elif policy.needs_attention and (fraction > 0 or seams.any()):
                policy, probed, attention = self._probe(model, kwargs, new, policy)
            chosen = seams | self._select(policy, fraction, attention)
            last = new | chosen
            if probed:
                # rows left of the first repaired one are final already; the answer's logits come from this pass
                first = np.argmax(chosen) if chosen.any() else self.batch.columns - self._kept(kwargs)
                last[:first] = False
            self.report.timings["repair"] = time.perf_counter() - started
        for row in self.rows:
            # chosen for repair, or computed for a neighbour's sake: one forward runs the same columns of every row
            row.mark_recomputed(np.flatnonzero(new | chosen))
        self.report.set_spans([row.spans() for row in self.rows])
        return self._last_pass(model, kwargs, np.flatnonzero(last))

    def _columns(self, of_row) -> np.ndarray:
        """Union over the prompts: bool `[columns]`. One forward runs the same columns of every batch row."""
        union = np.zeros(self.batch.columns, dtype=bool)
        for row in self.rows:
            union[row.pad : row.pad + len(row.ids)] |= of_row(row)
        return union

    def _probe_pays(self, new: np.ndarray, seams: np.ndarray, fraction: float) -> bool:
        """Whether probe and repair together run fewer rows than a prefill behind the exact prefix would."""
        shifted = self._columns(lambda row: row.kinds == SHIFTED)
        repaired = max(seams.sum(), sum(row.repair_request(fraction, None).budget for row in self.rows))
        twice = new[np.argmax(shifted) :].sum()  # new rows behind the first moved one run again with the repaired ones
        plain = self._columns(lambda row: row.kinds != EXACT).sum()
        return new.sum() + repaired + twice < plain

    def _kept(self, kwargs: dict) -> int:
        asked = kwargs.get("logits_to_keep", 0)
        return asked if isinstance(asked, int) and asked > 0 else 1

    def _probe(self, model, kwargs: dict, new: np.ndarray, policy):
        """Run the new rows and read what the last of them attend to: (policy, whether rows ran, attention or None)."""
        columns = np.flatnonzero(new)
        queries = int(np.count_nonzero(new[-PROBE_QUERIES:]))
        if queries < MIN_PROBE_QUERIES or not new[-queries:].all():
            self.report.reason = "too few new rows to ask about; the first rows of each run were repaired"
            return FirstRows(), False, None
        probe = Probe(queries, first_layer=len(self.view.layers) // 2)
        self._forward(model, kwargs, columns, probe)
        attention = probe.attention()
        if attention is None:
            self.report.reason = "the model's attention can't be read: the first rows of each run were repaired"
            return FirstRows(), True, None
        return policy, True, attention.numpy()

    def _select(self, policy, fraction: float, attention) -> np.ndarray:
        """Columns that the policy wants recomputed: bool `[columns]`."""
        chosen = np.zeros(self.batch.columns, dtype=bool)
        for number, row in enumerate(self.rows):
            columns = slice(row.pad, row.pad + len(row.ids))
            seen = None if attention is None else attention[number * self.batch.group, columns]
            request = row.repair_request(fraction, seen)
            if policy.needs_attention and (seen is None or not request.spare):
                continue
            positions = np.asarray(policy.select(request), dtype=np.int64)
            if len(positions) and not (positions.min() >= 0 and positions.max() < len(row.ids)):
                raise ValueError(
                    f"{type(policy).__name__}.select named positions from {positions.min()} to {positions.max()} in a "
                    f"prompt of {len(row.ids)} tokens."
                )
            if len(positions) and not request.shifted[positions].all():
                named = positions[~request.shifted[positions]].tolist()
                raise ValueError(f"{type(policy).__name__}.select named rows that are not shifted: {named}.")
            chosen[row.pad + positions] = True
        return chosen

    def _forward(self, model, kwargs: dict, columns: np.ndarray, probe: Probe | None = None) -> None:
        """
        A scattered forward whose output nobody needs, in chunks if the caller asked for them. Columns behind a chunk
        may not have been written yet, and are not handed out.
        """
        for part in self._chunks(columns):
            reader, total = probe if part[-1] == columns[-1] else None, int(part[-1]) + 1
            with torch.no_grad(), self._placed(model, part, total, reader):
                # a probe's attention function is not the one that a compiled forward was compiled for
                forward = model.forward if reader is None else torch.compiler.disable(model.forward)
                forward(**self._arguments(kwargs, part, total, last=False))
            self.report.computed_rows += self.batch.rows * len(part)

    @contextmanager
    def _placed(self, model, columns: np.ndarray, total: int, probe: Probe | None = None):
        """
        Where the forward inside writes its rows: behind those before them, or scattered among them. A probe wants to
        see every key, which a layer with a window hands out to scattered rows only.
        """
        if columns[-1] - columns[0] + 1 == len(columns) and probe is None:
            self.view.set_length(int(columns[0]))
            yield
        else:
            with open_pass(model, probe), self.view.scatter(columns, total):
                yield

    def _last_pass(self, model, kwargs: dict, columns: np.ndarray) -> dict:
        """Arguments of the forward that transformers itself runs; what it needs open stays open until it returns."""
        *before, part = self._chunks(columns)
        for early in before:
            self._forward(model, kwargs, early)
        self.report.computed_rows += self.batch.rows * len(part)
        if len(part) == self.batch.columns:
            self.view.set_length(0)
            return kwargs
        self._open.enter_context(self._placed(model, part, self.batch.columns))
        return self._arguments(kwargs, part, self.batch.columns, last=True)

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
