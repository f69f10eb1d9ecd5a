"""`SuffixCache.calibrate`: prompts of the caller's, each at every level of repair, become a calibration."""

from collections.abc import Iterator

from tqdm import tqdm
from transformers import PreTrainedModel

from .bound import Calibration, LevelTrace
from .bound.calibration import NO_LABEL
from .bound.conformal import check_alpha
from .registration import check_ids, encode
from .tracing import run, trace


def calibrate(cache, model: PreTrainedModel, prompts, alpha: float, tokenizer) -> Calibration:
    """See `SuffixCache.calibrate`."""
    check_alpha(alpha)
    labelled = list(_labelled(prompts, tokenizer))
    for _, ids in labelled:
        check_ids(model, ids)
    scratch = type(cache)(cache.config.replace(store=True, audit_rate=0.0, settle=False, heal_rows=0)).silent()
    traces, labels = [], []
    for label, ids in tqdm(labelled, desc="calibrating", disable=len(labelled) < 2):
        traced = _traced(cache, scratch, model, ids)
        if traced is not None:
            traces.append(traced)
            labels.append(label)
    if not traces:
        raise ValueError(
            f"none of the {len(labelled)} prompts shares text behind a changed front with this cache or with a prompt "
            "before it, so there is nothing to calibrate. Give prompts as they come in the workload, or run some of "
            "it with this cache first."
        )
    return Calibration.fit(traces, labels, alpha, _fingerprint(cache, model))


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
            for _, ids in _labelled(part, tokenizer):
                yield label, ids
        return
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__"):
        raise TypeError(
            f"`prompts` must be a list of prompts, or a dict of such lists by workload, got {type(prompts).__name__}."
        )
    for prompt in prompts:
        yield NO_LABEL, encode(prompt, tokenizer, special_tokens=True)


def _fingerprint(cache, model: PreTrainedModel) -> str:
    """Model and settings that a calibration belongs to."""
    config = cache.config
    settings = f"seam_tokens={config.seam_tokens} tail_tokens={config.tail_tokens} min_match={config.min_match_tokens}"
    return f"{type(model).__name__} {cache.capability(model).layout}, {model.num_parameters()} parameters; {settings}"
