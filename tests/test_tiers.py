"""Rows that lie far away: folders that fsspec opens, and reading that is slower than computing."""

import sys
import threading
import uuid

import pytest

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.store import readahead, remote
from hf_suffix_cache.store.files import INDEX, Speed
from hf_suffix_cache.store.mapped import StoredRows
from hf_suffix_cache.store.remote import RemoteFolder, folder_of
from reference import ask, check_pool, in_threads, same_as_vanilla
from test_filing import passages
from test_persistence import fill, later, plan_of, served, two_stores, which_store
from tiny_models import A, B, C, head, make_model, question

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def url():
    """A folder of its own in memory."""
    name = f"memory://{uuid.uuid4().hex}/store"
    yield name
    fsspec.filesystem("memory").rm(name.removeprefix("memory://").split("/")[0], recursive=True)


def files_at(url) -> dict[str, bytes]:
    system = fsspec.filesystem("memory")
    root = url.removeprefix("memory://")
    return {path.rsplit("/", 1)[-1]: system.cat_file(path) for path in system.ls(root, detail=False)}


@pytest.fixture
def fetched(monkeypatch):
    """(Name, start, stop) of all that is read of files far away."""
    seen, real = [], RemoteFolder._range

    def read(self, name, start, stop):
        seen.append((name, start, stop))
        return real(self, name, start, stop)

    monkeypatch.setattr(RemoteFolder, "_range", read)
    return seen


# -- folders far away -----------------------------------------------------------------------------------------------


def test_what_was_saved_far_away_is_served_as_before(url):
    model, same, cache = make_model(), make_model(), SuffixCache()
    conversation = fill(model, cache)
    cache.save(url)
    assert INDEX in files_at(url) and not [name for name in files_at(url) if name.endswith((".tmp", ".lock"))]
    loaded = SuffixCache.load(url)
    for prompt in later(conversation):
        before, after = ask(model, prompt, cache), ask(same, prompt, loaded)
        assert plan_of(after.report) == plan_of(before.report) and after.tokens() == before.tokens()
        check_pool(loaded)


def test_only_rows_that_are_asked_for_are_fetched(url, fetched):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    for text in (A, B, C):
        ask(model, text + question(1), cache)
    cache.save(url)
    loaded = SuffixCache.load(url, fidelity="exact")
    assert not [name for name, _, _ in fetched if name.startswith("rows")]
    for _ in range(2):
        assert same_as_vanilla(model, B + question(2), loaded.using(store=False)).report.exact_tokens >= len(B)
    rows = [stop - start for name, start, stop in fetched if name.startswith("rows")]
    size = sum(len(data) for name, data in files_at(url).items() if name.startswith("rows"))
    assert len(rows) == 1 and rows[0] < size / 2


def test_only_what_is_new_is_sent(url, monkeypatch):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache)
    first = cache.save(url)
    ask(model, B + question(1), cache)
    second = cache.save(url)
    assert second.bytes_kept == first.bytes_written and second.bytes_written > 0
    before = files_at(url)
    loaded = SuffixCache.load(url, fidelity="exact")
    assert loaded.save(url).bytes_written == 0
    assert {name for name in files_at(url) if name.startswith("rows")} == {n for n in before if n.startswith("rows")}
    loaded.clear()
    loaded.save(url)
    assert not [name for name in files_at(url) if name.startswith("rows")]  # swept


def test_texts_are_registered_far_away(url):
    model, texts = make_model(), passages(20)
    cache = SuffixCache(fidelity="exact")
    cache.register(model, texts, at="front", folder=url)
    again = SuffixCache(fidelity="exact")
    again.register(model, texts + [A], at="front", folder=url)
    assert 0 < again.stats.computed_rows <= len(A)
    for text in (texts[3], texts[11], A):
        for each in (cache, SuffixCache.load(url, fidelity="exact")) if text is not A else (again,):
            assert same_as_vanilla(model, text + question(1), each).report.exact_tokens >= len(text)


@pytest.mark.parametrize("which", ["index", "tokens", "rows"])
def test_a_flipped_bit_far_away_is_noticed(which, url):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache)
    cache.save(url)
    (name,) = (each for each in files_at(url) if each.startswith(which))
    data = bytearray(files_at(url)[name])
    data[-200] ^= 4
    fsspec.filesystem("memory").pipe_file(url.removeprefix("memory://") + "/" + name, bytes(data))
    if which != "rows":
        with pytest.raises(ValueError, match="checksum"):
            SuffixCache.load(url)
        return
    loaded = SuffixCache.load(url, fidelity="exact")
    assert same_as_vanilla(model, A + question(2), loaded).report.exact_tokens == 0
    check_pool(loaded)


def test_a_save_that_fails_far_away_leaves_a_whole_store(url, monkeypatch):
    model, (old, new) = two_stores()
    old.save(url)
    system, sent = type(fsspec.filesystem("memory")), []
    for failing in range(4):  # rows, tokens, index; none

        def put(self, *arguments, real=system.put_file, calls=sent, failing=failing, **options):
            calls.append(0)
            if len(calls) > failing:
                raise OSError("the line is dead")
            return real(self, *arguments, **options)

        sent.clear()
        new._store.dormant.stored.clear()
        with monkeypatch.context() as patch:
            patch.setattr(system, "put_file", put)
            if failing < 3:
                with pytest.raises(OSError, match="the line is dead"):
                    new.save(url)
            else:
                new.save(url)
        assert which_store(model, url) == int(failing == 3)


def test_a_line_that_is_dead_costs_reuse_and_no_rows(url, monkeypatch):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache)
    cache.save(url)
    loaded = SuffixCache.load(url, fidelity="exact").using(store=False)

    def dead(self, *arguments, **options):
        raise TimeoutError("nobody there")

    with monkeypatch.context() as patch:
        patch.setattr(type(fsspec.filesystem("memory")), "cat_file", dead)
        assert served(same_as_vanilla(model, A + question(2), loaded).report) == 0
        with pytest.raises(OSError, match="nobody there"):
            loaded.save(url + "2")
    assert same_as_vanilla(model, A + question(2), loaded).report.exact_tokens >= len(A)
    check_pool(loaded)


def test_who_loads_while_somebody_saves_finds_one_of_the_stores(url, monkeypatch):
    """There are no locks between processes: what the index named may be swept before it is read."""
    model, (old, new) = two_stores()
    old.save(url)
    real, saved = RemoteFolder.read, []

    def read(self, name, limit):
        data = real(self, name, limit)
        if name == INDEX and len(saved) == 0:
            saved.append(0)
            with monkeypatch.context() as patch:  # as another process, which has other locks
                patch.setattr(remote, "_locks", remote.defaultdict(threading.Lock))
                new.save(url)
        return data

    monkeypatch.setattr(RemoteFolder, "read", read)
    assert which_store(model, url) == 1 and saved


def test_copies_go_with_who_made_them(url):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache)
    cache.save(url)
    folder = folder_of(url)
    path = folder.path
    assert path.is_dir() and path.stat().st_mode & 0o077 == 0
    del folder
    assert not path.exists()


def test_places_that_there_are_not(monkeypatch, tmp_path):
    cache = SuffixCache()
    with pytest.raises(ValueError, match="no place that fsspec knows"):
        cache.save("nowhere://x/y")
    with pytest.raises(ValueError, match="names no folder; add one, as in memory://store"):
        cache.save("memory://")
    with pytest.raises(FileNotFoundError, match="no store in memory://none/here"):
        SuffixCache.load("memory://none/here")
    cache.save(f"file://{tmp_path}/a")  # a local folder after all: with locks
    assert (tmp_path / "a" / "save.lock").exists() and SuffixCache.load(tmp_path / "a").stats.segments == 0
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r"hf-suffix-cache\[remote\]"):
        SuffixCache.load("memory://x/y")
    SuffixCache.load(tmp_path / "a")  # which needs none


# -- what is computed sooner than read ------------------------------------------------------------------------------


def saved_texts(model, tmp_path) -> None:
    cache = SuffixCache(fidelity="exact")
    for text in (A + B, C):
        ask(model, text + question(1), cache)
    cache.save(tmp_path)


def make_slow(loaded, seconds: float) -> None:
    """As if reading a row's bytes took so long; what was measured of the model is 10 ms a row."""
    store = loaded._store
    store.usage.seconds_of = lambda pool: 10e-3
    for file in {stored.file for stored in store.dormant.stored.values()}:
        row = 3 * 2 * 2 * 16 * 4
        file.folder.speed = Speed()
        file.folder.speed.note(1000 * row, 1000 * seconds)


@pytest.mark.parametrize("fidelity", ["exact", "balanced"])
def test_rows_are_read_only_if_that_is_faster_than_computing_them(fidelity, tmp_path):
    model = make_model()
    saved_texts(model, tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity=fidelity).using(store=False)
    loaded._store.shelf(loaded._identity(model, 0), shared_place(loaded), loaded.capability(model).shapes)
    make_slow(loaded, 20e-3)
    report = same_as_vanilla(model, A + B + question(2), loaded).report
    assert served(report) == 0 and "faster than reading them from disk" in report.reason
    readahead.wait(30)  # it was read for the next time
    report = same_as_vanilla(model, A + B + question(2), loaded).report
    assert report.exact_tokens >= len(A + B) and report.reason is None
    make_slow(loaded, 5e-3)  # control: the other text, from a disk that is fast enough
    assert same_as_vanilla(model, C + question(2), loaded).report.exact_tokens >= len(C)
    check_pool(loaded)


def shared_place(loaded):
    from hf_suffix_cache.store.scopes import Place

    return Place(loaded._scope)


def test_a_few_rows_of_a_long_text_are_not_worth_its_reading(tmp_path):
    model = make_model()
    saved_texts(model, tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact").using(store=False)
    loaded._store.shelf(loaded._identity(model, 0), shared_place(loaded), loaded.capability(model).shapes)
    make_slow(loaded, 5e-3)
    assert served(same_as_vanilla(model, A[:20] + question(3), loaded).report) == 0
    readahead.wait(30)
    make_slow(loaded, 5e-3)
    assert served(same_as_vanilla(model, A[:20] + question(3), loaded).report) == 20


def test_a_text_is_worth_reading_for_all_that_it_gives(tmp_path):
    """Each of its runs alone would be computed sooner."""
    model, cache = make_model(), SuffixCache()
    ask(model, A + B + C + question(1), cache)
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path).using(store=False)
    loaded._store.shelf(loaded._identity(model, 0), shared_place(loaded), loaded.capability(model).shapes)
    pieces = [A[:30], B[:30], C[:30]]
    rows = len(next(iter(loaded._store.dormant.stored)))
    for count, read in ((1, False), (3, True)):
        make_slow(loaded, 10e-3 * 60 / rows)  # as long as 60 rows take
        report = ask(model, head(2) + sum(pieces[:count], []) + question(2), loaded).report
        assert (report.shifted_tokens > 0) is read
        if not read:
            readahead.wait(30)
            for stored in loaded._store.dormant.stored.values():
                stored.is_read = False


def test_short_reads_change_no_plan(tmp_path):
    model = make_model()
    saved_texts(model, tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact").using(store=False)
    loaded._store.shelf(loaded._identity(model, 0), shared_place(loaded), loaded.capability(model).shapes)
    make_slow(loaded, 0.2e-3)
    loaded._store.usage.seconds_of = lambda pool: 0.1e-3
    assert same_as_vanilla(model, A + B + question(2), loaded).report.exact_tokens >= len(A + B)


def test_what_is_not_known_yet_is_read(tmp_path):
    model = make_model()
    saved_texts(model, tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    assert same_as_vanilla(model, A + B + question(2), loaded).report.exact_tokens >= len(A + B)
    speeds = {stored.file.folder.speed for stored in loaded._store.dormant.stored.values()}
    assert [speed.seconds(1) is not None and speed.seconds(1) > 0 for speed in speeds] == [True]


def test_reading_takes_no_part_in_what_a_row_costs(tmp_path, monkeypatch):
    """Else a slow disk would make the model look slow, and reading from it worth while."""
    model = make_model()
    saved_texts(model, tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    real = StoredRows.read

    def read(self):
        if not self.is_read:
            threading.Event().wait(0.5)
        return real(self)

    monkeypatch.setattr(StoredRows, "read", read)
    report = ask(model, A + B + question(2) * 3, loaded).report
    assert report.exact_tokens >= len(A + B) and report.timings["materialise"] >= 0.5
    (pool,) = loaded._store.pools.values()
    assert loaded._store.usage.seconds_of(pool) * report.computed_rows < 0.4


def test_others_go_on_while_rows_are_read(tmp_path, monkeypatch):
    model = make_model()
    saved_texts(model, tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    ask(model, question(7), loaded)  # wakes the shelf
    reading, go_on, real = threading.Event(), threading.Event(), StoredRows.read

    def read(self):
        if not self.is_read:
            reading.set()
            assert go_on.wait(60)
        return real(self)

    monkeypatch.setattr(StoredRows, "read", read)

    def waits():
        assert ask(model, A + B + question(2), loaded).report.exact_tokens >= len(A + B)

    def goes_on():
        assert reading.wait(60)
        ask(model, question(8), loaded)  # needs the store, and no rows in files
        go_on.set()

    in_threads([waits, goes_on])
    check_pool(loaded)


def test_several_are_read_at_a_time(monkeypatch):
    together = threading.Barrier(3, timeout=30)

    class Slow:
        is_read = False

        def announce(self):
            pass

        def read(self):
            together.wait()
            self.is_read = True

    texts = [Slow() for _ in range(3)]
    readahead.read(texts)
    assert all(text.is_read for text in texts)
