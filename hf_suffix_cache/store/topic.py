"""Whether the new part of a prompt is still about what a session's prompts were about: TF-IDF cosine of token ids."""

import math
from collections import Counter, deque

import numpy as np

RECENT_PARTS = 8  # new parts that a session's topic is made of
MIN_TOKENS = 8  # different tokens that a new part must have to tell a topic: "thanks" leaves none
WARM = 0.8  # temperature of a session on its topic


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
        self._parts: deque[Counter] = deque(maxlen=RECENT_PARTS)

    def observe(self, ids: np.ndarray) -> bool:
        """Take the token ids of a new part; True if it has left the topic, of which nothing is remembered then."""
        part = Counter(np.asarray(ids).tolist())
        if len(part) < MIN_TOKENS:
            return False
        left = False
        if self._parts:
            self.similarity = similarity(part, list(self._parts))
            left = self.similarity < self.threshold
            self.temperature = self.cold if left else WARM
        if left:
            self._parts.clear()
        self._parts.append(part)
        return left


def similarity(part: Counter, others: list[Counter]) -> float:
    """
    Cosine of the TF-IDF vectors of a part and of others taken together, 0 to 1: sublinear term frequencies, and
    smoothed inverse document frequencies over all of them (Salton and Buckley 1988).
    """
    documents = [*others, part]
    frequency = Counter(token for document in documents for token in document)
    together: Counter = sum(others, Counter())

    def vector(counts: Counter) -> dict[int, float]:
        return {
            token: (1 + math.log(count)) * (1 + math.log((1 + len(documents)) / (1 + frequency[token])))
            for token, count in counts.items()
        }

    a, b = vector(part), vector(together)
    dot = sum(weight * b[token] for token, weight in a.items() if token in b)
    norm = math.sqrt(sum(w * w for w in a.values()) * sum(w * w for w in b.values()))
    return dot / norm if norm else 0.0
