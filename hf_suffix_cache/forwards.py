"""The forwards of a planned prompt: their arguments, where their rows go, and the pieces that they run in."""

from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from .attention import Probe, open_pass
from .capability import Capability, is_compiled
from .inputs import PromptBatch
from .reach import ReachProbe
from .repair import PROBE_QUERIES
from .report import ReuseReport
from .view import View

MASK_BYTES = 64 << 20  # largest mask of one forward ...
MASK_ENTRY = 4  # ... bytes of one query and key in it: sdpa makes floats of a bool mask


class Forwards:
    """
    Runs some columns of a batch, and counts them.

    Args:
        view (`View`): Holds the served rows, of exactly the batch rows of `batch`.
        batch (`PromptBatch`): The prompts.
        config (`SuffixCacheConfig`), capability (`Capability`): Of this call and its model.
        chunk (`int`, *optional*): Rows that one forward may run (`prefill_chunk_size`).
        report (`ReuseReport`): Counts the rows that run.
        stack (`ExitStack`): What the last pass needs open; the request closes it when that forward returns.
    """

    def __init__(
        self,
        view: View,
        batch: PromptBatch,
        config,
        capability: Capability,
        chunk: int | None,
        report: ReuseReport,
        stack: ExitStack,
    ):
        self.view = view
        self.batch = batch
        self.config = config
        self.capability = capability
        self.chunk = chunk
        self.report = report
        self._reach_probes: list[ReachProbe] = []
        self._open = stack

    def forward(
        self,
        model,
        kwargs: dict,
        columns: np.ndarray,
        probe: Probe | None = None,
        explicit_masks: bool = False,
        eager: bool = False,
        final: bool = False,
    ) -> torch.Tensor | None:
        """
        A scattered forward of our own, in pieces where its mask would be too large or the caller asked for chunks;
        gives the last column's logits, `[batch, vocabulary]`. Columns behind a piece may not have been written yet,
        and are not handed out.

        Args:
            probe (`Probe`, *optional*): Reads the last piece.
            explicit_masks (`bool`): Whether masks must be tensors; such a forward is never cut.
            eager (`bool`): Not compiled.
            final (`bool`): Whether these rows stay as this forward leaves them, so that their reach may be kept.
        """
        output = None
        reads_reach = final and probe is None and self._keeps_reach(model)
        end = min(PROBE_QUERIES, self.chunk or PROBE_QUERIES)
        for part in [columns] if explicit_masks else self.pieces(columns, end):
            reader, total = probe if part[-1] == columns[-1] else None, int(part[-1]) + 1
            if reads_reach:
                reader = self._read_reach(part)
            with torch.no_grad(), self._placed(model, part, total, reader, explicit_masks):
                # a probe's attention function is not the one that a compiled forward was compiled for
                special = reader is not None or explicit_masks or eager
                forward = torch.compiler.disable(model.forward) if special else model.forward
                output = forward(**self._arguments(kwargs, part, total, last=False))
            self.count(len(part))
        return last_logits(output)

    def last_pass(self, model, kwargs: dict, columns: np.ndarray) -> dict:
        """
        Arguments of the forward that transformers itself runs, the last piece of these columns; what it needs open
        stays open until it returns.
        """
        whole = len(columns) == self.batch.columns
        if whole and not self.chunk:
            part = columns  # as stock runs it, also its masks
        else:
            *before, part = self.pieces(columns, int(self.only_kept(kwargs).sum()))
            for early in before:
                self.forward(model, kwargs, early, final=True)
        self.count(len(part))
        reader = self._read_reach(part) if self._keeps_reach(model) else None
        if reader is None and len(part) == self.batch.columns:
            self.view.set_length(0)
            return kwargs
        self._open.enter_context(self._placed(model, part, self.batch.columns, reader))
        return self._arguments(kwargs, part, self.batch.columns, last=True)

    def count(self, rows: int, share: float = 1.0) -> None:
        """Rows of one forward that the first layer saw; `share` of the layers' work on them was done."""
        self.report.computed_rows += self.batch.rows * rows
        self.report.equivalent_rows += self.batch.rows * rows * share

    def kept(self, kwargs: dict) -> int:
        """Columns at the end whose logits are needed."""
        asked = kwargs.get("logits_to_keep", 0)
        return asked if isinstance(asked, int) and asked > 0 else 1

    def only_kept(self, kwargs: dict) -> np.ndarray:
        """Everything is final: the last pass, bool `[columns]`, only has to give the logits."""
        last = np.zeros(self.batch.columns, dtype=bool)
        last[min(self.batch.columns - self.kept(kwargs), self.batch.prompt_columns - 1) :] = True
        return last

    def mask_fits(self, rows: int) -> bool:
        """Whether the mask of a forward of so many rows stays below the limit."""
        return self.batch.rows * rows * self.batch.columns * MASK_ENTRY <= MASK_BYTES

    def pieces(self, columns: np.ndarray, end: int) -> list[np.ndarray]:
        """
        The columns of one forward, cut into forwards of nearly equal size that run one after the other. The last one
        has the last `end` columns, whose logits or attention are wanted together.
        """
        most = self.chunk or len(columns)
        # frequencies that depend on the length are those of the longest text in a forward, so it can't be cut
        if not self.mask_fits(most) and not self.capability.length_dependent:
            most = max(1, MASK_BYTES // (self.batch.rows * self.batch.columns * MASK_ENTRY))
        if len(columns) <= most:
            return [columns]
        count = -(-len(columns) // most)
        borders = np.arange(1, count) * len(columns) // count
        borders = np.minimum(borders, max(0, len(columns) - end))
        return [part for part in np.split(columns, borders) if len(part)]

    @property
    def reach(self) -> np.ndarray | None:
        """How far the rows that were last run looked, `[batch rows, columns, distances]`; None if none was read."""
        found = None
        for probe in self._reach_probes:
            read = probe.reach()
            if read is None:
                continue
            if found is None:
                found = np.full((self.batch.rows, self.batch.columns, read.shape[2]), np.nan, dtype=np.float16)
            found[:, probe.columns] = read
        return found

    def _read_reach(self, columns: np.ndarray) -> ReachProbe:
        self._reach_probes.append(ReachProbe(columns, self.batch.pads))
        return self._reach_probes[-1]

    def _keeps_reach(self, model) -> bool:
        """Whether rows are asked how far they look."""
        wanted = getattr(self.config.repair, "needs_outside_mass", False) and self.config.store
        return wanted and self.capability.reads_attention and not is_compiled(model)

    @contextmanager
    def _placed(
        self, model, columns: np.ndarray, total: int, probe: Probe | None = None, explicit_masks: bool = False
    ):
        """
        Where the forward inside writes its rows: behind those before them, or scattered among them. A probe wants to
        see every key, which a layer with a window hands out to scattered rows only.
        """
        known = {}
        if self.capability.reads_attention and not explicit_masks:  # else rows may leave, and columns be others
            known = {"columns": columns, "total": total, "pads": self.batch.pads}
        if columns[-1] - columns[0] + 1 == len(columns) and probe is None and not explicit_masks:
            self.view.set_length(int(columns[0]))
            with open_pass(model, **known):
                yield
        else:
            with open_pass(model, probe, explicit_masks, **known), self.view.scatter(columns, total):
                yield

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


def last_logits(output) -> torch.Tensor | None:
    """The last column's logits of a forward's output, `[batch, vocabulary]`, if it has any."""
    logits = logits_of(output)
    return None if logits is None else logits[:, -1].detach()


def logits_of(output) -> torch.Tensor | None:
    """Logits of a forward's output, `[batch, columns, vocabulary]`: an output object, or a tuple that begins so."""
    logits = output[0] if isinstance(output, tuple) and output else getattr(output, "logits", None)
    return logits if isinstance(logits, torch.Tensor) and logits.dim() == 3 else None
