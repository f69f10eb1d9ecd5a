"""What the soak asks: scopes with texts of their own, shared texts, and prompts made of them."""

import sys
import zlib
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the tiny models and slow oracles of the tests

from tiny_models import FIRST_TEXT_ID, VOCAB  # noqa: E402

SESSIONS = tuple(f"user {number}" for number in range(6))
ANONYMOUS = ""
SCOPES = (ANONYMOUS, *SESSIONS)
TTL = {name: (30.0, 60.0, 120.0, None)[number % 4] for number, name in enumerate(SESSIONS)}  # of the soak's clock
DOCUMENTS = 6  # of each scope
SHARED_DOCUMENTS = 8
LONGEST = 260  # tokens, from which on a conversation is not continued


def text(random: np.random.Generator, low: int, high: int) -> list[int]:
    """Random tokens, at least `low` of them and fewer than `high`."""
    return random.integers(FIRST_TEXT_ID, VOCAB, int(random.integers(low, high))).tolist()


def documents(owner: str, count: int = DOCUMENTS) -> list[list[int]]:
    """The texts that one scope's prompts are made of, the same ones in every run."""
    random = np.random.default_rng(zlib.crc32(owner.encode()))
    return [text(random, 24, 70) for _ in range(count)]


PRIVATE = {scope: documents(f"scope {scope}") for scope in SCOPES}
SHARED = documents("shared", SHARED_DOCUMENTS)


class Traffic:
    """
    Draws the prompts of one thread.

    Args:
        seed (`int`): Seed of all draws.
    """

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self._histories: dict[tuple, list[list[int]]] = {}

    def chance(self, share: float) -> bool:
        """Whether something happens that does so in this share of all cases."""
        return bool(self.random.random() < share)

    def pick(self, options):
        """One of these, each as likely as the others."""
        return options[int(self.random.integers(len(options)))]

    def prompt(self, key: tuple, scope: str, longest: int = LONGEST) -> list[int]:
        """
        A prompt of a scope: documents in any order behind a new head or none, or an earlier prompt of the same `key`
        (of which scope and model) again, continued, or cut and continued.
        """
        earlier = [ids for ids in self._histories.get(key, []) if len(ids) < longest - 40]
        draw = self.random.random()
        if earlier and draw < 0.5:
            ids = self.pick(earlier)
            if draw < 0.1:
                return ids
            if draw < 0.2:
                return ids[: int(self.random.integers(1, len(ids) + 1))] + text(self.random, 2, 20)
            return ids + text(self.random, 2, 36)
        ids = [] if self.chance(0.4) else text(self.random, 2, 14)
        for _ in range(int(self.random.integers(1, 5))):
            ids = ids + self.pick(SHARED if self.chance(0.3) else PRIVATE[scope])
        ids = ids[: longest - 36]
        return ids + text(self.random, 4, 36)

    def guess(self, victim: str) -> list[int]:
        """What a stranger asks to find out what a scope has stored: its own texts at the front, or moved."""
        ids = [] if self.chance(0.5) else text(self.random, 2, 14)
        for _ in range(int(self.random.integers(1, 4))):
            ids = ids + self.pick(PRIVATE[victim])
        return ids + text(self.random, 4, 36)

    def keep(self, key: tuple, tokens: list[int]) -> None:
        """An answer, for later prompts to go on with."""
        if len(tokens) < LONGEST:
            self._histories[key] = [*self._histories.get(key, [])[-2:], tokens]
