"""Named sessions: how long their rows live unused, and what their prompts are about."""

import heapq
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from .scopes import Scope
from .topic import Topic


class Session:
    """
    What a store remembers of one session beside its rows.

    Args:
        ttl (`float`, *optional*): Seconds that its rows live unused; None: for ever.
        topic (`Topic`): What its prompts are about.
        now (`float`): The time.

    Attributes:
        cutoff (`float`): Rows from before this time are not moved any more: the session left their topic.
    """

    def __init__(self, ttl: float | None, topic: Topic, now: float):
        self.ttl = ttl
        self.topic = topic
        self.last_used = now
        self.cutoff = float("-inf")
        self.expired = 0  # segments that were given up for their age

    def observe(self, new_part: np.ndarray, now: float) -> bool:
        """
        Take the new part of a prompt (token ids) that is asked at `now`; True if it leaves the session's topic, so
        that what is stored is not moved into it.
        """
        left = self.topic.observe(new_part)
        if left:
            self.cutoff = now
        return left


class Sessions:
    """
    The sessions of a store, and when their shelves must be looked at next. The store's lock is held by its callers.

    Args:
        make_topic (callable): Gives a fresh `Topic`.
    """

    def __init__(self, make_topic: Callable[[], Topic]):
        self._make_topic = make_topic
        self._sessions: dict[Scope, Session] = {}
        self._due: list[tuple[float, int, tuple]] = []  # when to look at which shelf (its key): a heap
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Scope]:
        return iter(list(self._sessions))

    def get(self, scope: Scope) -> Session | None:
        """What is known of a session; None for one that is not, and for scopes that are none."""
        return self._sessions.get(scope)

    def open(self, scope: Scope, ttl: float | None, now: float) -> Session:
        """A session, made if it is new, that lives for `ttl` seconds from now on."""
        session = self._sessions.get(scope)
        if session is None:
            session = self._sessions[scope] = Session(ttl, self._make_topic(), now)
        session.ttl, session.last_used = ttl, max(session.last_used, now)
        return session

    def forget(self, scope: Scope) -> None:
        """Forget a session; no-op for one that is not known."""
        self._sessions.pop(scope, None)

    def look_at(self, key: tuple, when: float) -> None:
        """Have the shelf of this key looked at, at that time."""
        heapq.heappush(self._due, (when, next(self._numbers), key))

    def due(self, now: float) -> list[tuple]:
        """The keys of the shelves that must be looked at by now; each is forgotten here."""
        keys: dict[tuple, None] = {}
        while self._due and self._due[0][0] <= now:
            keys[heapq.heappop(self._due)[2]] = None
        return list(keys)
