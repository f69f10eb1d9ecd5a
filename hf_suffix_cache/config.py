"""Every knob of the package: one frozen dataclass, its legal ranges, its JSON form; and the package's own errors."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any


class PoolExhausted(RuntimeError):
    """The block pool can't hold another extent within `max_bytes`. Never reaches a caller of `generate`."""


class UnsupportedModelError(ValueError):
    """The caller asked explicitly for something that this model can't do; the message says what and why."""


FIDELITIES = ("exact", "balanced", "fast")
HEAL_ORDERS = ("left", "attention")
EVICTIONS = ("lru", "lfu", "gdsf")
STORE_DTYPES = ("bfloat16", "float16", "int8")


@dataclass(frozen=True)
class SuffixCacheConfig:
    """
    Settings of a `SuffixCache`. Wrong values raise `ValueError` (or `TypeError`) naming field, value and legal range.

    Args:
        fidelity (`str`, *optional*, defaults to `"balanced"`):
            `"exact"` never serves an approximate row; `"balanced"` moves stored rows and recomputes the ones the
            question leans on; `"fast"` moves stored rows and recomputes the first ones of each run.
        max_kl (`float`, *optional*):
            Bound on KL(full prefill || with reuse) of the first new token, nats, temperature 1. Repair escalates until
            the calibrated rule says that it holds; overrides `repair` and `repair_fraction`. `"exact"` stays exact.
        workload (`str`, *optional*):
            Label of the calibration that `max_kl` goes by; `None`: all calibrated prompts together.
        repair (object with a `select` method, *optional*):
            A repair policy (see `repair/`) that overrides the preset of `fidelity`.
        repair_fraction (`float`, *optional*, defaults to 0.15):
            Share of the shifted rows that `"balanced"` recomputes, seam rows included: twice as many where the moved
            text came in runs of less than 80 tokens, which are harder to move; `"fast"` takes half of it.
        drift (`bool`, *optional*, defaults to `True`):
            Correct the moved rows that are not recomputed by what recomputing has changed in the rows beside them
            (`drift.py`).
        seam_tokens (`int`, *optional*, defaults to 4):
            Rows recomputed after each seam.
        tail_tokens (`int`, *optional*, defaults to 16):
            Newest prompt tokens that are always computed when a plan holds an approximate row.
        min_match_tokens (`int`, *optional*, defaults to 16):
            Shortest run worth shifting. Below 15 a run is found only if a stored 8-token window lies inside it.
        keep_conversations (`int`, *optional*, defaults to 4):
            Newest conversations whose extents stay as they are; older ones keep computed rows and a recipe.
        block_size (`int`, *optional*, defaults to 16):
            Rows in a pool block.
        max_bytes (`int`, *optional*):
            Store budget. `None`: a quarter of the memory free on the model's device at first use.
        host_bytes (`int`, *optional*):
            Host memory for rows that are given up on a device, to be served from there. `None`: a quarter of what is
            free at the first time for models on a GPU, nothing for those on a CPU, where it would be the same memory.
        eviction (`str` or object with a `worth` method, *optional*, defaults to `"gdsf"`):
            What a full store gives up first: `"lru"` what was used longest ago, `"lfu"` what was asked for least
            often, `"gdsf"` what saves the least prefill time for a byte, recent requests counting more. Or a policy of
            the caller's (see `store/eviction.py`).
        pin_share (`float`, *optional*, defaults to 0.5):
            Share of `max_bytes` that pinned texts may take (see `SuffixCache.register`).
        store_dtype (`str`, *optional*):
            `"bfloat16"`, `"float16"` or `"int8"`: dtype in which rows that no kept extent holds, and means, are
            stored. Where that is smaller than the model's, such rows are approximate: `"exact"` never serves them.
            `None`: the model's own.
        compact_waste (`float`, *optional*, defaults to 0.25):
            Share of the used rows that nothing needs from which the pool is packed by itself, a bounded number of
            rows after each call. `None`: only when `compact()` is called.
        consensus (`bool`, *optional*, defaults to `True`):
            Keep the running mean of a text's rows from different contexts, to be served where no copy's context fits.
        audit_rate (`float`, *optional*, defaults to 0.0):
            Share of approximate requests that are run in full as well, after their answer, to compare.
        settle (`bool` or `"background"`, *optional*, defaults to `False`):
            After each approximate answer of `generate`, recompute its conversation exactly, so that the next turn is
            exact: at once, or in a thread (see `SuffixCache.settled`).
        heal_rows (`int`, *optional*, defaults to 0):
            Rows that are recomputed along with each decoded token behind approximate ones, in the same forward. On a
            CPU, 8 rows cost 1.45 times a step without.
        heal_order (`str`, *optional*, defaults to `"left"`):
            `"left"`: from left to right, so that with 2 rows or more the whole conversation ends exact; `"attention"`:
            the approximate rows that the newest tokens attend to most come first.
        store (`bool`, *optional*, defaults to `True`):
            Whether calls are stored; `False` serves them from what is there and leaves nothing behind.
        share_prefix (`int` or sequence of `int`, *optional*):
            Common start of prompts that all sessions may reuse: so many tokens of every prompt, whatever they are, or
            these very token ids (`system_turn` gives those of a chat template). The safer of the two is the second.
        ttl (`float`, *optional*, defaults to 300.0):
            Seconds that an unused named session's segments live; `None` means for ever.
        topic_similarity (`float`, *optional*, defaults to 0.04):
            TF-IDF cosine of a prompt's new part to those before it in its session, below which the session has left
            its topic: what is stored of it is no longer moved. 0 switches that off. The default is measured
            (`benchmarks/topics.py`); new parts of one topic are rarely alike in more than their rare words.
        topic_temperature (`float`, *optional*, defaults to 0.3):
            A session's temperature from then on, until a prompt stays on its topic; 0.8 otherwise.
        namespace (`str`, *optional*, defaults to `""`):
            A salt of the caller's: caches with different namespaces never share rows.
        debug (`bool`, *optional*, defaults to `False`):
            Fill freed rows with NaN, so that a use after free shows in the answer. Slow.
    """

    fidelity: str = "balanced"
    max_kl: float | None = None
    workload: str | None = None
    repair: Any = None
    repair_fraction: float = 0.15
    drift: bool = True
    seam_tokens: int = 4
    tail_tokens: int = 16
    min_match_tokens: int = 16
    keep_conversations: int = 4
    block_size: int = 16
    max_bytes: int | None = None
    host_bytes: int | None = None
    eviction: Any = "gdsf"
    pin_share: float = 0.5
    store_dtype: str | None = None
    compact_waste: float | None = 0.25
    consensus: bool = True
    audit_rate: float = 0.0
    settle: bool | str = False
    heal_rows: int = 0
    heal_order: str = "left"
    store: bool = True
    share_prefix: int | tuple[int, ...] | None = None
    ttl: float | None = 300.0
    topic_similarity: float = 0.04
    topic_temperature: float = 0.3
    namespace: str = ""
    debug: bool = False

    def __post_init__(self):
        if self.fidelity not in FIDELITIES:
            raise ValueError(f"`fidelity` must be one of {FIDELITIES}, got {self.fidelity!r}.")
        if self.repair is not None and not _is_object_with(self.repair, "select"):
            raise TypeError(f"`repair` must be None or an object with a `select` method, got {self.repair!r}.")
        if self.max_kl is not None:
            _check_number("max_kl", self.max_kl, 0.0, float("inf"))
        if self.workload is not None and not isinstance(self.workload, str):
            raise TypeError(f"`workload` must be None or a string, got {self.workload!r}.")
        _check_number("audit_rate", self.audit_rate, 0.0, 1.0)
        if self.settle not in (False, True, "background"):
            raise ValueError(f"`settle` must be False, True or 'background', got {self.settle!r}.")
        _check_int("heal_rows", self.heal_rows, 0, 1024)
        if self.heal_order not in HEAL_ORDERS:
            raise ValueError(f"`heal_order` must be one of {HEAL_ORDERS}, got {self.heal_order!r}.")
        _check_number("repair_fraction", self.repair_fraction, 0.0, 1.0)
        _check_int("seam_tokens", self.seam_tokens, 0, 64)
        _check_int("tail_tokens", self.tail_tokens, 1, 4096)
        _check_int("min_match_tokens", self.min_match_tokens, 8, 512)
        _check_int("keep_conversations", self.keep_conversations, 0, 10_000)
        _check_int("block_size", self.block_size, 1, 1024)
        if self.max_bytes is not None:
            _check_int("max_bytes", self.max_bytes, 1, 2**62)
        if self.host_bytes is not None:
            _check_int("host_bytes", self.host_bytes, 0, 2**62)
        if isinstance(self.eviction, str) and self.eviction not in EVICTIONS:
            raise ValueError(f"`eviction` must be one of {EVICTIONS} or a policy, got {self.eviction!r}.")
        if not isinstance(self.eviction, str) and not _is_object_with(self.eviction, "worth"):
            raise TypeError(
                f"`eviction` must be one of {EVICTIONS} or an object with a `worth` method, got {self.eviction!r}."
            )
        _check_number("pin_share", self.pin_share, 0.0, 1.0)
        if self.store_dtype is not None and self.store_dtype not in STORE_DTYPES:
            raise ValueError(f"`store_dtype` must be None or one of {STORE_DTYPES}, got {self.store_dtype!r}.")
        if self.compact_waste is not None:
            _check_number("compact_waste", self.compact_waste, 0.0, 1.0)
        if self.share_prefix is not None:
            object.__setattr__(self, "share_prefix", _checked_prefix(self.share_prefix))
        check_ttl(self.ttl)
        _check_number("topic_similarity", self.topic_similarity, 0.0, 1.0)
        _check_number("topic_temperature", self.topic_temperature, 0.0, 1.0)
        if not isinstance(self.namespace, str):
            raise TypeError(f"`namespace` must be a string, got {self.namespace!r}.")
        for name in ("drift", "consensus", "store", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be True or False, got {getattr(self, name)!r}.")

    def replace(self, **changes) -> "SuffixCacheConfig":
        """A copy with some fields changed; unknown names raise `TypeError` that lists the legal ones."""
        check_field_names(changes)
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """JSON text of all fields. A custom `repair` or `eviction` object has none, and raises `TypeError`."""
        for name, plain in (("repair", self.repair is None), ("eviction", isinstance(self.eviction, str))):
            if not plain:
                default = getattr(type(self), name)
                raise TypeError(
                    f"`{name}` is a custom object ({getattr(self, name)!r}) and can't be written to JSON; set it to "
                    f"{default!r} first."
                )
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "SuffixCacheConfig":
        """The inverse of `to_json`. Unknown fields raise `TypeError`."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"expected a JSON object with the fields of SuffixCacheConfig, got {text[:80]!r}.")
        check_field_names(fields)
        return cls(**fields)


def check_field_names(names) -> None:
    """Raise `TypeError` for names that are no field of `SuffixCacheConfig`."""
    known = [field.name for field in dataclasses.fields(SuffixCacheConfig)]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise TypeError(f"unknown SuffixCacheConfig field(s) {unknown}; the fields are {known}.")


def check_ttl(ttl) -> None:
    """Raise `ValueError` or `TypeError` unless this is a time to live: None, or seconds."""
    if ttl is not None:
        _check_number("ttl", ttl, 0.0, float("inf"))


def _checked_prefix(prefix) -> int | tuple[int, ...]:
    """A number of tokens as it is, token ids of any kind of sequence as a tuple; of a batch there may be one row."""
    ids = prefix.tolist() if hasattr(prefix, "tolist") else prefix  # tensors, arrays, and numbers of theirs
    if isinstance(ids, int):
        _check_int("share_prefix", ids, 0, 2**31 - 1)
        return ids
    if isinstance(ids, (str, bytes, dict, set, frozenset)) or not hasattr(ids, "__iter__"):
        raise TypeError(
            f"`share_prefix` must be None, a number of tokens or a list of token ids, got {short(prefix)}."
        )
    ids = list(ids)
    if len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    ids = tuple(token.item() if hasattr(token, "item") else token for token in ids)
    for token in ids:
        _check_int("share_prefix", token, 0, 2**31 - 1)
    return ids


def short(value) -> str:
    """A value in a message: models and caches have a long `repr`."""
    text = repr(value)
    return text if len(text) <= 100 else f"a {type(value).__name__}"


def _is_object_with(value, method: str) -> bool:
    """Whether this has such a method to call: a class has none yet."""
    return not isinstance(value, type) and callable(getattr(value, method, None))


def _check_int(name: str, value, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer from {low} to {high}, got {value!r}.")
    if not low <= value <= high:  # false for NaN too
        raise ValueError(f"`{name}` must be from {low} to {high}, got {value}.")


def _check_number(name: str, value, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a number from {low} to {high}, got {value!r}.")
    if not low <= value <= high:  # false for NaN too
        raise ValueError(f"`{name}` must be from {low} to {high}, got {value}.")
