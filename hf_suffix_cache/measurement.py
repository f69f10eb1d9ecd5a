"""
What a model can do, measured on the model at first use. The class name and `model_type` are not looked at.
"""

import inspect
import re
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .attention import Probe, open_pass
from .capability import Capability, cache_argument, input_device
from .config import SuffixCacheConfig
from .regimes import RotaryRegimes, depends_on_length, length_dependent_modules, rope_types
from .rope import fit_rotation, frequencies_of_table, relative_error, rotate_keys
from .store.pool import LayerShape
from .store.scopes import Place
from .store.store import Store
from .view import View

PROBE_TOKENS = 12
CONTINUED_FROM = 7  # the row from which a filled cache is continued
CHANGED_FROM = 8  # the row from which tokens are changed, to see whether rows to the left notice
PADS = 3  # padding before the second row of a batch
SCATTERED = (3, 4, 8, 11)  # rows that are run alone, among the others
FAR = 509  # positions between the two runs: far enough to tell slow frequencies apart, and prime
# `relative_error` of turned rows against fresh ones in layer 0, and what each layer adds to it. SmolLM2 shows 8e-6 in
# fp32, 3e-2 in layer 29 in bf16, 4e-3 in fp16
ROTATION_TOLERANCE = {
    torch.float64: (1e-4, 0.0),
    torch.float32: (1e-4, 0.0),
    torch.bfloat16: (2e-2, 2e-3),
    torch.float16: (5e-3, 5e-4),
}
# relative RMS error of rows computed another way: a wrong mask or position gives 0.1 and more
ROWS_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
STOCK_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
LIMITS = (
    "max_position_embeddings original_max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length "
    "max_target_positions seq_length block_size"
).split()


def measure(model: PreTrainedModel) -> Capability:
    """
    Run a few tokens in several ways and compare the rows of all layers: at two positions (which slot turns, how, by
    which buffer), with later tokens changed (causality), by continuing a filled cache, and a scattered few among the
    others, against one forward of all.
    """
    started = time.perf_counter()
    reason = _refusal(model)
    if reason is not None:
        return Capability("none", reason)
    regimes = RotaryRegimes(model) if length_dependent_modules(model) else None
    measurement = None
    try:
        with (
            regimes.cold() if regimes is not None else nullcontext(),
            torch.autocast(input_device(model).type, enabled=False),
            torch.no_grad(),
        ):
            measurement = _Measurement(model)
            capability = measurement.verdict()
    except Exception as error:  # whatever a foreign forward raises here, it must not reach the caller's generate
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        capability = Capability("none", f"the model could not be measured ({problem})", failed=True)
    rows = 0 if measurement is None else measurement.rows
    return replace(capability, length_dependent=regimes is not None, rows=rows, seconds=time.perf_counter() - started)


def _refusal(model: PreTrainedModel) -> str | None:
    """What rules a model out before anything is run."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder models keep two caches"
    if cache_argument(model) is None:
        return "the model's forward takes no cache"
    for module in length_dependent_modules(model):
        layers = [layer for layer, kind in rope_types(module).items() if depends_on_length(kind)]
        if not all(f"{layer}_original_inv_freq".removeprefix("None_") in module._buffers for layer in layers):
            return "rotary frequencies that depend on the length, kept in a way that is not understood"
    return None


class _Measurement:
    """The forwards of one measurement. Rows of a run are a list with `(keys, values)` or None per cache layer."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.rows = 0
        self.parameters = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in self.parameters
        self.takes_mask = "attention_mask" in self.parameters
        self.device = input_device(model)
        self.vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self.ids = self._tokens(np.arange(PROBE_TOKENS))
        self.tolerance = ROWS_TOLERANCE.get(model.dtype, 0.0)

    # -- what was found -----------------------------------------------------------------------------------------

    def verdict(self) -> Capability:
        """Kind and reason. A model is what the strictest failed check leaves of it."""
        kept = DynamicCache(config=self.model.config).layers
        for number, layer in enumerate(kept):
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) and type(layer).__name__ != "DummyLayer":
                name = type(layer).__name__
                return Capability("none", f"layer {number} keeps a {name}, not plain keys and values")
        logits, near = self._run(self.ids)
        reason = self._geometry_problem(near)
        if reason is not None:
            return Capability("none", reason)
        if not self._is_causal(near):
            return Capability("none", "rows change with tokens to their right: the model is not causal")
        kept, noise = self._stock_noise(logits)
        if len(kept) < len(near):
            return Capability("none", f"the model keeps {len(near)} layers where its own cache has {len(kept)}")
        if not noise <= STOCK_TOLERANCE[self.model.dtype]:
            return Capability("none", f"continuing a filled cache changes the model's own rows by {noise:.1g}")
        self.tolerance = max(self.tolerance, 3 * noise)
        windows = [getattr(layer, "sliding_window", None) for layer in kept[: len(near)]]
        plain = tuple(None if rows is None else _shape(*rows) for rows in near)
        capability = Capability("prefix", None, plain, tuple(windows), self.takes_positions, self.takes_mask)
        error = self._continued_error(capability, logits, near)
        if not error <= self.tolerance:
            return replace(capability, kind="none", reason=f"continuing our rows changes them by {error:.1g}")
        unmasked = set(capability.windows) - {None} - self._masked_windows(capability, near)
        if unmasked:
            reason = f"its cache forgets what is older than {min(unmasked)} tokens, but its masks don't"
            return replace(capability, kind="none", reason=reason)
        layers = self._fit(near)
        if isinstance(layers, str):
            return replace(capability, reason=layers, batches=self._batches(capability, near))
        shift = replace(capability, kind="shift", layers=layers)
        error = self._scattered_error(shift, logits, near)
        if not error <= self.tolerance:
            reason = f"rows that are recomputed out of order differ by {error:.1g}"
            return replace(capability, reason=reason, batches=self._batches(capability, near))
        batches = self._batches(shift, near)
        return replace(shift, batches=batches, reads_attention=self._reads_attention(shift, logits, near))

    def _geometry_problem(self, near: list) -> str | None:
        if not any(rows is not None for rows in near):
            return "the model keeps no keys and values in the cache that it is given"
        for number, rows in enumerate(near):
            for states in rows or ():
                if not bool(states.isfinite().all()):
                    raise ValueError(f"layer {number} computes numbers that are not finite")
                if states.dim() != 4 or states.shape[0] != 1 or states.shape[2] != PROBE_TOKENS:
                    return f"layer {number} keeps {list(states.shape)}, not [batch, heads, tokens, head_dim]"
                if states.dtype not in ROTATION_TOLERANCE:
                    return f"layer {number} keeps {states.dtype}"
            if rows is not None and (rows[0].shape[1] != rows[1].shape[1] or rows[0].dtype != rows[1].dtype):
                return f"layer {number} keeps keys and values of different heads"
        return None

    def _is_causal(self, near: list) -> bool:
        changed = self.ids.clone()
        changed[:, CHANGED_FROM:] = self._tokens(np.arange(PROBE_TOKENS, 2 * PROBE_TOKENS - CHANGED_FROM))
        _, rows = self._run(changed)
        left = range(CHANGED_FROM)
        return _rows_error(rows, near, left, left) <= STOCK_TOLERANCE[self.model.dtype]

    def _stock_noise(self, logits) -> tuple[list, float]:
        """Layers of the cache that transformers itself would use, and what continuing it changes."""
        cache = self._forward(self.ids[:, :CONTINUED_FROM], 0, DynamicCache(config=self.model.config))[1]
        after, _ = self._forward(self.ids[:, CONTINUED_FROM:], CONTINUED_FROM, cache)
        return cache.layers, _rms_error(after, logits[:, CONTINUED_FROM:])

    def _continued_error(self, capability: Capability, logits, near: list) -> float:
        """Rows that a view gives behind the first ones, the last of them alone as in decoding."""
        view = self._view(capability, near)
        errors = []
        for start, stop in ((CONTINUED_FROM, PROBE_TOKENS - 1), (PROBE_TOKENS - 1, PROBE_TOKENS)):
            view.set_length(start)
            got, _ = self._forward(self.ids[:, start:stop], start, view)
            errors.append(_rms_error(got, logits[:, start:stop]))
        new = range(CONTINUED_FROM, PROBE_TOKENS)
        return max(*errors, _rows_error(self._rows_of(view), near, new, new))

    def _masked_windows(self, capability: Capability, near: list) -> set[int | None]:
        """Windows of the masks that the model asks for; these few tokens can't show what a window hides."""
        if set(capability.windows) <= {None}:
            return set()
        view, probe = self._view(capability, near), Probe(1, first_layer=len(near))
        view.set_length(CONTINUED_FROM)
        with open_pass(self.model, probe):
            self._forward(self.ids[:, CONTINUED_FROM:], CONTINUED_FROM, view)
        return probe.windows

    def _scattered_error(self, capability: Capability, logits, near: list, probe: Probe | None = None) -> float:
        """Rows that are run among others; what lay in their place is spoilt first."""
        view = self._view(capability, near)
        columns = np.array(SCATTERED)
        for layer in view.layers:
            if layer.keys is not None:
                layer.keys[:, :, columns], layer.values[:, :, columns] = 7.0, 7.0
        ids = self.ids[:, columns]
        with open_pass(self.model, probe), view.scatter(columns, PROBE_TOKENS):
            got, _ = self._forward(ids, torch.from_numpy(columns).to(self.device)[None], view)
        return max(_rms_error(got, logits[:, columns]), _rows_error(self._rows_of(view), near, columns, columns))

    def _reads_attention(self, capability: Capability, logits, near: list) -> bool:
        probe = Probe(2, first_layer=len(near) // 2)
        try:
            error = self._scattered_error(capability, logits, near, probe)
        except Exception:  # the model's attention does not go through transformers' interface, or not as we call it
            return False
        attention = probe.attention()
        if attention is None or attention.shape != (1, PROBE_TOKENS):
            return False
        return error <= self.tolerance and bool((attention.sum(dim=-1) - 1).abs().max() < 1e-2)

    def _batches(self, capability: Capability, near: list) -> bool:
        """Whether a batch comes out as its rows do alone: the second row is shorter, with padding on its left."""
        pads = PADS if capability.takes_positions else 0  # without position_ids, padding would count as text
        view = self._view(capability, near, batch=2)
        for layer, rows in zip(view.layers, near, strict=True):
            for states, fresh in zip((layer.keys, layer.values), rows or (), strict=False):
                states[1, :, :pads] = 0.0
                states[1, :, pads:] = fresh[0, :, : PROBE_TOKENS - pads]
        ids = torch.cat([self.ids, self.ids.roll(pads, dims=1)])
        mask = torch.ones(2, PROBE_TOKENS, dtype=torch.long, device=self.device)
        mask[1, :pads] = 0
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        try:
            for columns in (range(CONTINUED_FROM, PROBE_TOKENS), SCATTERED)[: 2 if capability.kind == "shift" else 1]:
                columns = np.array(columns)
                view.set_length(int(columns[0]))
                scattered = columns[-1] - columns[0] + 1 != len(columns)
                with open_pass(self.model), view.scatter(columns, PROBE_TOKENS) if scattered else nullcontext():
                    self._forward(ids[:, columns], positions[:, columns], view, mask)
                got = self._rows_of(view)
                for row, first in ((0, 0), (1, pads)):
                    alone = [None if rows is None else tuple(states[row : row + 1] for states in rows) for rows in got]
                    if not _rows_error(alone, near, columns, columns - first) <= self.tolerance:
                        return False
        except Exception:  # such a model gets transformers' own cache for batches
            return False
        return True

    # -- positions ----------------------------------------------------------------------------------------------

    def _fit(self, near: list) -> tuple[LayerShape | None, ...] | str:
        """The layers with the rotation of each slot, or why their rows can't be moved."""
        candidates = self._candidates()
        if self.takes_positions:
            shift = self._far()
            _, far = self._run(self.ids, shift)
            compared = range(len(near))
        else:
            # rows can only be moved if they carry no position at all; layer 0 shows it behind other tokens
            shift = CONTINUED_FROM
            behind = torch.cat([self._tokens(np.arange(40, 40 + shift)), self.ids], dim=1)
            _, longer = self._run(behind)
            far = [None if rows is None else tuple(states[:, :, shift:] for states in rows) for rows in longer]
            compared, candidates = (0,), {}
        layer_types = getattr(self.model.config.get_text_config(decoder=True), "layer_types", None) or ()
        layers = []
        for number, (first, second) in enumerate(zip(near, far, strict=True)):
            if first is None or number not in compared:
                layers.append(None if first is None else _shape(*first))
                continue
            specs = []
            for slot, a, b in zip(("keys", "values"), first, second, strict=True):
                first_tolerance, per_layer = ROTATION_TOLERANCE[a.dtype]
                tolerance = first_tolerance + per_layer * number
                if float(a.abs().max()) == 0.0:
                    return f"layer {number}: {slot} are all zero, so nothing can be seen of their positions"
                if relative_error(a, b) <= tolerance:
                    specs.append(None)
                    continue
                spec, error = fit_rotation(a, b, shift, _of_layer(candidates, layer_types, number))
                if not error <= tolerance:
                    rounding = f" within the rounding of {a.dtype}" if a.dtype.itemsize < 4 else ""
                    how = f"no rotation explains how{rounding}"
                    how = how if self.takes_positions else "the forward takes no position_ids"
                    return f"layer {number}: {slot} depend on the position, and {how}"
                specs.append(spec)
            layers.append(_shape(*first, *specs))
        return self._long_text_problem(layers) or tuple(layers)

    def _long_text_problem(self, layers: list) -> str | None:
        """
        Why rows of texts that have outgrown their first length can't be moved. A model may swap its frequencies in
        another place than the buffer (Phi-3.5-MoE). Dynamic NTK's change with every length: they are not looked at.
        """
        kinds = [rope_types(module) for module in length_dependent_modules(self.model)]
        if not any(kind == "longrope" for types in kinds for kind in types.values()):
            return None
        border = max(self._first_lengths())
        _, near = self._run(self.ids, border)
        shift = FAR // 8
        _, far = self._run(self.ids, border + shift)
        for number, (shape, first, second) in enumerate(zip(layers, near, far, strict=True)):
            if shape is None:
                continue
            for spec, a, b in zip((shape.rotary, shape.value_rotary), first, second, strict=True):
                turned = a if spec is None else rotate_keys(a, shift, spec.frequencies(self.model), spec)
                first_tolerance, per_layer = ROTATION_TOLERANCE[a.dtype]
                if not relative_error(turned, b) <= first_tolerance + per_layer * number:
                    return f"layer {number}: beyond {border} tokens rows turn by other frequencies than the buffer's"
        return None

    def _first_lengths(self) -> list[int]:
        """Tokens up to which each longrope module keeps its first frequencies."""
        name, lengths = "original_max_position_embeddings", []
        for module in length_dependent_modules(self.model):
            parameters = module.config.rope_parameters
            for holder in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
                if holder.get(name):
                    lengths.append(int(holder[name]))
        return lengths

    def _candidates(self) -> dict[str, torch.Tensor]:
        """Inverse frequencies, fp64, by the name of the buffer that gives them."""
        found = {}
        for name, buffer in self.model.named_buffers():
            last = name.rsplit(".", 1)[-1]
            if last.endswith("inv_freq") and buffer.dim() == 1 and not re.search("original|long_inv", last):
                found[name] = buffer.detach().double()
            elif last == "embed_positions" and buffer.dim() == 2:
                found[name] = frequencies_of_table(buffer.detach())
        return found

    def _far(self) -> int:
        """Positions between the two runs, within every table of positions that the model may have."""
        limits = [FAR + PROBE_TOKENS]
        config = self.model.config.get_text_config(decoder=True)
        scalings = getattr(config, "rope_parameters", None) or {}
        for holder in (config, scalings, *(value for value in scalings.values() if isinstance(value, dict))):
            values = (holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None) for name in LIMITS)
            limits += [value for value in values if isinstance(value, int) and value > 0]
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Embedding) and re.search("pos|wpe", name.rsplit(".", 1)[-1]):
                limits.append(module.num_embeddings)
        limits += [len(buffer) for name, buffer in self.model.named_buffers() if "pos" in name and buffer.dim() == 2]
        return max(1, min(limits) - PROBE_TOKENS - 4)  # some tables have a few rows before position 0

    # -- forwards -----------------------------------------------------------------------------------------------

    def _tokens(self, numbers: np.ndarray) -> torch.Tensor:
        """Ids `[1, tokens]`, clear of the first few, which are special in many vocabularies."""
        first = min(5, self.vocabulary - 1)
        return torch.from_numpy(first + numbers * 37 % (self.vocabulary - first))[None].to(self.device)

    def _run(self, ids: torch.Tensor, offset: int = 0):
        """Logits and rows of one forward into an empty cache without windows, so that it keeps every row."""
        logits, cache = self._forward(ids, offset, DynamicCache())
        return logits, self._rows_of(cache)

    def _forward(self, ids: torch.Tensor, positions, cache, mask: torch.Tensor | None = None):
        """One forward; `positions` are those of the ids, `[batch, tokens]`, or the first one's."""
        batch, tokens = ids.shape
        if isinstance(positions, int):
            keys = (0 if isinstance(cache, DynamicCache) and not cache.get_seq_length() else positions) + tokens
            positions = torch.arange(positions, positions + tokens, device=self.device)[None]
        else:
            keys = PROBE_TOKENS
        arguments = {"input_ids": ids, "use_cache": True, cache_argument(self.model): cache}
        if self.takes_mask:
            ones = torch.ones(batch, keys, dtype=torch.long, device=self.device)
            arguments["attention_mask"] = ones if mask is None else mask
        if self.takes_positions:
            arguments["position_ids"] = positions
        # not compiled: these few shapes would use up what a compiled forward may specialise on
        output = torch.compiler.disable(self.model.forward)(**arguments)
        self.rows += batch * tokens
        return output.logits, cache

    def _rows_of(self, cache) -> list:
        return [None if getattr(layer, "keys", None) is None else (layer.keys, layer.values) for layer in cache.layers]

    def _view(self, capability: Capability, near: list, batch: int = 1) -> View:
        """A view of our own that holds these rows in every batch row; its memory is nobody else's."""
        store = Store(SuffixCacheConfig(max_bytes=1))
        view = View(store, store.shelf(self, Place(), capability.shapes), capability)
        view.lay_over(view.shelf.pool.allocate_private(PROBE_TOKENS, batch))
        view.set_length(PROBE_TOKENS)
        for layer, rows in zip(view.layers, near, strict=True):
            if rows is not None:
                layer.keys[:], layer.values[:] = rows
        return view


def _of_layer(candidates: dict[str, torch.Tensor], layer_types, number: int) -> dict[str, torch.Tensor]:
    """Of buffers that hold the same frequencies today, the one that is named after the layer's type comes first."""
    kind = layer_types[number] if number < len(layer_types) else ""
    return dict(sorted(candidates.items(), key=lambda item: not item[0].rsplit(".", 1)[-1].startswith(f"{kind}_")))


def _shape(keys: torch.Tensor, values: torch.Tensor, rotary=None, value_rotary=None) -> LayerShape:
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device, rotary, value_rotary)


def _rows_error(got: list, wanted: list, columns, wanted_columns) -> float:
    """Largest relative RMS error over layers and slots, rows at these columns."""
    errors = [
        _rms_error(a[:, :, list(columns)], b[:, :, list(wanted_columns)])
        for rows, others in zip(got, wanted, strict=True)
        if others is not None
        for a, b in zip(rows, others, strict=True)
    ]
    return max(errors, default=0.0)


def _rms_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.double(), wanted.double()
    error = float((got - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt().clamp_min(1e-30))
    return error if error == error else float("inf")
