"""Totals as Prometheus text, exposition format 0.0.4 (`Content-Type: text/plain; version=0.0.4; charset=utf-8`)."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hf_suffix_cache.planning import KINDS

PREFIX = "hf_suffix_cache_"
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
OWN_LABELS = ("kind",)


class Family(NamedTuple):
    """
    A metric and its samples.

    Args:
        name (`str`): Without `PREFIX`; of a counter it ends in `_total`.
        kind (`str`): `"counter"` or `"gauge"`.
        help (`str`): What it counts.
        samples (sequence of `(dict, number)`): Labels and value of each.
    """

    name: str
    kind: str
    help: str
    samples: Iterable[tuple[dict[str, str], float]]


def families_of(now: dict) -> list[Family]:
    """The metrics of `CacheStats.to_dict()`."""

    def one(name: str, kind: str, text: str, value: float) -> Family:
        return Family(name, kind, text, [({}, value)])

    tokens = [({"kind": kind}, now[f"{kind}_tokens"]) for kind in KINDS]
    sizes = [({"kind": kind}, size) for kind, size in now["bytes_by_kind"].items()]
    return [
        one("requests_total", "counter", "Finished calls.", now["requests"]),
        one("prompt_tokens_total", "counter", "Tokens in the prompts of all calls.", now["prompt_tokens"]),
        Family("tokens_total", "counter", "Prompt tokens by what became of them; they add up to all.", tokens),
        one("computed_rows_total", "counter", "Rows run before first new tokens.", now["computed_rows"]),
        one("healed_rows_total", "counter", "Rows recomputed along with generated tokens.", now["healed_rows"]),
        one("settled_rows_total", "counter", "Rows recomputed after answers.", now["settled_rows"]),
        one("evictions_total", "counter", "Stored entries given up for room.", now["evictions"]),
        one("expirations_total", "counter", "Segments given up for their age.", now["expirations"]),
        one("turned_away_total", "counter", "Calls not kept for what is worth more.", now["turned_away"]),
        one("hit_ratio", "gauge", "Share of the prompt tokens of all calls that was served, 0 to 1.", now["hit_rate"]),
        one("segments", "gauge", "Stored segments.", now["segments"]),
        one("used_bytes", "gauge", "Bytes of used blocks, views of running calls included.", now["bytes_used"]),
        one("slab_bytes", "gauge", "Bytes of all memory that the store holds.", now["bytes_total"]),
        Family("bytes", "gauge", "Bytes by what they are there for; all but private add up to used_bytes.", sizes),
    ]


def exposition(now: dict, labels: Mapping[str, str] | None = None) -> str:
    """
    Text for a scrape.

    Args:
        now (`dict`): `CacheStats.to_dict()`.
        labels (mapping of `str` to `str`, *optional*): Put on every sample. Wrong ones raise `ValueError` or
            `TypeError`.
    """
    common = _checked(labels or {})
    lines = []
    for family in families_of(now):
        samples = [_sample(PREFIX + family.name, {**common, **own}, value) for own, value in family.samples]
        if samples:
            lines.append(f"# HELP {PREFIX}{family.name} {_escaped(family.help, quotes=False)}")
            lines.append(f"# TYPE {PREFIX}{family.name} {family.kind}")
            lines += samples
    return "\n".join(lines) + "\n"


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _escaped(text: str, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _checked(labels: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(labels, Mapping):
        raise TypeError(f"`labels` must map names to strings, got {labels!r}.")
    for name, text in labels.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"`labels` must map names to strings, got {name!r}: {text!r}.")
        if not _LABEL.fullmatch(name) or name.startswith("__") or name in OWN_LABELS:
            raise ValueError(
                f"a label's name must be letters, digits and underscores, begin with no digit and no `__`, and not be "
                f"{' or '.join(OWN_LABELS)}; got {name!r}."
            )
    return dict(labels)
