"""Scores of answers, as SQuAD counts them, and intervals of figures that come in groups."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Lower case without punctuation, articles and extra blanks, in this order, as SQuAD's own script does it."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: str, references: Sequence[str]) -> float:
    """Largest word F1 of `answer` against one of `references`."""
    return max(_f1(normalised(answer).split(), normalised(reference).split()) for reference in references)


def contained(answer: str, references: Sequence[str]) -> float:
    """1.0 if the words of a reference occur in `answer` one after another."""
    text = f" {normalised(answer)} "
    return float(any(f" {words} " in text for words in map(normalised, references) if words))


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1.0 if `answer` is one of `references`."""
    return float(any(normalised(answer) == normalised(reference) for reference in references))


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = sum((Counter(answer) & Counter(reference)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(answer), common / len(reference)
    return 2 * precision * recall / (precision + recall)


# -- intervals -----------------------------------------------------------------------------------------------------


def grouped_bootstrap(
    columns: Sequence[Sequence[float]],
    groups: Sequence[str],
    statistic: Callable[..., np.ndarray],
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """
    95 % bootstrap interval of a statistic of means. Whole groups are drawn, since prompts of one group share their
    texts, and all columns are drawn together, so what a prompt has in common to several ways stays paired.

    Args:
        columns: Figures of each way, prompt by prompt.
        groups: Group of each prompt.
        statistic: Takes one array of means per column, each `[resamples]`, and returns the statistic, `[resamples]`.
    """
    names = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    index = np.array([names[name] for name in groups])
    sums = [np.bincount(index, np.asarray(column, dtype=float), len(names)) for column in columns]
    sizes = np.bincount(index, minlength=len(names))
    drawn = np.random.default_rng(seed).integers(0, len(names), (resamples, len(names)))
    count = sizes[drawn].sum(axis=1)
    low, high = np.percentile(statistic(*(total[drawn].sum(axis=1) / count for total in sums)), [2.5, 97.5])
    return float(low), float(high)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation, ties sharing their mean rank; NaN if one side is constant."""
    a, b = _ranks(first), _ranks(second)
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, index, counts = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[index]
