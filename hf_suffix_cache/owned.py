"""What all handles on one store share."""

import threading
from collections.abc import Callable

from .attention import own_implementation
from .bound import Auditor, builtin
from .capabilities import CapabilityTable
from .config import SuffixCacheConfig
from .events import Events
from .identity import IdentityTable
from .report import CacheStats
from .settling import Settler
from .store.scopes import Scope
from .store.store import Store

MAX_OLD_STATS = 1024  # statistics of sessions that are over, before they are looked through


class Owned:
    """What all handles on one store share."""

    def __init__(self, config: SuffixCacheConfig, clock: Callable[[], float]):
        self.store = Store(config, clock)
        self.capabilities = CapabilityTable()
        self.identities = IdentityTable(own_implementation)
        self.calibration = builtin()
        self.auditor = Auditor(config.audit_rate)
        self.settler = Settler()
        self.events = Events(lambda: self.store.evictions)
        self.stats = CacheStats(
            bytes_used=lambda: self.store.bytes_used,
            bytes_total=lambda: self.store.bytes_total,
            segments=lambda: self.store.num_segments,
            evictions=lambda: self.store.evictions,
            turned_away=lambda: self.store.steward.turned_away,
            expirations=lambda: self.store.expirations,
            bytes_by_kind=lambda: self.store.bytes_by_kind(),
        )
        self._session_stats: dict[Scope, CacheStats] = {}
        self._lock = threading.Lock()

    def stats_of(self, scope: Scope) -> CacheStats:
        """The totals of one session. Those that the store has forgotten begin anew."""
        store = self.store
        with self._lock:
            if len(self._session_stats) > 2 * len(store.sessions) + MAX_OLD_STATS:
                known = set(store.sessions)
                self._session_stats = {each: held for each, held in self._session_stats.items() if each in known}
            if scope not in self._session_stats:
                self._session_stats[scope] = CacheStats(
                    bytes_used=lambda: sum(shelf.bytes_used for shelf in store.shelves_of(scope)),
                    bytes_total=lambda: sum(shelf.bytes_used for shelf in store.shelves_of(scope)),
                    segments=lambda: sum(len(shelf.segments) for shelf in store.shelves_of(scope)),
                    evictions=lambda: sum(shelf.evictions for shelf in store.shelves_of(scope)),
                    expirations=lambda: store.expired_of(scope),
                )
            return self._session_stats[scope]
