"""What a forward was asked to run, understood or refused."""

import functools
import inspect
import logging
from dataclasses import dataclass

import numpy as np
import torch

from .planning import Span
from .report import ReuseReport

logger = logging.getLogger("hf_suffix_cache")

# tensors that reuse understands; any other one means a plain prefill
KNOWN_TENSORS = {"input_ids", "attention_mask", "position_ids", "token_type_ids", "logits_to_keep"}
# plain arguments that say what is returned, not how rows are computed
HARMLESS = {
    "use_cache",
    "return_dict",
    "logits_to_keep",
    "num_logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}
CACHE_NAMES = ("cache", "past_key_values")  # since transformers 5.24, and before


class Refused(Exception):
    """Reuse can't serve this call; the message is the report's reason."""


class ContradictoryInputs(ValueError):
    """The caller's mask, or his positions, don't belong to his ids; the message says what to pass."""


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """
    A first forward's tokens.

    Args:
        ids (`np.ndarray` of int64, `[rows, columns]`): Padded prompts, and drafts behind them.
        pads (`np.ndarray` of int64, `[rows]`): Left padding of each row.
        prompt_columns (`int`): Columns of the caller's prompt; what follows are drafts of assisted decoding.
        group (`int`): Batch rows per prompt of the caller's: beams or return sequences.
    """

    ids: np.ndarray
    pads: np.ndarray
    prompt_columns: int
    group: int

    @property
    def rows(self) -> int:
        """Batch rows, beams included."""
        return self.ids.shape[0]

    @property
    def columns(self) -> int:
        """Columns of the first forward."""
        return self.ids.shape[1]

    @functools.cached_property
    def padded(self) -> bool:
        """Whether any row has padding: asked for every token."""
        return bool(self.pads.any())


def read_inputs(
    kwargs: dict, prompt_columns: int | None, caller_rows: int | None, defaults: dict | None = None
) -> PromptBatch:
    """
    Understand a forward's arguments; `defaults` are those of its signature.

    Raises `Refused` where they say something that reuse doesn't understand, and `ContradictoryInputs` where the
    caller's mask and ids contradict each other.
    """
    ids = kwargs.get("input_ids")
    if ids is None or kwargs.get("inputs_embeds") is not None:
        raise Refused("inputs_embeds have no token ids to look up")
    for name, value in kwargs.items():
        if name in KNOWN_TENSORS or name in CACHE_NAMES or _says_nothing(value):
            continue
        plain = isinstance(value, (bool, int, float, str))
        if not plain or not (name in HARMLESS or (defaults or {}).get(name, inspect.Parameter.empty) == value):
            raise Refused(f"the argument `{name}` may change the rows in a way that the cache can't see")
    if kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
        raise Refused("attentions or hidden states of every prompt row were asked for")
    types = kwargs.get("token_type_ids")
    if types is not None and bool((types != 0).any()):
        raise Refused("token types other than 0 change rows in a way that token ids don't show")
    batch, columns = ids.shape
    if columns == 0:
        raise Refused("the prompt is empty")
    pads = _read_mask(kwargs.get("attention_mask"), batch, columns)
    _check_positions(kwargs.get("position_ids"), np.arange(columns) - pads[:, None])
    return PromptBatch(
        ids.detach().cpu().numpy().astype(np.int64),
        pads,
        min(prompt_columns or columns, columns),
        rows_per_prompt(batch, caller_rows),
    )


@functools.lru_cache(maxsize=64)
def defaults_of(model_class: type) -> dict:
    """Default of each argument of a model's forward."""
    parameters = inspect.signature(model_class.forward).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def rows_per_prompt(batch: int, caller_rows: int | None) -> int:
    """How often `generate` repeated each of the caller's rows."""
    return batch // caller_rows if caller_rows and batch % caller_rows == 0 else 1


def describe_plain(report: ReuseReport, tokens: torch.Tensor, mask, caller_rows: int | None) -> None:
    """Report of a prompt that ran whole: ids or embeddings `[batch, tokens, ...]`, mask `[batch, tokens]` or none."""
    batch, columns = tokens.shape[:2]
    lengths = [columns] * batch
    if isinstance(mask, torch.Tensor) and mask.shape == (batch, columns):
        try:
            lengths = (mask != 0).sum(dim=1).tolist()
        except Exception:  # no call fails for what is told of it
            logger.warning("padding is counted as tokens of a prompt", exc_info=True)
    group = rows_per_prompt(batch, caller_rows)
    report.set_spans([[Span(0, length, "new")] if length else [] for length in lengths[::group]])


def _says_nothing(value) -> bool:
    """Values that stand for an argument that is not given; composites bring empty dicts for images they don't have."""
    return value is None or (isinstance(value, (dict, list)) and not value)


def _read_mask(mask, batch: int, columns: int) -> np.ndarray:
    """Left padding of each row, `[batch]`."""
    if mask is None:
        return np.zeros(batch, dtype=np.int64)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise Refused("an attention mask of the caller's own that is not [batch, tokens]")
    if mask.shape != (batch, columns):
        raise ContradictoryInputs(
            f"`attention_mask` has shape {tuple(mask.shape)} but `input_ids` has {(batch, columns)}. Pass the whole "
            "prompt and its mask: a SuffixCache finds by itself what it has stored of it."
        )
    seen = mask.detach().cpu().numpy() != 0
    pads = columns - seen.sum(axis=1)
    if not (seen == (np.arange(columns) >= pads[:, None])).all() or (pads == columns).any():
        raise Refused("an attention mask with holes or padding on the right")
    return pads


def _check_positions(given, positions: np.ndarray) -> None:
    """Refuse position ids, `[batch or 1, columns]`, that don't count the tokens behind the padding from 0."""
    if given is None:
        return
    if given.dim() != 2:
        raise Refused("position_ids that are not [batch, tokens]")
    if given.shape[1] != positions.shape[1] or given.shape[0] not in (1, positions.shape[0]):
        raise ContradictoryInputs(
            f"`position_ids` has shape {tuple(given.shape)} but `input_ids` has {positions.shape}; without them, "
            "`generate` makes them from `attention_mask`. Pass the whole prompt and a mask of its length: a "
            "SuffixCache finds by itself what it has stored of it."
        )
    given = np.broadcast_to(given.detach().cpu().numpy(), positions.shape)
    if not ((given == positions) | (positions < 0)).all():
        raise Refused("position_ids that don't count the tokens from 0")
