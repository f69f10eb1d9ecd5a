"""`SuffixCache.calibrate`: prompts of the caller's, each at every level of repair, become a calibration."""

import logging
from collections import Counter
from collections.abc import Iterator

from tqdm import tqdm
from transformers import PreTrainedModel

from .bound import Calibration, LevelTrace, smallest_sample
from .bound.calibration import NO_LABEL
from .bound.conformal import check_alpha
from .bound.predictor import MIN_PROMPTS
from .registration import check_ids, encode
from .tracing import run, trace

logger = logging.getLogger("hf_suffix_cache")


def calibrate(cache, model: PreTrainedModel, prompts, alpha: float, tokenizer, owner: str) -> Calibration:
    """See `SuffixCache.calibrate`; `owner` is the `fingerprint` of model and settings."""
    check_alpha(alpha)
    labelled = list(_labelled(prompts, tokenizer))
    for _, ids in labelled:
        check_ids(model, ids)
    least = smallest_sample(alpha) + MIN_PROMPTS
    if len(labelled) < least:
        raise ValueError(
            f"`prompts` holds {len(labelled)}; alpha={alpha:g} needs at least {least} that share text with the store "
            "or with one another. Give more prompts, or a larger alpha."
        )
    scratch = type(cache)(cache.config.replace(store=True, audit_rate=0.0, settle=False, heal_rows=0)).silent()
    traces, labels = [], []
    for label, ids in tqdm(labelled, desc="calibrating", disable=len(labelled) < 2):
        traced = _traced(cache, scratch, model, ids)
        if traced is not None:
            traces.append(traced)
            labels.append(label)
    if len(traces) < least:
        raise ValueError(
            f"{len(traces)} of the {len(labelled)} prompts share text behind a changed front with this cache or with "
            f"a prompt before them; alpha={alpha:g} needs at least {least}. Give more prompts as they come in the "
            "workload, run some of it with this cache first, or take a larger alpha."
        )
    _say_left_out(labelled, labels)
    return Calibration.fit(traces, labels, alpha, owner)


def _say_left_out(labelled: list[tuple[str, list[int]]], labels: list[str]) -> None:
    """Prompts that share no text are no sample of what a bound is about, and the caller should know."""
    given, used = Counter(label for label, _ in labelled), Counter(labels)
    missing = [
        f"{given[label] - used[label]} of {given[label]} ({label})" for label in given if used[label] < given[label]
    ]
    if missing:
        logger.warning(f"calibrate left out prompts that share no moved text with anything: {', '.join(missing)}.")


def _traced(cache, scratch, model: PreTrainedModel, ids: list[int]) -> list[LevelTrace] | None:
    """A prompt's levels from the cache, else from the prompts before it, where it is kept for those behind it."""
    found = trace(cache, model, ids)
    if found is None:
        found = trace(scratch, model, ids)
    exact = scratch.silent(fidelity="exact", max_kl=None)
    run(exact, model, ids)
    return found


def _labelled(prompts, tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Label and ids of each prompt."""
    if isinstance(prompts, dict):
        for label, part in prompts.items():
            if not isinstance(label, str) or not label:
                raise TypeError(f"workload labels must be non-empty strings, got {label!r}.")
            if isinstance(part, dict):
                raise TypeError(f"a workload's prompts must be a list, got a dict for {label!r}.")
            for _, ids in _labelled(part, tokenizer):
                yield label, ids
        return
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__"):
        raise TypeError(
            f"`prompts` must be a list of prompts, or a dict of such lists by workload, got {type(prompts).__name__}."
        )
    for prompt in prompts:
        yield NO_LABEL, encode(prompt, tokenizer, special_tokens=True)


def fingerprint(config, capability, digest: str) -> str:
    """Model (by its weights' `digest`) and settings that a calibration belongs to."""
    names = ("seam_tokens", "tail_tokens", "min_match_tokens", "drift", "consensus")
    settings = " ".join(f"{name}={getattr(config, name)}" for name in names)
    return f"{capability.layout}, weights {digest[:16]}; {settings}"
