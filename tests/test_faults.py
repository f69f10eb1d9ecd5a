"""Every allocation, copy and write fails once: the right answer or the fault itself, and a store in order."""

import pytest
import torch

import fault_sites
from fault_sites import KINDS_OF_FAULT, SCENARIOS, Fault, Sites, failing
from hf_suffix_cache import generation, loading, request
from hf_suffix_cache.store import store as stores
from hf_suffix_cache.store.files import Folder

QUICK = {  # every so many sites, so that each kind of site is among them; `python -m benchmarks.faults` takes all
    "shifted hit": 23,
    "refused call": 5,
    "handed out view": 29,
    "next turn": 13,
    "full store": 7,
    "small rows": 41,
    "new session": 9,
    "loaded rows": 7,
    "compaction": 5,
    "registering": 7,
    "saving": 6,
    "settling": 9,
}


def checked(scenario: str, kind: str, folder, step: int = 1, first: int = 1) -> int:
    """Have sites fail; returns how many did."""
    cases = [case for case in Sites(scenario, kind, folder).cases(step, first) if case.place != "not reached"]
    faults = [f"{case.place} ({case.number}): {case.fault}" for case in cases if case.fault is not None]
    assert faults == []
    return len(cases)


@pytest.mark.parametrize("scenario", QUICK)
def test_what_fails_once_ends_in_a_right_answer(scenario, tmp_path):
    step = QUICK[scenario]
    assert checked(scenario, "out of memory", tmp_path, step, 1 + len(scenario) % step) > 1


@pytest.mark.parametrize("scenario", ["saving", "loaded rows"])
def test_a_full_disk_leaves_the_old_store(scenario, tmp_path):
    found = checked(scenario, "disk full", tmp_path, 3)
    assert found > 3 or scenario != "saving"


@pytest.mark.parametrize("scenario", ["shifted hit", "saving"])
def test_an_interrupt_at_a_site_leaves_a_store_in_order(scenario, tmp_path):
    assert checked(scenario, "interrupt", tmp_path, 17, 3) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS_OF_FAULT)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_site_of_every_scenario(scenario, kind, tmp_path):
    sites = checked(scenario, kind, tmp_path, 9 if scenario == "first use" else 1)
    assert sites or kind == "disk full" or scenario == "expiry"


def test_sites_are_those_that_there_are(tmp_path):
    """Slabs, copies, insertions and files are all among them."""
    places = set()

    class Places(Fault):
        def _site(self, frame, event, arg):
            place = super()._site(frame, event, arg)
            places.update(() if place is None else [place])
            return place

    for scenario in ("cold call", "shifted hit", "saving", "full store"):
        for kind in ("runtime", "disk full"):
            action = Sites(scenario, kind, tmp_path / scenario / kind)._start(0)
            with failing(Places(kind, None)):
                action()
    for end in (": Slab.__init__", ": BlockPool.allocate", ": copy_rows", ": WindowIndex.add", ": PrefixIndex.add"):
        assert any(place.endswith(end) for place in places), end
    for name in ("open", "fsync", "replace", "write"):
        assert f"store/files.py: {name}" in places, places


# -- controls -------------------------------------------------------------------------------------------------------


def half_a_view(monkeypatch):
    """A failed load goes on as if it had been whole."""
    right = loading.copy_rows

    def copy_rows(*args):
        try:
            right(*args)
        except RuntimeError:
            pass

    monkeypatch.setattr(loading, "copy_rows", copy_rows)


def nothing_is_mended(monkeypatch):
    """Counts stay as a fault has left them."""
    monkeypatch.setattr(stores.Store, "mend", lambda self: None)


def pins_stay(monkeypatch):
    """A call that drops its plan forgets what it had pinned, and leaves it pinned."""

    def let_go(self):
        self.view.lease.end()
        self.view.unbind()

    monkeypatch.setattr(request.Request, "_let_go", let_go)


def storing_reaches_the_caller(monkeypatch):
    """A fault in storing takes the answer from the caller."""

    def abandon(self, shelf):
        raise RuntimeError("the answer is gone")

    monkeypatch.setattr(stores.Store, "abandon", abandon)


def looking_reaches_the_caller(monkeypatch):
    """A call fails for what its model is asked before anything is looked up."""
    monkeypatch.setattr(generation, "_open", lambda model, store, options: (store.open_view(model, **options), None))


def a_save_in_place(monkeypatch):
    """Files are written where they stay."""

    def put(self, name, parts):
        with open(self.path / name, "wb") as file:
            for part in parts:
                file.write(part)
                file.flush()

    monkeypatch.setattr(Folder, "put", put)
    monkeypatch.setattr(fault_sites, "SOURCES", [*fault_sites.SOURCES, __file__])  # whose writes can fail


@pytest.mark.parametrize(
    "plant, scenario, kind, first",  # a site before the first one that shows it
    [
        (half_a_view, "new session", "runtime", 1),
        (nothing_is_mended, "new session", "runtime", 1),
        (pins_stay, "new session", "runtime", 1),
        (looking_reaches_the_caller, "cold call", "runtime", 1),
        (storing_reaches_the_caller, "next turn", "runtime", 55),
        (a_save_in_place, "saving", "disk full", 10),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_control_a_planted_fault_is_found(plant, scenario, kind, first, monkeypatch, tmp_path):
    plant(monkeypatch)
    assert any(case.fault is not None for case in Sites(scenario, kind, tmp_path).cases(1, first))
    assert torch.is_grad_enabled()
