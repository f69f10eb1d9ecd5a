"""One call from its prompt to its commit: plan, materialise, probe, repair, and what is stored afterwards."""

import logging
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from .attention import Probe, open_pass
from .inputs import PromptBatch, Refused, describe_plain, read_inputs
from .prompt import EXACT, SHIFTED, PlannedRow
from .repair import MIN_PROBE_QUERIES, PROBE_QUERIES, FirstRows, preset
from .report import ReuseReport
from .store.store import Draft
from .view import View

logger = logging.getLogger("hf_suffix_cache")

GENERATION_ROWS = 64  # room for generated tokens where the call does not say how many it wants
MAX_GENERATION_ROWS = 4096


class Request:
    """
    What one `generate` call, or one plain forward under `attach`, does with its view.

    Args:
        view (`View`): The cache that the call was given.
        config (`SuffixCacheConfig`): Settings of this call.
        frequencies (callable): Gives the model's live rotary frequencies by `RotarySpec`.
        prompt_columns (`int`, *optional*): Columns of the caller's prompt; what follows are drafts.
        caller_rows (`int`, *optional*): Batch rows of the caller's; beams and return sequences multiply them.
        new_tokens (`int`, *optional*): Tokens that the call may generate.
        stops (`set[int]`): Ids that end a sequence; `pad` (`int`, *optional*) fills finished ones.
        chunk (`int`, *optional*): Rows that one forward may run (`prefill_chunk_size`).
        keep_last (`int`, *optional*): Rows whose logits are needed; None: what the forward's `logits_to_keep` says.
        store_answer (`bool`): Whether generated rows may be stored (beams' rows may not).
        capability_rows (`int`): Rows that were run to measure the model.
    """

    def __init__(
        self,
        view: View,
        config,
        frequencies,
        *,
        prompt_columns=None,
        caller_rows=None,
        new_tokens=None,
        stops=frozenset(),
        pad=None,
        chunk=None,
        keep_last=None,
        store_answer=True,
        capability_rows=0,
    ):
        self.view = view
        self.config = config
        self.frequencies = frequencies
        self.prompt_columns = prompt_columns
        self.caller_rows = caller_rows
        self.new_tokens = new_tokens
        self.stops = stops
        self.pad = pad
        self.chunk = chunk
        self.keep_last = keep_last
        self.store_answer = store_answer
        self.rows: list[PlannedRow] = []
        self.state = "waiting"
        self.report = ReuseReport(capability_rows=capability_rows)
        self.started = time.perf_counter()
        self._passes = ExitStack()
        self._adopted = None
        self.batch: PromptBatch | None = None
        view.request = self

    # -- the first forward --------------------------------------------------------------------------------------

    def prefill(self, model, kwargs: dict) -> dict:
        """Called before the first forward with its arguments; returns the arguments of the last pass."""
        self.state = "prefill"
        try:
            self.batch = read_inputs(kwargs, self.prompt_columns, self.caller_rows)
        except Refused as refusal:
            return self._plain(kwargs, str(refusal))
        self.view.group, self.view.prompt_columns = self.batch.group, self.batch.prompt_columns
        try:
            self._plan(kwargs)
            self._materialise()
        except Exception as error:  # never half a view: whatever failed, this call prefills as if nothing was stored
            logger.warning("reuse failed, this call runs a full prefill", exc_info=True)
            self._drop_plan()
            return self._plain(kwargs, f"reuse failed: {type(error).__name__}: {error}")
        return self._run(model, kwargs)

    def prefilled(self) -> None:
        """Called after the first forward, also when it raised."""
        self._passes.close()
        if self.state == "prefill":
            self.state = "decoding"
            self.report.timings["first_token"] = time.perf_counter() - self.started

    def _plain(self, kwargs: dict, reason: str) -> dict:
        """A full prefill through the empty view, not stored."""
        self.report.reason = reason
        self.rows = []
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        self.report.computed_rows = tokens.shape[0] * tokens.shape[1]
        describe_plain(self.report, tokens, kwargs.get("attention_mask"), self.caller_rows)
        return kwargs

    def _plan(self, kwargs: dict) -> None:
        """Plan each prompt of the caller's."""
        asked = kwargs.get("logits_to_keep", 0)
        keep_last = self.keep_last
        if isinstance(asked, int) and asked > 0:
            keep_last = max(asked - (self.batch.columns - self.batch.prompt_columns), keep_last or 1, 1)
        started = time.perf_counter()
        lookup = 0.0
        view, config = self.view, self.config
        with view.store.lock:
            for row in range(0, self.batch.rows, self.batch.group):
                pad = int(self.batch.pads[row])
                ids = self.batch.ids[row, pad : self.batch.prompt_columns]
                before = time.perf_counter()
                match = view.shelf.match(ids)
                lookup += time.perf_counter() - before

                def find_runs(first, ids=ids):
                    nonlocal lookup
                    before = time.perf_counter()
                    runs = view.shelf.runs(ids, first, config.min_match_tokens)
                    lookup += time.perf_counter() - before
                    return runs

                planned = PlannedRow.make(ids, pad, match, find_runs, keep_last or len(ids), config)
                view.shelf.pin(planned.segments())
                self.rows.append(planned)
                self._touch(planned)
        if keep_last is None and self.report.reason is None:
            self.report.reason = "the logits of every token were asked for, so every row runs; see `logits_to_keep`"
        self.report.prompt_tokens = sum(len(row.ids) for row in self.rows)
        self.report.timings["lookup"] = lookup
        self.report.timings["plan"] = time.perf_counter() - started - lookup

    def _touch(self, planned: PlannedRow) -> None:
        now = self.view.store.clock()
        for segment in planned.segments():
            segment.last_used = now
        if planned.prefix_sequence is not None:
            planned.prefix_sequence.last_used = now

    def _materialise(self) -> None:
        """Bring every served row into the view's extent: in place where the conversation simply goes on."""
        started = time.perf_counter()
        view, store = self.view, self.view.store
        room = min(self.new_tokens or GENERATION_ROWS, MAX_GENERATION_ROWS)
        with store.lock:
            extent, in_place = None, 0
            row = self.rows[0]
            sequence = row.prefix_sequence
            whole = sequence is not None and row.prefix_length == len(sequence.ids)
            columns, rows = self.batch.columns + room, self.batch.rows
            if whole and rows == 1 and row.pad == 0:
                extent = store.adopt(view.shelf, sequence, columns)
                self._adopted = sequence if extent is not None else None
                in_place = row.prefix_length if extent is not None else 0
            view.lay_over(extent if extent is not None else store.allocate(view.shelf, columns, rows))
            frequencies = self.frequencies()
            for number in range(self.batch.rows):
                self._load(number, self.rows[number // self.batch.group], in_place, frequencies)
        self.report.timings["materialise"] = time.perf_counter() - started

    def _load(self, number: int, planned: PlannedRow, in_place: int, frequencies) -> None:
        extent = self.view.extent
        if planned.pad:
            # masked, but a product with memory that was never written could be NaN
            start = extent.start + number * extent.rows
            extent.slab.fill(start, start + planned.pad, 0.0)
        served = np.flatnonzero(~planned.computed)
        served = served[served >= in_place]
        if len(served):
            addresses = planned.served.addresses_of(served)
            self.view.shelf.pool.copy_rows(
                addresses, extent, number, planned.pad + served, planned.served.shift[served], frequencies
            )

    def _drop_plan(self) -> None:
        """Back to an empty view."""
        with self.view.store.lock:
            for row in self.rows:
                self.view.shelf.unpin(row.segments())
            self.rows = []
            self._give_back()
        self.view.close()

    def _give_back(self) -> None:
        if self._adopted is not None:
            self._adopted.busy = False
            self._adopted = None

    # -- passes -------------------------------------------------------------------------------------------------

    def _run(self, model, kwargs: dict) -> dict:
        """Run all passes but the last; return the last one's arguments."""
        new = self._columns(lambda row: row.computed)
        new[self.batch.prompt_columns :] = True
        seams = self._columns(lambda row: row.seams)
        chosen = np.zeros_like(new)
        last = new
        if any((row.kinds == SHIFTED).any() for row in self.rows):
            started = time.perf_counter()
            policy, fraction = preset(self.config.fidelity, self.config.repair, self.config.repair_fraction)
            probed, attention = False, None
            if policy.needs_attention and not self._probe_pays(new, seams, fraction):
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
            reader = probe if part[-1] == columns[-1] else None
            with torch.no_grad(), open_pass(model, reader), self.view.scatter(part, int(part[-1]) + 1):
                model.forward(**self._arguments(kwargs, part, last=False))
            self.report.computed_rows += self.batch.rows * len(part)

    def _last_pass(self, model, kwargs: dict, columns: np.ndarray) -> dict:
        """Arguments of the forward that transformers itself runs; what it needs open stays open until it returns."""
        *before, part = self._chunks(columns)
        for early in before:
            self._forward(model, kwargs, early)
        self.report.computed_rows += self.batch.rows * len(part)
        contiguous = part[-1] - part[0] + 1 == len(part) and part[-1] == self.batch.columns - 1
        self.view.set_length(int(part[0]) if contiguous else 0)
        if contiguous and part[0] == 0:
            return kwargs
        if not contiguous:
            self._passes.enter_context(open_pass(model))
            self._passes.enter_context(self.view.scatter(part, self.batch.columns))
        return self._arguments(kwargs, part, last=True)

    def _chunks(self, columns: np.ndarray) -> list[np.ndarray]:
        if not self.chunk or len(columns) <= self.chunk:
            return [columns]
        return np.array_split(columns, range(self.chunk, len(columns), self.chunk))

    def _arguments(self, kwargs: dict, columns: np.ndarray, last: bool) -> dict:
        """The call's arguments for some of its columns. A 2-D mask stays whole: it speaks of keys."""
        ids = kwargs["input_ids"]
        index = torch.from_numpy(columns).to(ids.device)
        positions = kwargs.get("position_ids")
        if positions is None:
            counted = np.maximum(np.arange(self.batch.columns) - self.batch.pads[:, None], 0)
            positions = torch.from_numpy(counted).to(ids.device)
        changed = {**kwargs, "input_ids": ids.index_select(1, index), "position_ids": positions.index_select(1, index)}
        if kwargs.get("token_type_ids") is not None:
            changed["token_type_ids"] = kwargs["token_type_ids"].index_select(1, index)
        if not last and "logits_to_keep" in kwargs:
            changed["logits_to_keep"] = 1
        return changed

    # -- the end ------------------------------------------------------------------------------------------------

    def finish(self, handed_out: bool = False) -> None:
        """The call returned: store what is worth it, let go of the rest."""
        if self.state == "closed":
            return
        view = self.view
        tokens = torch.cat(view.fed, dim=1).cpu().numpy() if view.fed else np.empty((0, 0), dtype=np.int64)
        whole = tokens.shape[1] == view.get_seq_length() and not view.altered
        with view.store.lock:
            self._give_back()
            try:
                if self.rows and whole:
                    self._commit(tokens, handed_out)
            except Exception:  # the answer is there and right: a fault in storing must not take it from the caller
                logger.warning("storing failed: the rows of this model are forgotten", exc_info=True)
                view.store.drop(view.shelf)
            self._close(handed_out)
        self.report.timings["total"] = time.perf_counter() - self.started

    def _commit(self, tokens: np.ndarray, handed_out: bool) -> None:
        """Store each row of `tokens`, `[batch, columns]`, all that was fed to the model."""
        frequencies = self.frequencies()
        for number in range(len(tokens)):
            if self.store_answer or number % self.batch.group == 0:
                draft = self._draft(number, tokens[number])
                self.view.store.commit(self.view.shelf, draft, frequencies, handed_out)

    def abort(self) -> None:
        """The call failed: nothing is stored, everything is let go."""
        if self.state == "closed":
            return
        with self.view.store.lock:
            self._give_back()
            self._close(handed_out=False)

    def _close(self, handed_out: bool) -> None:
        self.state = "closed"
        self._passes.close()
        for row in self.rows:
            self.view.shelf.unpin(row.segments())
        # a cycle, or the frequencies' hold on the model, would keep both alive until a garbage collection
        self.view.request = self.frequencies = None
        if handed_out:
            self.view.hand_out()
        else:
            self.view.close()

    def _draft(self, number: int, tokens: np.ndarray) -> Draft:
        row = self.rows[number // self.batch.group]
        stop = self._end(tokens) if self.store_answer else min(self.batch.prompt_columns, len(tokens))
        ids = tokens[row.pad : stop].astype(np.int64)
        recipe = row.recipe()
        extra = len(ids) - len(recipe)
        if extra > 0:
            zeros = np.zeros(extra, dtype=np.int64)
            which = np.concatenate([recipe.which, np.full(extra, -1, dtype=np.int32)])
            recipe.which, recipe.offset = which, np.concatenate([recipe.offset, zeros])
            recipe.shift = np.concatenate([recipe.shift, zeros])
        exact = len(ids) if row.exact == len(row.ids) else row.exact
        hops = 0 if exact == len(ids) else row.hops
        return Draft(ids, len(row.ids), recipe, exact, hops, self.view.extent, number, row.pad)

    def _end(self, tokens: np.ndarray) -> int:
        """Columns up to the end of the sequence: its first stop token, or what fills a finished row."""
        answer = tokens[self.batch.prompt_columns :]
        ended = np.flatnonzero(np.isin(answer, list(self.stops)))
        if len(ended):
            return self.batch.prompt_columns + int(ended[0]) + 1
        filled = np.flatnonzero(answer == self.pad) if self.pad is not None else []
        return self.batch.prompt_columns + int(filled[0]) if len(filled) else len(tokens)


@contextmanager
def closing(request: Request):
    """Abort the request if the block raises anything at all, KeyboardInterrupt included."""
    try:
        yield request
    except BaseException:
        request.abort()
        raise
