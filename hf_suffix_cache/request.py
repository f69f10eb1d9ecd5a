"""One call from its prompt to its commit: plan, materialise, run, and what is stored afterwards."""

import logging
import threading
import time
from contextlib import ExitStack, nullcontext

import numpy as np
import torch

from .drafting import store_rows
from .healing import UNHEALED, Healer, make_healer
from .inputs import ContradictoryInputs, PromptBatch, Refused, defaults_of, describe_plain, read_inputs
from .loading import load, read_files, reload_moved
from .passes import Passes, logits_of
from .prompt import CARRIED, PlannedRow
from .report import ReuseReport
from .store.files import DamagedFile
from .store.reading import Reading
from .store.scopes import Place
from .store.shelf import Sequence
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
        capability (`Capability`): What the model can do.
        capability_rows (`int`): Rows that were run to measure it now.
        regimes (`RotaryRegimes`, *optional*): Given where rotary frequencies depend on the length of the text.
        same_model (callable): Whether the model still computes as it did when the request was opened.
        watch (`bool`): Whether code of the caller's runs between the forwards, so that `same_model` is asked for each.
        adopt (`bool`): Whether a stored conversation's own memory may be continued in place. A view that the caller
            gets to see must not share memory with the store.
        reading (`Reading`): What the call is served from.
        reading_of (callable): What is read under a regime, by calls with token types or without.
        shared_of (callable): The same for the shelf of what all may read, to write to it.
        wanted (`bool`): Whether the caller asked for the call to be stored: all else gives way to it.
        rule (*optional*): Predicts the KL of what is served, and says how far repair must go under `max_kl`.
        trace (list, *optional*): Run every level of escalation, and append what each one gave.
        search (`Search`, *optional*): Finds out why little of a prompt is served, for the report.
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
        capability=None,
        capability_rows=0,
        regimes=None,
        reading=None,
        reading_of=None,
        shared_of=None,
        same_model=None,
        watch=False,
        adopt=True,
        wanted=False,
        rule=None,
        trace=None,
        search=None,
    ):
        self.view = view
        self.capability = capability
        # rows that can't be moved are planned as if no approximation was allowed
        self.config = config if capability.kind == "shift" else config.replace(fidelity="exact")
        self._front_only = capability.kind != "shift" and config.fidelity != "exact"
        self.regimes = regimes
        self.reading_of = reading_of
        self.shared_of = shared_of
        self.reading: Reading = reading
        self.same_model = same_model
        self.watch = watch
        self.adopt = adopt and config.store  # what is not stored must not lie behind a stored conversation's rows
        self.wanted = wanted
        self.rule = rule
        self.trace = trace
        self.search = search
        self.passes: Passes | None = None
        self.reach: np.ndarray | None = None  # of the prompt's rows, [batch rows, columns, distances]
        self.first_logits: torch.Tensor | None = None  # kept for an audit, [batch rows, vocabulary]
        self.regime: bytes | None = None
        self.with_types = False  # whether token types, all 0, came with the prompt: some models tell that from none
        self.storable: int | None = None  # columns before the first one that was computed in some other way
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
        self.stored: list[Sequence] = []  # what the store keeps of it
        self.state = "waiting"
        self.report = ReuseReport(capability_rows=capability_rows)
        self.started = time.perf_counter()
        self._open = ExitStack()
        self._shares = False  # whether the view lies over memory of a stored conversation
        self._resumed = False
        self._all_logits = False
        self._heals = config.heal_rows > 0  # until it is clear whether this call can
        self.healer: Healer | None = None
        self.batch: PromptBatch | None = None
        view.request = self

    def as_found(self):
        """Around a whole call: rotary modules are left as they were found."""
        return nullcontext() if self.regimes is None else self.regimes.as_found()

    def resume(self) -> None:
        """Called before every forward of the request, outside of anybody else's code."""
        if self.regimes is not None:
            self.regimes.resume()
            self._resumed = True

    def pause(self) -> None:
        """Called after every forward, also when it raised."""
        if self._resumed:
            self._resumed = False
            self.regimes.pause()

    # -- the first forward --------------------------------------------------------------------------------------

    def prefill(self, model, kwargs: dict) -> dict:
        """Called before the first forward with its arguments; returns the arguments of the last pass."""
        self.state = "prefill"
        try:
            self.batch = read_inputs(kwargs, self.prompt_columns, self.caller_rows, defaults_of(type(model)))
            self.view.group, self.view.prompt_columns = self.batch.group, self.batch.prompt_columns
            if self.capability.kind == "prefix" and not self.capability.takes_positions and self.batch.pads.any():
                raise Refused("the model counts padding as positions, so padded rows may stand anywhere")
            if self.regimes is not None:
                self.regime = self.regimes.enter(int(self.batch.columns - self.batch.pads.min()))
            self.with_types = kwargs.get("token_type_ids") is not None
            if self.regime is not None or self.with_types:
                self.reading = self.reading_of(self.regime, self.with_types)
                self.view.shelf = self.reading.own
            self._plan(kwargs)
            self._materialise()
        except ContradictoryInputs:
            raise
        except Refused as refusal:
            return self._plain(kwargs, str(refusal))
        except Exception as error:  # never half a view: whatever failed, this call prefills as if nothing was stored
            # what is damaged says so itself, and is no fault of ours to be traced
            logger.warning("reuse failed, this call runs a full prefill", exc_info=not isinstance(error, DamagedFile))
            self.rows = []
            self._let_go()
            return self._plain(kwargs, f"reuse failed: {type(error).__name__}: {error}")
        self.passes = Passes(
            self.view,
            self.batch,
            self.rows,
            self.config,
            self.capability,
            self.chunk,
            self._all_logits,
            self.report,
            self._open,
            self.rule,
            self.trace,
            self.frequencies,
            self._reload,
        )
        return self.passes.run(model, kwargs)

    def prefilled(self, output=None) -> None:
        """Called after the first forward with what it gave, also when it raised and gave nothing."""
        self._open.close()
        if self.passes is not None and output is not None:
            try:
                logits = logits_of(output)
                self.passes.finish(logits)
                self.reach = self.passes.reach
                self._take_signals(logits)
            except Exception:  # it changes nothing of the answer, but rows of which too little is known are not stored
                logger.warning("what is to be expected of this answer is not known", exc_info=True)
                self.report.expected_kl = self.first_logits = None
                self._store_up_to(0)
        if self.regime is not None and self.regimes.current() != self.regime:
            self.storable = 0
        if self.state == "prefill":
            self.state = "decoding"
            self.report.timings["first_token"] = time.perf_counter() - self.started

    def continued(self, model, kwargs: dict) -> dict:
        """
        Called before every later forward; returns its arguments. What it computes is stored only if nothing but the
        tokens is new. Token types must be the prompt's; where code of the caller's runs in between, the model must be
        in the same state. Only such a forward may heal rows.
        """
        self._before = self.view.get_seq_length()
        types = kwargs.get("token_type_ids")
        other_types = (types is not None) != self.with_types or (types is not None and bool((types != 0).any()))
        if other_types or (self.watch and not self.same_model()):
            self._store_up_to(self._before)
        if self._heals and self.rows:
            self._heals = False
            self.healer, remark = make_healer(model, self.view, self.rows, self.capability, self.config, self.chunk)
            self.remark(remark)
        if self.healer is None:
            return kwargs
        if self.storable is not None:
            self.healer.stop()
        if kwargs["input_ids"].shape[1] > 1:
            self.remark(f"{UNHEALED}: several drafts are checked at a time")
        return self.healer.prepare(model, kwargs, self._open)

    def remark(self, remark: str | None) -> None:
        """Add to the report's reason, once."""
        if remark is not None and remark not in (self.report.reason or ""):
            self.report.reason = f"{self.report.reason}; {remark}" if self.report.reason else remark

    def forwarded(self, whole: bool) -> None:
        """
        Called after every later forward, with whether it came to its end (`whole`): rows that were computed by other
        frequencies belong to another shelf, half-computed ones to none.
        """
        if self.healer is not None:
            self._open.close()
            if whole:
                self.healer.forwarded()
                self.report.healed_rows = self.healer.num_healed
        if not whole:
            self.view.altered = True
        if self.regime is not None and self.regimes.current() != self.regime:
            self._store_up_to(self._before)

    def _take_signals(self, logits: torch.Tensor | None) -> None:
        """Keep what the first forward showed for later: for an audit, and for turns that carry these rows on."""
        drafts = self.batch.columns - self.batch.prompt_columns
        if self.config.audit_rate and logits is not None and logits.shape[1] > drafts:
            self.first_logits = logits[:, -1 - drafts].detach().float().cpu()
        carried = [row.prefix_sequence.expected_kl for row in self.rows if row.carries]
        known = [kl for kl in (self.report.expected_kl, *carried) if kl is not None]
        self.report.expected_kl = max(known) if known else None

    def _store_up_to(self, columns: int) -> None:
        self.storable = columns if self.storable is None else min(columns, self.storable)

    def _plain(self, kwargs: dict, reason: str) -> dict:
        """A full prefill through the empty view, not stored."""
        self.report.reason, self.report.causes = reason, {}
        self.rows = []
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        self.report.computed_rows = tokens.shape[0] * tokens.shape[1]
        self.report.equivalent_rows = float(self.report.computed_rows)
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
        view, config, reading = self.view, self.config, self.reading
        with view.store.lock:
            view.store.expire()
            pads = [int(self.batch.pads[row]) for row in range(0, self.batch.rows, self.batch.group)]
            prompts = [
                self.batch.ids[number * self.batch.group, pad : self.batch.prompt_columns]
                for number, pad in enumerate(pads)
            ]
            before = time.perf_counter()
            matches = [reading.match(ids) for ids in prompts]
            lookup += time.perf_counter() - before
            if config.fidelity != "exact":
                new = [ids[max(match.exact, match.carried) :] for ids, match in zip(prompts, matches, strict=True)]
                reading.observe(np.concatenate(new), view.store.clock())
            for ids, pad, match in zip(prompts, pads, matches, strict=True):

                def find_runs(first, ids=ids):
                    nonlocal lookup
                    before = time.perf_counter()
                    runs = reading.runs(ids, first, config.min_match_tokens)
                    lookup += time.perf_counter() - before
                    return runs

                planned = PlannedRow.make(ids, pad, match, find_runs, keep_last or len(ids), config)
                view.shelf.pin(planned.segments())
                view.lease.plans.append(planned.served)
                self.rows.append(planned)
                self._touch(planned)
                view.store.usage.ask(view.shelf, planned.served)
        self.keep_last, self._all_logits = keep_last, keep_last is None
        if self._all_logits and self.report.reason is None:
            self.report.reason = "the logits of every token were asked for, so every row runs; see `logits_to_keep`"
        if self._front_only and self.report.reason is None and any(row.computed[:-1].any() for row in self.rows):
            self.report.reason = f"text is reused at the front only: {self.capability.reason}"
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
        self.remark(read_files(view, self.rows, self.reading))
        room = min(self.new_tokens or GENERATION_ROWS, MAX_GENERATION_ROWS)
        with store.lock:
            extent, in_place = None, 0
            row = self.rows[0]
            sequence = row.prefix_sequence
            whole = sequence is not None and row.prefix_length == len(sequence.ids)
            columns, rows = self.batch.columns + room, self.batch.rows
            # what is healed must not be memory of a conversation that is stored as it is
            healed_in_place = self._heals and bool((row.kinds == CARRIED).any())
            if whole and rows == 1 and row.pad == 0 and self.adopt and not healed_in_place:
                extent = store.adopt(view.shelf, sequence, columns)
                view.lease.adopted = sequence if extent is not None else None
                in_place = row.prefix_length if extent is not None else 0
                self._shares = extent is not None
            if extent is None:
                prompts = [(row.ids, row.served) for row in self.rows] if self.config.store else []
                plans = [row.served for row in self.rows]
                extent = store.allocate(view.shelf, columns, rows, None if self.wanted else prompts, plans)
            view.lay_over(extent)
            load(self.view, self.batch, self.rows, in_place, self.frequencies())
        self.report.timings["materialise"] = time.perf_counter() - started

    def _reload(self, prompts: range) -> None:
        """Gather the moved rows of these prompts anew: what was written in their places is undone."""
        with self.view.store.lock:  # stored rows move when they are packed
            reload_moved(self.view, self.batch, self.rows, prompts, self.frequencies())

    def _let_go(self) -> None:
        """Hold nothing any more, after a fault that may have come in the middle of anything."""
        store = self.view.store
        store.unsure = True
        self.view.lease.end()
        self.view.unbind()
        store.mend()

    def _give_back(self) -> None:
        sequence, self.view.lease.adopted = self.view.lease.adopted, None
        if sequence is not None:
            sequence.busy = False

    # -- the end ------------------------------------------------------------------------------------------------

    def finish(self, handed_out: bool = False) -> None:
        """The call returned: store what is worth it, let go of the rest."""
        if self.state == "closed":
            return
        view, tokens = self.view, None
        try:
            tokens = self._tokens_to_store()
        except Exception:  # the answer is there and right: no fault from here on must take it from the caller
            logger.warning("storing failed: this call is not stored", exc_info=True)
        with view.store.lock:
            self._give_back()
            try:
                seconds = self.report.timings["first_token"] - self.report.timings["materialise"]
                view.store.usage.measure(view.shelf.pool, seconds, self.report.computed_rows)
                self.remark(view.store.shortage(view.shelf, view.extent))
                self._note_causes()
                if tokens is not None:
                    self.stored = store_rows(self, tokens, handed_out)
            except Exception:
                logger.warning("storing failed: the rows of this model are forgotten", exc_info=True)
                view.store.abandon(view.shelf)
            self._close(handed_out)
        self.report.timings["total"] = time.perf_counter() - self.started

    def _note_causes(self) -> None:
        """Why little was served, if little was: looked for when the answer is out, before its own rows are stored."""
        if self.search is not None and not self._all_logits:
            place = Place(self.reading.own.scope, self.regime, self.with_types)
            for row in self.rows:
                rows_of = row, self.reading, place, self.config, self.keep_last
                self.search.note(self.report, self.view.store, *rows_of)

    def _tokens_to_store(self) -> np.ndarray | None:
        """All that was fed to the model, `[batch, columns]`; None if it can't be stored."""
        view = self.view
        if not self.config.store or not self.rows or view.altered:
            return None
        tokens = torch.cat(view.fed, dim=1).cpu().numpy()
        whole = tokens.shape[1] == view.get_seq_length()
        tokens = tokens[:, : self.storable]
        if self.watch or threading.active_count() > 1:  # else nobody could have changed the model meanwhile
            whole = whole and self.same_model()
        return tokens if whole and tokens.shape[1] >= self.batch.prompt_columns else None

    def abort(self) -> None:
        """
        The call failed, or its caller has broken it off, which may have been in the middle of its end: nothing more is
        stored, everything is let go.
        """
        self._let_go()
        self._forget()

    def _close(self, handed_out: bool) -> None:
        plans, self.view.lease.plans = self.view.lease.plans, []
        for plan in plans:
            self.view.shelf.unpin(plan.segments)
        self._forget()
        if handed_out:
            self.view.hand_out(self._shares)
        else:
            self.view.close()

    def _forget(self) -> None:
        """Closed: a cycle, or the frequencies' hold on the model, would keep both alive until a garbage collection."""
        self.state = "closed"
        self._open.close()
        self.passes = None
        self.view.request = self.frequencies = self.regimes = self.same_model = None
        self.reading_of = self.shared_of = None
