"""What all handles on one store share."""

import threading
import weakref
from collections.abc import Callable

from .admission import Admission
from .attention import own_implementation
from .bound import Auditor, builtin
from .bound.rule import Rule
from .calibrating import fingerprint
from .capabilities import CapabilityTable
from .config import SuffixCacheConfig
from .events import Events
from .identity import Identity, IdentityTable
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

    def identity(self, model, tokens: int) -> Identity:
        """The model's identity now; rows of identities that can never return are forgotten."""
        identity, gone = self.identities.get(model, tokens)
        for old in gone:
            self.store.forget(old)
        self.store.forget_lost(self.identities.lost)
        return identity

    def rule(self, config: SuffixCacheConfig, admitted: Admission) -> Rule:
        """What predicts the KL of a call, and holds `max_kl`."""
        known = self.calibration
        foreign = known.is_foreign(fingerprint(config, admitted.capability, admitted.identity.digest))
        return Rule(known, config.max_kl, config.workload, self.auditor.extra_margin, foreign)

    def stats_of(self, scope: Scope) -> CacheStats:
        """The totals of one session. Those that the store has forgotten begin anew."""
        store = self.store
        with self._lock:
            if len(self._session_stats) > 2 * len(store.sessions) + MAX_OLD_STATS:
                known = set(store.sessions)
                self._session_stats = {each: held for each, held in self._session_stats.items() if each in known}
            if scope not in self._session_stats:
                self._session_stats[scope] = CacheStats(
                    bytes_used=lambda: store.total_of(scope, lambda shelf: shelf.bytes_used),
                    bytes_total=lambda: store.total_of(scope, lambda shelf: shelf.bytes_used),
                    segments=lambda: store.total_of(scope, lambda shelf: len(shelf.segments)),
                    evictions=lambda: store.total_of(scope, lambda shelf: shelf.evictions),
                    expirations=lambda: store.expired_of(scope),
                )
            return self._session_stats[scope]


def revival(owned: Owned, make: Callable, config: SuffixCacheConfig, scope: Scope) -> Callable:
    """What makes a handle on the same store again, None once that is gone, and does not keep it alive until then."""
    held = weakref.ref(owned)

    def revive():
        alive = held()
        return None if alive is None else make(alive, config, scope)

    return revive
