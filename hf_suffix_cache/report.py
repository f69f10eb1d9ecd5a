"""What requests reused: `ReuseReport` of one, with its table and pictures, and `CacheStats`, the totals of all."""

import math
import textwrap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from hf_suffix_cache.planning import KINDS, Span
from hf_suffix_cache.prometheus import exposition
from hf_suffix_cache.strip import Strip, count_tokens, percent

TIMINGS = ("lookup", "plan", "materialise", "repair", "first_token", "total")
_SPAN_FIELDS = ("start", "stop", "kind", "shift", "segment")


@dataclass
class ReuseReport:
    """
    What one request reused, moved, recomputed and ran. All counts are sums over the caller's rows; pads never count.

    The five token counts are read off the spans by `set_spans`, so that they can't disagree with them. `prompt_tokens`
    is kept as given, so that `check` compares two independent numbers; left at 0 it is taken from the spans too.

    Args:
        prompt_tokens (`int`): Tokens in the prompt.
        spans (`tuple` of `tuple` of `Span`): Per row of the batch, half-open spans that cover its prompt once.
        computed_rows (`int`): Batch x queries as the first decoder layer saw them before the first new token.
        equivalent_rows (`float`): The same with each row weighted by the share of the layers that it ran through; less
            than `computed_rows` only where a policy lets rows leave a forward early.
        capability_rows (`int`): Rows run to measure the model at its first use.
        generated_tokens (`int`): Tokens generated.
        residual (`float`, *optional*): How far the repaired rows were from what they are now: mean relative squared
            difference of keys and values in the upper half of the layers.
        expected_kl (`float`, *optional*): Predicted KL(full prefill || this answer) of the first new token in nats; of
            a batch the largest. None where nothing approximate was served, or nothing is known to predict it from.
        level (`str`, *optional*): Under `max_kl`, the level of repair that the bound was held with.
        features (`list` of `dict`): Per prompt, what `expected_kl` was predicted from.
        healed_rows (`int`): Rows that were recomputed along with the generated tokens; not among the counts above.
        reason (`str`, *optional*): Why reuse was refused or cut short, one sentence.
        causes (`dict`): Tokens by cause, before repair (see `causes.CAUSES`). Looked for only where little was served,
            and only until the cache has told of a low hit rate, or while somebody listens to its events.
        timings (`dict`): Seconds: `lookup`, `plan`, `materialise`, `repair`, `first_token`, `total`.
    """

    prompt_tokens: int = 0
    exact_tokens: int = field(default=0, init=False)
    carried_tokens: int = field(default=0, init=False)
    shifted_tokens: int = field(default=0, init=False)
    repaired_tokens: int = field(default=0, init=False)
    new_tokens: int = field(default=0, init=False)
    computed_rows: int = 0
    equivalent_rows: float = 0.0
    capability_rows: int = 0
    generated_tokens: int = 0
    residual: float | None = None
    expected_kl: float | None = None
    level: str | None = None
    features: list[dict[str, float]] = field(default_factory=list, repr=False)
    healed_rows: int = 0
    spans: tuple[tuple[Span, ...], ...] = field(default=(), repr=False)
    reason: str | None = None
    causes: dict[str, int] = field(default_factory=dict, repr=False)
    timings: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMINGS, 0.0))

    def __post_init__(self):
        self.set_spans(self.spans)

    def set_spans(self, spans_per_row: Iterable[Iterable[Span]]) -> None:
        """
        Take the spans of each row of the batch and count their tokens.

        Raises `ValueError` and changes nothing if a row's spans don't cover `[0, length)` once, in order. The spans
        are copied as plain `Span`s, so that a report keeps no stored row or text alive.
        """
        spans = tuple(_plain(row) for row in spans_per_row)
        counts = count_tokens(spans)
        self.spans = spans
        for kind, count in counts.items():
            setattr(self, f"{kind}_tokens", count)
        self.prompt_tokens = self.prompt_tokens or sum(counts.values())

    def take_features(self, features: list[dict[str, float]], rule=None) -> None:
        """Take what each prompt shows of its error, and what `rule` expects of that."""
        self.features = features
        approximate = [found for found in features if found]
        residuals = [math.exp(found["residual"]) for found in approximate if not math.isnan(found["residual"])]
        self.residual = sum(residuals) / len(residuals) if residuals else None
        expected = [rule.expected_kl(found) for found in approximate] if rule is not None else []
        self.expected_kl = max(expected) if expected and None not in expected else None

    @property
    def hit_rate(self) -> float:
        """Share of the prompt that was served and not computed, 0 to 1."""
        return _hit_rate(self)

    def check(self) -> None:
        """Raise `ValueError` unless exact + carried + shifted + repaired + new == prompt, and as the spans say."""
        counts = _counts_of(self)
        if sum(counts.values()) != self.prompt_tokens:
            parts = " + ".join(f"{kind} {count}" for kind, count in counts.items())
            raise ValueError(
                f"the report does not add up: {parts} = {sum(counts.values())} of {self.prompt_tokens} prompt tokens."
            )
        if counts != count_tokens(self.spans):
            raise ValueError(f"the report's counts {counts} are not those of its spans, {count_tokens(self.spans)}.")

    def to_dict(self) -> dict:
        """All attributes as JSON-ready values; `spans` is a list of lists of dicts."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["spans"] = [
            [{name: getattr(span, name) for name in _SPAN_FIELDS} for span in row] for row in self.spans
        ]
        values["features"] = [
            {name: None if math.isnan(value) else value for name, value in found.items()} for found in self.features
        ]
        values["timings"] = {name: float(seconds) for name, seconds in self.timings.items()}
        return values

    def __str__(self) -> str:
        rows = f" in {len(self.spans)} rows" if len(self.spans) > 1 else ""
        lines = [f"ReuseReport: {self.prompt_tokens:,} prompt tokens{rows}, {percent(self.hit_rate)} reused"]
        lines += _table(_counts_of(self), self.prompt_tokens)
        measured = f", and {self.capability_rows:,} to measure the model" if self.capability_rows else ""
        healed = f", healed {self.healed_rows:,} rows" if self.healed_rows else ""
        generated = f"generated {self.generated_tokens:,} tokens{healed}"
        lines += _wrap(f"computed {self.computed_rows:,} rows{measured}; {generated}")
        if self.carried_tokens or self.shifted_tokens:
            level = f", at level {self.level}" if self.level else ""
            expected = "not known" if self.expected_kl is None else f"{self.expected_kl:.4f} nats"
            residual = "" if self.residual is None else f"; residual of repair {self.residual:.3f}"
            lines += _wrap(f"approximate: expected KL of the first token {expected}{level}{residual}")
        parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.timings.items())
        lines += _wrap(f"seconds: {parts}") if any(self.timings.values()) else []
        lines += _wrap(f"reason: {self.reason}") if self.reason else []
        return "\n".join(lines)

    def strip(self, width: int = 80, color: bool = True) -> str:
        """
        The prompt as one bar per row and a legend with counts, no line longer than `width` (at least 32) columns.

        `color=True` uses the 256 colours of common terminals, two cells to a column; otherwise plain ASCII marks. All
        rows share one scale. Cells are shared out so that each kind has about its share of a bar, and at least one.
        """
        return Strip(self.spans).text(width, color)

    def html(self, tokens: Sequence | None = None) -> str:
        """
        The prompt as a coloured strip with a legend and, given `tokens`, its text in the same colours.

        Args:
            tokens (`list[str]`, or one such list per row, *optional*): The text of each prompt token without pads,
                for example from `tokenizer.convert_ids_to_tokens`.
        """
        facts = f"{self.computed_rows:,} rows computed, {self.generated_tokens:,} tokens generated"
        if self.timings.get("first_token"):
            facts += f", first token after {self.timings['first_token']:.3f} s"
        reason = f"<div>{escape(self.reason)}</div>" if self.reason else ""
        return (
            '<div style="font:13px/1.6 system-ui,sans-serif;max-width:960px">'
            f"<div><b>{self.prompt_tokens:,}</b> prompt tokens, <b>{percent(self.hit_rate)}</b> reused; {facts}</div>"
            f"{Strip(self.spans).html(tokens)}{reason}</div>"
        )

    def _repr_html_(self) -> str:
        return self.html()

    def plot(self, tokens: Sequence | None = None, ax=None):
        """
        The strip as a matplotlib plot (`pip install hf_suffix_cache[plot]`); returns the axes.

        Args:
            tokens (`list[str]`, or one such list per row, *optional*): The text of each prompt token without pads:
                labels every token of prompts up to 80 tokens, and the start of each wide span of longer ones.
            ax (`matplotlib.axes.Axes`, *optional*): Where to draw; a new figure by default.
        """
        return Strip(self.spans).plot(tokens, ax)


class CacheStats:
    """
    Totals over all requests of a store. Thread-safe.

    Args:
        bytes_used, bytes_total, segments, evictions, bytes_by_kind, expirations, turned_away (callables without
            arguments, *optional*): Ask the store at each reading, so that these are never stale. They are called
            without holding the lock.
        lock (*optional*): A lock to share with the owner; its own by default.
    """

    def __init__(
        self,
        bytes_used: Callable[[], int] = int,
        bytes_total: Callable[[], int] = int,
        segments: Callable[[], int] = int,
        evictions: Callable[[], int] = int,
        lock=None,
        bytes_by_kind: Callable[[], dict[str, int]] = dict,
        expirations: Callable[[], int] = int,
        turned_away: Callable[[], int] = int,
    ):
        self.requests = 0
        self.prompt_tokens = 0
        self.exact_tokens = 0
        self.carried_tokens = 0
        self.shifted_tokens = 0
        self.repaired_tokens = 0
        self.new_tokens = 0
        self.computed_rows = 0
        self.healed_rows = 0
        self.settled_rows = 0
        self._gauges = (bytes_used, bytes_total, segments, evictions, expirations, turned_away)
        self._bytes_by_kind = bytes_by_kind
        self._lock = lock or threading.Lock()

    def update(self, report: ReuseReport) -> None:
        """Add a finished request."""
        with self._lock:
            self.requests += 1
            self.prompt_tokens += report.prompt_tokens
            self.exact_tokens += report.exact_tokens
            self.carried_tokens += report.carried_tokens
            self.shifted_tokens += report.shifted_tokens
            self.repaired_tokens += report.repaired_tokens
            self.new_tokens += report.new_tokens
            self.computed_rows += report.computed_rows
            self.healed_rows += report.healed_rows

    def count_settled(self, rows: int) -> None:
        """Add rows that were run after an answer, to replace approximate ones."""
        with self._lock:
            self.settled_rows += rows

    @property
    def hit_rate(self) -> float:
        """(exact + carried + shifted) / prompt, 0 to 1."""
        with self._lock:
            return _hit_rate(self)

    @property
    def bytes_used(self) -> int:
        return self._gauges[0]()

    @property
    def bytes_total(self) -> int:
        return self._gauges[1]()

    def bytes_by_kind(self) -> dict[str, int]:
        """
        Bytes of used blocks by what they are there for, which add up to `bytes_used`: `exact`, `derived` and `means`
        rows; `extents` (kept conversations' rows that their recipes give as well), `views` of running calls, `waste`.
        And `private`: bytes outside the pool, of running calls that `max_bytes` has no room for.
        """
        return self._bytes_by_kind()

    @property
    def segments(self) -> int:
        return self._gauges[2]()

    @property
    def evictions(self) -> int:
        return self._gauges[3]()

    @property
    def expirations(self) -> int:
        """Segments that were given up for their age."""
        return self._gauges[4]()

    @property
    def turned_away(self) -> int:
        """Calls whose rows were not kept, as what was there is worth more. No fault: reports don't speak of it."""
        return self._gauges[5]()

    def to_dict(self) -> dict:
        """All attributes, JSON-ready; the counters are those of one moment."""
        with self._lock:
            values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
            values["hit_rate"] = _hit_rate(self)
        gauges = ("bytes_used", "bytes_total", "segments", "evictions", "expirations", "turned_away")
        values |= {name: getattr(self, name) for name in gauges}
        return values | {"bytes_by_kind": self.bytes_by_kind()}

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """
        All attributes as Prometheus text (exposition format 0.0.4): names begin with `hf_suffix_cache_`. The counters
        are those of one moment.

        Args:
            labels (mapping of `str` to `str`, *optional*): Put on every sample, to tell several caches apart.
        """
        return exposition(self.to_dict(), labels)

    def __str__(self) -> str:
        now = self.to_dict()
        head = f"CacheStats: {now['requests']:,} requests, {now['prompt_tokens']:,} prompt tokens"
        lines = [f"{head}, {percent(now['hit_rate'])} reused"]
        lines += _table({kind: now[f"{kind}_tokens"] for kind in KINDS}, now["prompt_tokens"])
        lines += _wrap(f"computed {now['computed_rows']:,} rows")
        used, total = now["bytes_used"] / 2**20, now["bytes_total"] / 2**20
        store = f"store: {now['segments']:,} segments, {used:,.1f} of {total:,.1f} MiB, {now['evictions']:,} evictions"
        kinds = [f"{kind} {size / 2**20:,.1f}" for kind, size in now["bytes_by_kind"].items() if size]
        return "\n".join(lines + _wrap(store) + (_wrap(f"MiB: {', '.join(kinds)}") if kinds else []))


def _plain(row: Iterable[Span]) -> tuple[Span, ...]:
    """One row's spans as `Span`s of ints, checked to cover `[0, length)` once and in order."""
    spans, end = [], 0
    for span in row:
        if span.start != end:
            raise ValueError(f"spans must cover a prompt once and in order: got [{span.start}, {span.stop}) at {end}.")
        end = int(span.stop)
        spans.append(Span(int(span.start), end, span.kind, int(span.shift), span.segment))
    return tuple(spans)


def _counts_of(report: ReuseReport) -> dict[str, int]:
    return {kind: getattr(report, f"{kind}_tokens") for kind in KINDS}


def _hit_rate(totals: ReuseReport | CacheStats) -> float:
    served = totals.exact_tokens + totals.carried_tokens + totals.shifted_tokens
    return served / totals.prompt_tokens if totals.prompt_tokens else 0.0


def _table(counts: dict[str, int], total: int) -> list[str]:
    width = len(f"{total:,}")
    return [f"  {k:<8} {n:>{width},} {percent(n / total if total else 0.0):>6}" for k, n in counts.items()]


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent="  ", subsequent_indent="    ")
