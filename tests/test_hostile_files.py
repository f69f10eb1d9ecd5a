"""Damaged, foreign and hostile files: refused, or skipped with a warning; nothing wrong is served or touched."""

import copy
import os
import pickle
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.store import files, persistence
from hf_suffix_cache.store.contents import Arrays
from hf_suffix_cache.store.files import INDEX, checksum, named_by_content, pack_index, unpack_index
from reference import ask, check_pool, same_as_vanilla
from tiny_models import A, B, C, D, head, make_model, new_text, question

PROMPTS = [A + B + question(11), head(12) + B + A + question(12), new_text(48, 5) + C + question(13), D + question(14)]

whole: list[int] = []  # exact tokens of these, where nothing is damaged
watched: list[str] | None = None  # paths that are opened, while it is a list


def watch(event: str, arguments: tuple) -> None:
    if watched is not None and event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        watched.append(os.fsdecode(arguments[0]))


sys.addaudithook(watch)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a store of all kinds of rows."""
    model, cache = make_model(), SuffixCache()
    ask(model, A + B + question(1), cache)
    first = ask(model, head(2) + B + A + question(2), cache)
    ask(model, first.tokens() + new_text(20, 1), cache)
    ask(model, new_text(48, 5) + C + question(3), cache)
    ask(model, new_text(56, 6) + C + D + question(4), cache)
    ask(model, C + question(5), cache.session("alice"))
    cache.register(model, D, at="front")
    folder = tmp_path_factory.mktemp("saved")
    cache.save(folder)
    exact = SuffixCache.load(folder, fidelity="exact").using(store=False)
    whole[:] = [ask(model, prompt, exact, steps=2).report.exact_tokens for prompt in PROMPTS]
    assert whole[0] >= len(A + B) and whole[2] >= 48 + len(C) and whole[3] >= len(D)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it, to be damaged."""
    shutil.copytree(saved, tmp_path / "store")
    return tmp_path / "store"


def outcome(folder, model=None) -> str:
    """
    `"refused"`, or what became of a store that was opened: `"whole"` or `"partial"`. Answers are right in any case,
    and the pool is whole.
    """
    model = make_model() if model is None else model
    try:
        loaded = SuffixCache.load(folder, fidelity="exact")
    except (ValueError, FileNotFoundError):
        return "refused"
    served = []
    for prompt in PROMPTS:
        served.append(same_as_vanilla(model, prompt, loaded.using(store=False), steps=2).report.exact_tokens)
        check_pool(loaded)
    return "whole" if served == whole else "partial"


def named(folder, kind: str) -> list[Path]:
    return [folder / INDEX] if kind == "index" else sorted(folder.glob(f"{kind}-*.safetensors"))


def rewrite(folder, change) -> None:
    """Change what the index says, with a checksum that is right again: what somebody could do on purpose."""
    contents = unpack_index((folder / INDEX).read_bytes(), folder)
    change(contents)
    (folder / INDEX).write_bytes(pack_index(contents))


def rewrite_arrays(folder, change) -> None:
    """The same for the arrays in the file with the tokens."""
    contents = unpack_index((folder / INDEX).read_bytes(), folder)
    record = contents["tokens"]
    path, kinds = folder / record["name"], Arrays.KINDS
    data, arrays = path.read_bytes(), {}
    offset = len(data) - sum(record[name] * kind.itemsize for name, kind in kinds.items())
    for name, kind in kinds.items():
        arrays[name] = np.frombuffer(data, kind, record[name], offset).copy()
        offset += record[name] * kind.itemsize
    change(arrays)
    start = persistence._tokens_header({name: len(array) for name, array in arrays.items()})
    parts = [start, *(arrays[name].astype(kind).tobytes() for name, kind in kinds.items())]
    record.update({name: len(array) for name, array in arrays.items()})
    record.update(name=named_by_content("tokens", checksum(parts)), size=sum(map(len, parts)))
    path.unlink()
    (folder / record["name"]).write_bytes(b"".join(parts))
    (folder / INDEX).write_bytes(pack_index(contents))


def first_segment(contents: dict, **changes) -> dict:
    shelf = next(shelf for shelf in contents["shelves"] if shelf["segments"])
    shelf["segments"][0].update(changes)
    return shelf["segments"][0]


# -- damage ---------------------------------------------------------------------------------------------------------


def test_control_the_store_is_whole(folder):
    assert outcome(folder) == "whole"
    rewrite(folder, lambda contents: None)
    rewrite_arrays(folder, lambda arrays: None)
    assert outcome(folder) == "whole"


@pytest.mark.parametrize("kind", ["index", "tokens", "rows"])
def test_a_flipped_bit_is_noticed(kind, folder, saved):
    generator, model = random.Random(kind), make_model()
    seen = set()
    for _ in range(12):
        for path in named(saved, kind):
            data = bytearray(path.read_bytes())
            place = generator.randrange(len(data) if kind != "rows" else 40_000)
            data[place] ^= 1 << generator.randrange(8)
            (folder / path.name).write_bytes(data)
        seen.add(outcome(folder, model))
    # of a file with rows the header is read by others alone, so that damage there is none to us
    assert seen <= ({"whole", "partial"} if kind == "rows" else {"refused"}), seen
    assert kind != "rows" or "partial" in seen


@pytest.mark.parametrize("kind", ["index", "tokens", "rows"])
def test_a_shortened_or_lengthened_file_is_noticed(kind, folder, saved):
    generator, model = random.Random(kind), make_model()
    for step in range(8):
        for path in named(saved, kind):
            data = path.read_bytes()
            cut = generator.randrange(len(data)) if step else 0
            (folder / path.name).write_bytes(data + b"x" if step == 7 else data[:cut])
        assert outcome(folder, model) == ("partial" if kind == "rows" else "refused")


def remove(path: Path, outside: Path) -> None:
    path.unlink()


def link(path: Path, outside: Path) -> None:
    shutil.copy(path, outside)  # what it leads to would be whole
    path.unlink()
    path.symlink_to(outside)


def folder_instead(path: Path, outside: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("instead", [remove, link, folder_instead, pipe])
@pytest.mark.parametrize("kind", ["index", "tokens", "rows"])
def test_something_else_in_the_place_of_a_file(kind, instead, folder, tmp_path):
    global watched
    outside = tmp_path / "outside"
    for path in named(folder, kind):
        instead(path, outside)
    watched = []
    try:
        assert outcome(folder) == ("partial" if kind == "rows" else "refused")
        assert str(outside) not in watched and len(watched) > 0
    finally:
        watched = None


class Payload:
    """What unpickling would run."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("kind", ["index", "tokens", "rows"])
def test_no_pickle_is_read(kind, folder, tmp_path):
    marker = tmp_path / "marker"
    for path in named(folder, kind):
        data = pickle.dumps(Payload(marker))
        path.write_bytes(data + path.read_bytes()[len(data) :])
    outcome(folder)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker)))  # control
    assert marker.exists()


def test_files_of_another_store_do_not_fit(folder, tmp_path):
    cache = SuffixCache(fidelity="exact")
    ask(make_model(), B + question(1), cache)
    cache.save(tmp_path / "other")
    for kind in ("rows", "tokens"):
        shutil.copy(named(tmp_path / "other", kind)[0], named(folder, kind)[0])
        assert outcome(folder) == ("partial" if kind == "rows" else "refused")


# -- damage that shows when rows are read ---------------------------------------------------------------------------


def damage_rows(folder, wanted) -> int:
    """Flip a bit in the rows of the segments that `wanted(record)` says; returns how many."""
    contents, count = unpack_index((folder / INDEX).read_bytes(), folder), 0
    for shelf in contents["shelves"]:
        for record in shelf["segments"]:
            if wanted(record):
                path = folder / contents["files"][record["file"]]["name"]
                with open(path, "r+b") as file:
                    file.seek(record["offset"] + 100)
                    byte = file.read(1)[0]
                    file.seek(record["offset"] + 100)
                    file.write(bytes([byte ^ 4]))
                count += 1
    return count


def test_damaged_rows_are_a_miss_with_a_reason_and_then_forgotten(tmp_path, caplog):
    model, cache = make_model(), SuffixCache(fidelity="exact", keep_conversations=0)
    ask(model, A + question(1), cache)
    ask(model, A + question(1) + B + question(2), cache)
    ask(model, C + question(3), cache)
    cache.save(tmp_path)
    longest = len(A + question(1) + B + question(2))
    assert damage_rows(tmp_path, lambda record: record["length"] >= longest) == 1
    loaded = SuffixCache.load(tmp_path, fidelity="exact").using(store=False)
    prompt = A + question(1) + B + question(4)
    got = same_as_vanilla(model, prompt, loaded)
    assert "are not what was saved" in got.report.reason and got.report.exact_tokens == 0
    assert got.report.computed_rows == len(prompt)
    assert "saved rows are forgotten" in caplog.text
    check_pool(loaded)
    # what does not depend on them is served, of what does the part before them
    got = same_as_vanilla(model, prompt, loaded)
    assert got.report.reason is None and len(A) <= got.report.exact_tokens < len(A + question(1) + B)
    assert same_as_vanilla(model, C + question(5), loaded).report.exact_tokens >= len(C)
    check_pool(loaded)


@pytest.mark.parametrize("used", [False, True])
def test_a_file_that_is_cut_short_while_it_is_mapped_is_not_touched_any_more(used, tmp_path):
    """To read what was cut off would end this process."""
    model, cache = make_model(), SuffixCache(fidelity="exact")
    ask(model, A + B + question(1), cache)
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact").using(store=False)
    loaded.explain(model, A)  # opens the file
    if used:
        assert ask(model, A + B + question(2), loaded).report.exact_tokens >= len(A + B)
    (rows,) = tmp_path.glob("rows-*")
    rows.chmod(0o600)
    os.truncate(rows, 10)
    for number in (3, 4):
        assert same_as_vanilla(model, A + B + question(number), loaded).report.exact_tokens == 0
    check_pool(loaded)


@pytest.mark.parametrize("seed", range(6))
def test_any_damaged_rows_leave_answers_and_pool_whole(seed, folder):
    """Whichever segments are damaged, means and what conversations are made of included."""
    generator, model = random.Random(seed), make_model()
    assert damage_rows(folder, lambda record: generator.random() < 0.4) > 0
    exact = SuffixCache.load(folder, fidelity="exact")
    approximate = SuffixCache.load(folder)
    for _ in range(2):
        for prompt in (*PROMPTS, head(20) + A + C + question(20)):
            same_as_vanilla(model, prompt, exact, steps=2)
            ask(model, prompt, approximate, steps=2)
            check_pool(exact)
            check_pool(approximate)
    approximate.compact()
    check_pool(approximate)


def test_damaged_rows_are_not_saved_again(folder, tmp_path, caplog):
    contents = unpack_index((folder / INDEX).read_bytes(), folder)
    number = sum(len(shelf["segments"]) for shelf in contents["shelves"])
    bad = damage_rows(folder, lambda record: record["state"] == "derived")
    assert 0 < bad < number
    saved = SuffixCache.load(folder).save(tmp_path / "again")
    assert saved.segments <= number - bad and "were not saved: they are damaged" in caplog.text
    loaded = SuffixCache.load(tmp_path / "again")
    model = make_model()
    for prompt in PROMPTS:
        assert ask(model, prompt, loaded).report.reason is None
    check_pool(loaded)


# -- what only somebody who means it can write ----------------------------------------------------------------------

DIGITS = "0" * 32
NAMES = [
    "../outside",
    "/etc/passwd",
    "rows-x.safetensors",
    "a\0b",
    f"rows-{DIGITS}.safetensors\n",
    f"rows-{DIGITS}.safetensors/../../outside",
    "index.json",
    "save.lock",
    "\ud800",
    ".",
    "",
    "x" * 10_000,
]


@pytest.mark.parametrize("name", NAMES)
def test_no_other_name_is_opened(name, folder, tmp_path):
    global watched
    (tmp_path / "outside").write_bytes(named(folder, "rows")[0].read_bytes())
    watched = []
    try:
        for change in (
            lambda contents: contents["files"][0].update(name=name),
            lambda contents: contents["tokens"].update(name=name),
        ):
            before = (folder / INDEX).read_bytes()
            rewrite(folder, change)
            assert outcome(folder) in ("refused", "partial")
            (folder / INDEX).write_bytes(before)
        assert not any("outside" in path or path.startswith("/etc") for path in watched)
    finally:
        watched = None


HUGE = 2**31 - 1
REFUSED = {
    "no shelves": lambda contents: contents.pop("shelves"),
    "shelves are no list": lambda contents: contents.update(shelves={}),
    "a shelf is no object": lambda contents: contents["shelves"].append([]),
    "an unknown field": lambda contents: contents["shelves"][0].update(code="1"),
    "saved in text": lambda contents: contents.update(saved="now"),
    "huge text": lambda contents: contents["tokens"].update(texts=2**39),
    "negative count": lambda contents: contents["tokens"].update(numbers=-1),
    "more rows than there are": lambda contents: first_segment(contents, rows=HUGE, length=HUGE),
    "no rows": lambda contents: first_segment(contents, rows=0),
    "rows as a float": lambda contents: first_segment(contents, rows=3.0),
    "rows as a truth": lambda contents: first_segment(contents, rows=True),
    "negative offset": lambda contents: first_segment(contents, offset=-64),
    "offset off the grid": lambda contents: first_segment(contents, offset=65),
    "offset behind the file": lambda contents: first_segment(contents, offset=2**40),
    "no such file": lambda contents: first_segment(contents, file=99),
    "negative file": lambda contents: first_segment(contents, file=-1),
    "no such state": lambda contents: first_segment(contents, state="moved"),
    "no such dtype": lambda contents: first_segment(contents, cold="float128"),
    "no checksum": lambda contents: first_segment(contents, checksum=""),
    "hops": lambda contents: first_segment(contents, hops=-1),
    "age": lambda contents: first_segment(contents, age=-1.0),
    "far too old": lambda contents: first_segment(contents, age=1e300),
    "reach of many distances": lambda contents: first_segment(contents, distances=999),
    "huge heads": lambda contents: contents["shelves"][0]["geometry"]["shapes"][0].update(kv_heads=2**20),
    "huge width": lambda contents: contents["shelves"][0]["geometry"]["shapes"][0].update(key_dim=2**20),
    "negative width": lambda contents: contents["shelves"][0]["geometry"]["shapes"][0].update(key_dim=-16),
    "many layers": lambda contents: contents["shelves"][0]["geometry"].update(layers=[0] * 4096),
    "too many layers": lambda contents: contents["shelves"][0]["geometry"].update(layers=[0] * 10**6),
    "layers of no shape": lambda contents: contents["shelves"][0]["geometry"].update(layers=[0, 1, 7]),
    "dtype object": lambda contents: contents["shelves"][0]["geometry"]["shapes"][0].update(dtype="O"),
    "no place": lambda contents: contents["shelves"][0].update(place=None),
    "no such scope": lambda contents: contents["shelves"][0]["place"].update(kind="everybody"),
    "anonymous with an id": lambda contents: contents["shelves"][0]["place"].update(kind="anonymous", session="x"),
    "session without one": lambda contents: contents["shelves"][0]["place"].update(kind="session", session=None),
    "regime": lambda contents: contents["shelves"][0]["place"].update(regime="zz"),
    "ttl": lambda contents: contents["shelves"][0].update(session={"ttl": -1, "left_topic": None}),
    "a file twice": lambda contents: contents["files"].append(dict(contents["files"][0])),
    "size of a file": lambda contents: contents["files"][0].update(size=-5),
    "a recipe of nobody's": lambda contents: sequences(contents)[0].update(segments=[HUGE]),
    "a recipe of nothing": lambda contents: sequences(contents)[0].update(segments=[]),
    "exact beyond its end": lambda contents: sequences(contents)[0].update(exact=HUGE),
    "a drift": lambda contents: sequences(contents)[0].update(drifts=[{"anchors": 1}]),
    "many drifts": lambda contents: sequences(contents)[0].update(drifts=[drift(HUGE)]),
    "a mean of nobody's": lambda contents: contents["shelves"][0].update(means=[10**6]),
}


def sequences(contents: dict) -> list[dict]:
    return next(shelf for shelf in contents["shelves"] if shelf["sequences"])["sequences"]


def drift(number: int) -> dict:
    return {"anchors": number, "targets": number, "tokens": number, "sources": number}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_an_index_that_lies_is_refused(change, folder):
    rewrite(folder, change)
    assert outcome(folder) == "refused"


def test_rows_that_lie_over_each_other_are_refused(folder):
    def shift(contents):
        for shelf in contents["shelves"]:
            for record in shelf["segments"]:
                record["offset"] -= 64 if record["offset"] > 20_000 else 0

    rewrite(folder, shift)
    with pytest.raises(ValueError, match="over each other"):
        SuffixCache.load(folder)


def test_a_reference_into_another_scope_is_refused(folder):
    """Whoever wrote the index: rows of one session are not found by another."""

    def borrow(contents):
        shelves = contents["shelves"]
        first = 0
        for shelf in shelves:
            if shelf["place"]["kind"] == "session":
                stolen = first
            first += len(shelf["segments"])
        shelf = next(shelf for shelf in shelves if shelf["place"]["kind"] == "anonymous")
        shelf["sequences"][0]["segments"][0] = stolen

    rewrite(folder, borrow)
    with pytest.raises(ValueError, match="another scope"):
        SuffixCache.load(folder)


ARRAYS = {
    "tokens below 0": lambda arrays: arrays["texts"].__setitem__(slice(3), -5),
    "other tokens": lambda arrays: arrays["texts"].__iadd__(1),
    "positions": lambda arrays: arrays["numbers"].__setitem__(slice(5), HUGE),
    "negative numbers": lambda arrays: arrays["numbers"].__imul__(-1),
    "all numbers": lambda arrays: arrays["numbers"].__setitem__(slice(None), 7),
    "flags": lambda arrays: arrays["flags"].__setitem__(slice(None), 255),
}


@pytest.mark.parametrize("change", ARRAYS.values(), ids=ARRAYS)
def test_arrays_that_lie_are_refused_or_skipped(change, folder):
    rewrite_arrays(folder, change)
    assert outcome(folder) in ("refused", "partial") or change is ARRAYS["flags"]


def leaves(value, path=()):
    """Places of all plain values in JSON."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))
    else:
        yield path


STRANGE = [None, True, -1, 0, 1, 2**31, 2**63, 10**40, 1.5, 1e300, "", "x", [], {}, [[]], [None] * 3, {"a": 1}]


@pytest.mark.parametrize("seed", range(4))
def test_nothing_in_an_index_brings_a_call_down(seed, folder):
    """Values of any kind in any place, with the right checksum. Rows may be taken for others; nothing may fail."""
    generator, model = random.Random(seed), make_model()
    original = unpack_index((folder / INDEX).read_bytes(), folder)
    places = list(leaves(original))
    refused = 0
    for _ in range(40):
        contents = copy.deepcopy(original)
        for path in generator.sample(places, generator.choice([1, 1, 2, 5])):
            inside = contents
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = generator.choice([*STRANGE, generator.randrange(300)])
        (folder / INDEX).write_bytes(pack_index(contents))
        try:
            loaded = SuffixCache.load(folder)
        except ValueError:
            refused += 1
            continue
        for prompt in PROMPTS[:2]:
            assert ask(model, prompt, loaded, steps=2).ids.shape == (1, len(prompt) + 2)
        check_pool(loaded)
    assert 0 < refused < 40


@pytest.mark.parametrize("seed", range(2))
def test_nothing_in_the_arrays_brings_a_call_down(seed, folder, saved):
    generator, model = np.random.default_rng(seed), make_model()
    for _ in range(15):
        shutil.rmtree(folder)
        shutil.copytree(saved, folder)

        def change(arrays):
            for name in ("texts", "numbers", "flags"):
                places = generator.integers(0, len(arrays[name]), 4)
                arrays[name][places] = generator.integers(0, 300 if name != "flags" else 2, 4)

        rewrite_arrays(folder, change)
        loaded = SuffixCache.load(folder)
        for prompt in PROMPTS:
            assert ask(model, prompt, loaded, steps=2).ids.shape == (1, len(prompt) + 2)
        check_pool(loaded)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"saved": NaN}',
        b'{"saved": ' + b"9" * 5000 + b"}",
        b'{"saved": 1, "files": [], "shelves": [], "tokens": {}}',
        b"null",
        b"",
        b"\xff\xfe",
    ],
)
def test_json_that_is_none_or_too_deep_is_refused(text, folder):
    head = b'{"format": "hf_suffix_cache store", "version": 1, "checksum": "%s", "contents": '
    (folder / INDEX).write_bytes(head % checksum([text]).encode() + text + b"}\n")
    with pytest.raises(ValueError):
        SuffixCache.load(folder)


def test_another_version_is_refused_by_name(folder):
    data = (folder / INDEX).read_bytes()
    (folder / INDEX).write_bytes(data.replace(b'"version": 1,', b'"version": 2,', 1))
    with pytest.raises(ValueError, match="version 2"):
        SuffixCache.load(folder)


def test_files_beyond_any_sense_are_not_read(folder, monkeypatch):
    monkeypatch.setattr(persistence, "MAX_INDEX_BYTES", 1000)
    with pytest.raises(ValueError, match="are the most"):
        SuffixCache.load(folder)
    with pytest.raises(ValueError, match="are the most"):  # nor written
        cache = SuffixCache()
        ask(make_model(), A + question(1), cache)
        cache.save(folder.parent / "large")
    assert files.INDEX not in os.listdir(folder.parent / "large")


def test_links_in_the_folder_are_not_written_through(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    model, cache = make_model(), SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache)
    (folder / INDEX).unlink()
    (folder / INDEX).symlink_to(outside)
    cache.save(folder)
    assert not (folder / INDEX).is_symlink()
    for name in ("save.lock", "load.lock"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside)
        with pytest.raises(ValueError, match="is a link"):
            cache.save(folder)
        (folder / name).unlink()
    assert outside.read_text() == "mine"
    assert same_as_vanilla(model, A + question(2), SuffixCache.load(folder, fidelity="exact")).report.exact_tokens


def live_tensors(cache) -> list[torch.Tensor]:
    """Copies of all memory of a cache; the NaN of free rows as a number."""
    slabs = [slab for pool in cache._store.pools.values() for slab in pool.slabs.values()]
    return [torch.nan_to_num(tensor) for slab in slabs for tensor in slab.tensors()]


def test_a_live_cache_is_not_touched(folder):
    """Whatever is opened beside it."""
    model, live = make_model(), SuffixCache(fidelity="exact")
    ask(model, A + B + question(1), live)
    before = live_tensors(live)
    data = (folder / INDEX).read_bytes()
    for change in list(REFUSED.values())[:10]:
        rewrite(folder, change)
        with pytest.raises(ValueError):
            SuffixCache.load(folder)
        (folder / INDEX).write_bytes(data)
    damage_rows(folder, lambda record: True)
    outcome(folder, model)
    assert all(map(torch.equal, before, live_tensors(live)))
    assert same_as_vanilla(model, A + B + question(2), live).report.exact_tokens >= len(A + B)
    check_pool(live)


# -- what is no folder, and locks that nobody gives back ------------------------------------------------------------


@pytest.mark.parametrize("folder, error", [(3, TypeError), (None, TypeError), ("", ValueError), ("a\0b", ValueError)])
def test_what_is_no_folder_is_named(folder, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (SuffixCache().save, SuffixCache.load):
        with pytest.raises(error, match="`folder`"):
            call(folder)
    assert list(tmp_path.iterdir()) == []


def test_what_is_a_file_or_half_a_url_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileNotFoundError, match="it is a file"):
        SuffixCache.load("file")
    for path in ("memory:/store", "s3:bucket"):
        for call in (SuffixCache().save, SuffixCache.load):
            with pytest.raises(ValueError, match="two slashes"):
                call(path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    SuffixCache().save("./memory:store")  # what the message says of folders with such a name
    assert SuffixCache.load("./memory:store").stats.segments == 0


def test_a_file_and_a_folder_in_the_place_of_an_index_are_refused_before_anything_is_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="no folder"):
        SuffixCache().save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "folder" / "index.json").mkdir(parents=True)
    with pytest.raises(ValueError, match="is a folder"):
        SuffixCache().save(tmp_path / "folder")
    assert [each.name for each in (tmp_path / "folder").iterdir()] == ["index.json"]


def test_a_lock_of_two_names_is_refused(tmp_path):
    """Both locks of a store as one file: who held the first one would wait for himself."""
    (tmp_path / "save.lock").touch()
    os.link(tmp_path / "save.lock", tmp_path / "load.lock")
    with pytest.raises(ValueError, match="more than one name"):
        SuffixCache().save(tmp_path)


def test_a_folder_in_the_place_of_a_lock_is_refused(tmp_path):
    SuffixCache().save(tmp_path)
    (tmp_path / "load.lock").unlink()
    (tmp_path / "load.lock").mkdir()
    with pytest.raises(ValueError, match="no plain file"):
        SuffixCache.load(tmp_path)


def test_a_lock_that_is_never_given_back_is_named(tmp_path, monkeypatch):
    SuffixCache().save(tmp_path)
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.2)
    with FileLock(tmp_path / "save.lock"), pytest.raises(TimeoutError, match="save.lock"):
        SuffixCache().save(tmp_path)
    assert SuffixCache.load(tmp_path) is not None


def test_ids_that_no_index_can_hold_are_refused():
    with pytest.raises(ValueError, match="64 bits"):
        SuffixCache().session(10**5000)
    assert SuffixCache().session(2**64 - 1) is not None
