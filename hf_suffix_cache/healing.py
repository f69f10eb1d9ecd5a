"""Approximate rows of a prompt that are recomputed along with each decoded token, in the same forward."""

from contextlib import ExitStack

import numpy as np
import torch

from .attention import Probe, open_pass
from .capability import Capability, is_compiled
from .prompt import CARRIED, SHIFTED, PlannedRow
from .view import View

UNHEALED = "rows were decoded without healing"
DECAY = 0.875  # of what earlier tokens attended to: about the newest eight count


class Healer:
    """
    Heals one sequence while it is decoded: the forward of a new token also runs `num_rows` rows at their own columns.

    Rows run from left to right end exact: behind exact rows, in one forward with those before them, they are what a
    full prefill gives. Once the rows have caught up with the newest token, so is every further one. Rows that are
    chosen by attention stand behind approximate ones mostly: they come closer, and stay derived.

    Args:
        view (`View`): Holds the sequence. None of its rows from the first approximate one on may be stored memory.
        row (`PlannedRow`): The prompt, after its prefill.
        capability (`Capability`): What the model can do.
        num_rows (`int`): Rows to heal with each token.
        order (`str`): `"left"`: from left to right; `"attention"`: the approximate prompt rows that the newest tokens
            attend to most come first, then the rest from left to right.
    """

    def __init__(self, view: View, row: PlannedRow, capability: Capability, num_rows: int, order: str):
        self.view = view
        self.capability = capability
        self.num_rows = num_rows
        self.exact = row.pad + row.exact  # columns before the first row that is not exact
        self.num_healed = 0
        self._pad = row.pad
        self._healed = np.zeros(row.pad + len(row.ids), dtype=bool)
        approximate = (row.kinds == CARRIED) | (row.kinds == SHIFTED) | row.partial
        self._wanted = np.concatenate([np.zeros(row.pad, dtype=bool), approximate & (order == "attention")])
        self._seen = np.zeros(len(self._wanted))  # attention of the newest tokens to each prompt column
        self._probe: Probe | None = None
        self._columns = np.empty(0, dtype=np.int64)
        self._new = 0

    def stop(self) -> None:
        """Heal nothing more. What has been healed stays."""
        self.num_rows = 0

    def prepare(self, model, kwargs: dict, stack: ExitStack) -> dict:
        """
        The arguments of a later forward with the rows to heal before its token, `[1, num_rows + 1]`. What the forward
        needs open goes on `stack`. A forward of several tokens (drafts) is left as it is.
        """
        self._new = self.view.get_seq_length()
        self.exact = min(self.exact, self._new)  # rejected drafts may have been cropped
        heals = self.num_rows > 0 and self.exact < self._new and tuple(kwargs["input_ids"].shape) == (1, 1)
        self._columns = self._choose() if heals else np.empty(0, dtype=np.int64)
        self._probe = Probe(1, len(self.view.layers) // 2) if heals and self._wanted.any() else None
        if len(self._columns) == 0 and self._probe is None:
            return kwargs
        columns = np.append(self._columns, self._new)
        stack.enter_context(open_pass(model, self._probe))
        stack.enter_context(self.view.scatter(columns, self._new + 1))
        return self._arguments(kwargs, columns)

    def forwarded(self) -> None:
        """That forward has come to its end: its rows are healed."""
        self.num_healed += len(self._columns)
        in_prompt = self._columns[self._columns < len(self._healed)]
        self._healed[in_prompt] = True
        self._wanted[in_prompt] = False
        run = np.append(self._columns, np.arange(self._new, self.view.get_seq_length()))
        run = run[run >= self.exact]
        behind_exact = run == self.exact + np.arange(len(run))
        self.exact += len(run) if behind_exact.all() else int(np.argmin(behind_exact))
        if self._probe is not None:
            attention = self._probe.attention()
            if attention is None:
                self._wanted[:] = False  # nothing to go by after all: from left to right then
            else:
                self._seen = DECAY * self._seen + attention[0, : len(self._seen)].numpy()

    @property
    def healed(self) -> np.ndarray:
        """Prompt columns that were healed, ascending."""
        return np.flatnonzero(self._healed)

    def _choose(self) -> np.ndarray:
        """Columns to heal with the next token, ascending."""
        wanted = np.flatnonzero(self._wanted)
        if len(wanted) == 0:
            return np.arange(self.exact, min(self.exact + self.num_rows, self._new))
        if not self._seen.any():
            return wanted[:0]  # the first forward only reads
        return np.sort(wanted[np.argsort(-self._seen[wanted], kind="stable")[: self.num_rows]])

    def _arguments(self, kwargs: dict, columns: np.ndarray) -> dict:
        fed = self.view.fed
        fed[:] = [torch.cat(fed, dim=1)]
        ids = fed[0]
        index = torch.from_numpy(columns).to(ids.device)
        changed = {**kwargs, "input_ids": ids.index_select(1, index)}
        if self.capability.takes_positions:
            changed["position_ids"] = (index - self._pad)[None]
        if kwargs.get("attention_mask") is None and self.capability.takes_mask:
            # some models make up a mask of as many ones as they count keys, which scattered rows they can't
            changed["attention_mask"] = ids.new_ones(1, self._new + 1)
        if kwargs.get("token_type_ids") is not None:
            changed["token_type_ids"] = torch.zeros_like(changed["input_ids"])
        return changed


def make_healer(
    model, view: View, rows: list[PlannedRow], capability: Capability, config, chunk: int | None
) -> tuple[Healer | None, str | None]:
    """What heals a call's rows, or None where they can't be; and what there is to say about that, one sentence."""
    if all(row.exact == len(row.ids) for row in rows):
        return None, None
    if view.extent.batch > 1:
        return None, f"{UNHEALED}: batches and beams run the same columns of every row"
    if capability.length_dependent:
        return None, f"{UNHEALED}: the rotary frequencies depend on the length of the text"
    if chunk == 1:
        return None, f"{UNHEALED}: prefill_chunk_size=1 leaves room for the new token alone"
    if is_compiled(model):
        return None, f"{UNHEALED}: the model is compiled, and other shapes than a token's would be compiled anew"
    num_rows, order, remark = min(config.heal_rows, chunk - 1) if chunk else config.heal_rows, config.heal_order, None
    if order == "attention" and not capability.reads_attention:
        order, remark = "left", "the model's attention can't be read: rows were healed from left to right"
    return Healer(view, rows[0], capability, num_rows, order), remark
