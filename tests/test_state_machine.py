"""Everything that a user can do, in any order, against plain lists of what each scope has seen (see machine_world)."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from hf_suffix_cache import cache as caches
from hf_suffix_cache import loading
from hf_suffix_cache.identity import IdentityTable
from hf_suffix_cache.store import persistence
from hf_suffix_cache.store.scopes import Scope
from hf_suffix_cache.store.shelf import Shelf
from machine_world import ANONYMOUS, ROW, SESSIONS, SHARED, World, draw_step
from tiny_models import forget

# peft 0.21 asks transformers 5.24 for an attribute under its old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SCOPES = st.sampled_from([*SESSIONS, ANONYMOUS, SHARED])
FIDELITIES = st.sampled_from(["exact", "balanced", "fast"])
DRAWS = st.lists(st.integers(0, 41), min_size=4, max_size=4)
NUMBERS = st.integers(0, 41)
KINDS = {
    "roomy": dict(max_bytes=64 << 20),
    "full": dict(max_bytes=420 * ROW, block_size=4, keep_conversations=1),
    "small rows": dict(max_bytes=900 * ROW, store_dtype="int8", keep_conversations=1, block_size=4),
    "old": dict(max_bytes=300 * ROW, eviction="lru", consensus=False, compact_waste=None, keep_conversations=0),
}


def machine(folder, kind: str) -> type[RuleBasedStateMachine]:
    """The machine for hypothesis, over a world with these settings."""

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.world = World(folder.with_name(f"store-{np.random.default_rng().integers(1 << 60)}"), **KINDS[kind])

        @rule(scope=SCOPES, fidelity=FIDELITIES, draws=DRAWS, way=st.integers(0, 4), ttl=st.integers(0, 2))
        def generate(self, scope, fidelity, draws, way, ttl):
            self.world.generate(scope, fidelity, draws, way, ttl)

        @rule(scope=SCOPES, fidelity=FIDELITIES, draws=DRAWS)
        def go_on(self, scope, fidelity, draws):
            self.world.generate(scope, fidelity, [0, *draws[1:]])

        @rule(scope=SCOPES, victim=st.integers(0, 3), moved=st.booleans(), fidelity=FIDELITIES)
        def guess(self, scope, victim, moved, fidelity):
            self.world.guess(scope, victim, moved, fidelity)

        @rule(scope=SCOPES, fidelity=FIDELITIES, first=DRAWS, second=DRAWS)
        def batch(self, scope, fidelity, first, second):
            self.world.batch(scope, fidelity, first, second)

        @rule(text=NUMBERS, front=st.booleans(), pin=st.booleans())
        def register(self, text, front, pin):
            self.world.register(text, front, pin)

        @rule()
        def unpin(self):
            self.world.unpin()

        @rule(scope=SCOPES)
        def settle(self, scope):
            self.world.settle(scope)

        @rule(scope=SCOPES, draws=DRAWS)
        def explain(self, scope, draws):
            self.world.explain(scope, draws)

        @rule(seconds=st.sampled_from([1, 20, 51, 130]))
        def wait(self, seconds):
            self.world.wait(seconds)

        @rule(steps=st.integers(1, 4))
        def evict(self, steps):
            self.world.evict(steps)

        @rule(scope=st.sampled_from([*SESSIONS, None]))
        def clear(self, scope):
            self.world.clear(scope)

        @rule()
        def compact(self):
            self.world.compact()

        @rule()
        def save(self):
            self.world.save()

        @rule()
        def load(self):
            self.world.load()

        @rule(at=st.integers(0, 14))
        def crash(self, at):
            self.world.crash(at)

        @rule(number=st.integers(0, 2))
        def change_weights(self, number):
            self.world.change_weights(number)

        @rule(number=st.integers(0, 2))
        def switch_adapter(self, number):
            self.world.switch_adapter(number)

        def teardown(self):
            forget(self.world.model)

    return Machine


@pytest.mark.parametrize("kind", KINDS)
def test_any_order_of_steps_is_explained_by_what_was_seen(kind, tmp_path):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    options = settings(max_examples=3, stateful_step_count=25, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(machine(tmp_path / "store", kind), settings=options)


def drawn(folder, kind: str, seed: int, steps: int) -> World:
    """So many drawn steps."""
    world, random = World(folder / f"store {kind} {seed}", **KINDS[kind]), np.random.default_rng(seed)
    for _ in range(steps):
        draw_step(world, random)
    return world


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_drawn_steps_are_explained_and_are_not_empty(kind, seed, tmp_path):
    world = drawn(tmp_path, kind, seed, 120 if seed == 0 else 500)
    for name in ("exact tokens", "approximate tokens", "compared", "loads", "crashes", "stopped", "register", "batch"):
        assert world.counts[name] > 0, name
    if kind == "roomy":
        assert world.counts["wanted tokens"] > 20


# -- controls -------------------------------------------------------------------------------------------------------


def scopes_are_mixed_up(monkeypatch):
    monkeypatch.setattr(caches, "session_scope", lambda namespace, session: Scope("session", namespace, "all"))


def sessions_read_the_anonymous_scope(monkeypatch):
    monkeypatch.setattr(
        Scope, "beside", property(lambda self: None if self.kind == "anonymous" else Scope("anonymous"))
    )


def nothing_expires(monkeypatch):
    monkeypatch.setattr(Shelf, "expire", lambda self, now, ttl: (0, now))


def weights_are_not_looked_at(monkeypatch):
    first = {}
    right = IdentityTable.get
    monkeypatch.setattr(IdentityTable, "get", lambda *a: (first.setdefault(a[1], right(*a)[0]), []))


def rows_are_off_by_one(monkeypatch):
    right = loading.copy_rows

    def copy_rows(pool, addresses, *rest):
        return right(pool, np.roll(addresses, 1) if len(addresses) > 20 else addresses, *rest)

    monkeypatch.setattr(loading, "copy_rows", copy_rows)


def keys_are_not_turned(monkeypatch):
    right = loading.copy_rows
    monkeypatch.setattr(loading, "copy_rows", lambda *a: right(*a[:5], np.zeros_like(a[5]), a[6]))


def clearing_forgets_to(monkeypatch):
    monkeypatch.setattr(caches.SuffixCache, "clear", lambda self, session=None: None)


def a_failed_save_leaves_half_a_store(monkeypatch):
    right = persistence.Folder.put

    def put(self, name, parts):
        right(self, name, list(parts)[: 1 if name.startswith("rows") else None])

    monkeypatch.setattr(persistence.Folder, "put", put)


def references_leak(monkeypatch):
    right = Shelf.unpin
    calls = iter(range(1 << 30))
    monkeypatch.setattr(Shelf, "unpin", lambda self, parts: right(self, parts[:-1] if next(calls) % 7 == 6 else parts))


FAULTS = [
    scopes_are_mixed_up,
    sessions_read_the_anonymous_scope,
    nothing_expires,
    weights_are_not_looked_at,
    rows_are_off_by_one,
    keys_are_not_turned,
    clearing_forgets_to,
    a_failed_save_leaves_half_a_store,
    references_leak,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_control_the_machine_catches_a_planted_fault(plant, monkeypatch, tmp_path):
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(3):
            drawn(tmp_path, "roomy", seed, 150)
