"""Whether the new part of a prompt is still about what a session's prompts were about: TF-IDF cosine of token ids."""

from collections import deque

import numpy as np

RECENT_PARTS = 8  # new parts that a session's topic is made of
ESTABLISHED = 3  # parts on a topic before it can be left
MIN_TOKENS = 32  # of a part that can tell: a shorter one has no room for a moved row beside its newest tokens
WARM = 0.8  # temperature of a session on its topic

RANK_OFFSET = 12  # Zipf's law, as Mandelbrot corrected it: the frequency of a token goes by 1 / (id + 12)
ODD_ENDS = 0.9  # of the largest id: marks of chat templates and, with SentencePiece, single letters have ids beyond it
LARGE_VOCABULARY = 10_000  # smaller ones have no such end
PIECE = 4  # tokens in a row that stand in every part: a template, or an instruction that comes with each question


class Topic:
    """
    The newest parts of a session's prompts.

    Args:
        threshold (`float`): Cosine below which a new part has left the topic.
        cold (`float`): The session's temperature then.

    Attributes:
        temperature (`float`): `WARM`, or `cold` from a part that left the topic until one that goes on with it.
        similarity (`float`, *optional*): Of the newest part that could be told.
    """

    def __init__(self, threshold: float, cold: float):
        self.threshold = threshold
        self.cold = cold
        self.temperature = WARM
        self.similarity: float | None = None
        self._parts: deque[np.ndarray] = deque(maxlen=RECENT_PARTS)
        self._largest = 0  # id that was seen

    def observe(self, ids: np.ndarray) -> bool:
        """
        Take the token ids of a new part; True if it has left the topic, of which nothing is remembered then. Its first
        token does not count: where a conversation goes on, it is the last one of the answer before.
        """
        part = np.asarray(ids, dtype=np.int64)[1:]
        if len(part) == 0:
            return False
        self._largest = max(self._largest, int(part.max()))
        left = False
        if len(part) >= MIN_TOKENS and self._parts:
            own, *others = without_frame([part, *self._parts])
            self.similarity = similarity(own, others, self._largest)
            left = self.similarity < self.threshold and len(self._parts) >= ESTABLISHED
            self.temperature = self.cold if left else WARM
        if left:
            self._parts.clear()
        self._parts.append(part)
        return left


def similarity(part: np.ndarray, others: list[np.ndarray], largest: int = 0) -> float:
    """
    Cosine of the TF-IDF vectors of a part and of others taken together, 0 to 1, with sublinear term frequencies
    (Salton and Buckley 1988).

    A handful of parts hardly tell which tokens are rare; that the ids of a vocabulary are given by frequency does. So
    the inverse document frequency over the parts, smoothed, is multiplied by the squared logarithm of the id.

    Args:
        part (`np.ndarray` of int, `[tokens]`), others (list of the same, at least one): Token ids.
        largest (`int`, *optional*): The largest id that was seen. Of a large vocabulary, the ids near it do not count.
    """
    tokens, places = np.unique(np.concatenate([part, *others]), return_inverse=True)
    borders = np.cumsum([0, len(part), *map(len, others)])
    counts = np.stack(
        [np.bincount(places[a:b], minlength=len(tokens)) for a, b in zip(borders, borders[1:], strict=False)]
    )
    seen_in = (counts > 0).sum(axis=0)
    weights = np.log1p(np.maximum(tokens, 0) / RANK_OFFSET) ** 2 * (2 + np.log((2 + len(others)) / (1 + seen_in)))
    if largest >= LARGE_VOCABULARY:
        weights[tokens > ODD_ENDS * largest] = 0.0

    def vector(frequencies: np.ndarray) -> np.ndarray:
        return np.where(frequencies > 0, 1 + np.log(np.maximum(frequencies, 1)), 0.0) * weights

    a, b = vector(counts[0]), vector(counts[1:].sum(axis=0))
    norm = np.sqrt((a @ a) * (b @ b))
    return float(min(1.0, a @ b / norm)) if norm else 0.0


def without_frame(parts: list[np.ndarray]) -> list[np.ndarray]:
    """The parts without the pieces that stand in each of them; those that are too short to tell have no say in it."""
    pieces = []
    for part in parts:
        codes = np.zeros(max(0, len(part) - PIECE + 1), dtype=np.int64)
        for place in range(PIECE):
            codes = codes * 1_000_003 + part[place : place + len(codes)]  # may overflow: a code, no number
        pieces.append(codes)
    everywhere: np.ndarray | None = None
    for part, codes in zip(parts, pieces, strict=True):
        if len(part) >= MIN_TOKENS:
            everywhere = codes if everywhere is None else np.intersect1d(everywhere, codes)
    if everywhere is None:
        return parts
    kept = []
    for part, codes in zip(parts, pieces, strict=True):
        starts = np.flatnonzero(np.isin(codes, everywhere))
        keep = np.ones(len(part), dtype=bool)
        keep[(starts[:, None] + np.arange(PIECE)).reshape(-1)] = False
        kept.append(part[keep])
    return kept
