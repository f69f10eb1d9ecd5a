"""What an operator sees: totals as Prometheus text, log events, and the line that says that little is reused."""

import logging
import re
import threading

import pytest
import torch

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.causes import CAUSES, Search
from hf_suffix_cache.events import LOW_CALLS, REMEDIES, Events
from hf_suffix_cache.planning import KINDS, Span
from hf_suffix_cache.prometheus import PREFIX, families_of
from hf_suffix_cache.report import CacheStats, ReuseReport
from hf_suffix_cache.store.reading import Reading
from hf_suffix_cache.store.scopes import ANONYMOUS, Scope, session_scope
from reference import ask, stored
from tiny_models import A, B, head, make_model, new_text, old_text, question

# -- a reader of the exposition format 0.0.4, stricter than the format ------------------------------------------------

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def unescaped(text: str) -> str:
    return re.sub(r'\\[\\"n]', lambda found: ESCAPES[found.group()], text)


def labels_of(text: str) -> dict[str, str]:
    labels, at = {}, 0
    while at < len(text):
        found = LABEL.match(text, at)
        assert found, f"no label at {text[at:]!r}"
        name, value, end = found.groups()
        assert name not in labels and (end == "" or found.end() < len(text)), text
        labels[name], at = unescaped(value), found.end()
    return labels


def scraped(text: str) -> dict[str, dict]:
    """Families by name: their type, help, and samples by labels. AssertionError for what is not well formed."""
    assert text.endswith("\n") and "\r" not in text
    families: dict[str, dict] = {}
    name = None
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, _, words = line[7:].partition(" ")
            assert re.fullmatch(NAME, name) and name not in families and words, line
            assert not re.search(r"\\(?![\\n])", words), line
            families[name] = {"help": words, "type": None, "samples": {}}
        elif line.startswith("# TYPE "):
            of, _, kind = line[7:].partition(" ")
            assert of == name and families[of]["type"] is None and not families[of]["samples"], line
            assert kind in ("counter", "gauge"), line
            assert (kind == "counter") == of.endswith("_total"), line
            families[of]["type"] = kind
        else:
            found = re.fullmatch(rf"({NAME})(?:\{{(.+)\}})? (\S+)", line)
            assert found, f"not a sample: {line!r}"
            assert found.group(1) == name and families[name]["type"] is not None, f"not in its family: {line!r}"
            labels = frozenset(labels_of(found.group(2) or "").items())
            assert labels not in families[name]["samples"], f"twice: {line!r}"
            value = float(found.group(3))
            assert value >= 0, line
            families[name]["samples"][labels] = value
    assert all(family["samples"] for family in families.values())
    return families


GOOD = '# HELP a_total x\n# TYPE a_total counter\na_total{k="v"} 1\n'


@pytest.mark.parametrize(
    "text",
    [
        GOOD[:-1],
        GOOD + "\n",
        GOOD.replace("\n", "\r\n"),
        GOOD.replace("# TYPE a_total counter\n", ""),
        GOOD.replace("# HELP a_total x\n", ""),
        GOOD.replace("counter", "gauge"),
        GOOD.replace("a_total", "a"),
        GOOD + 'a_total{k="v"} 2\n',
        GOOD + 'b_total{k="v"} 2\n',
        GOOD + GOOD,
        GOOD.replace('"v"', "v"),
        GOOD.replace('"v"', '"v\\"'),
        GOOD.replace('"v"', '"v\\x"'),
        GOOD.replace('"v"', '"v",'),
        GOOD.replace('"v"', '"v",k="w"'),
        GOOD.replace("{k=", "{1k="),
        GOOD.replace(" 1\n", " -1\n"),
        GOOD.replace(" 1\n", " 1 2 3\n"),
        GOOD.replace(" x", " \\x"),
        "# HELP a_total x\n# TYPE a_total counter\n",
    ],
)
def test_control_the_reader_refuses_what_is_not_well_formed(text):
    assert scraped(GOOD)["a_total"]["samples"] == {frozenset({("k", "v")}): 1}
    with pytest.raises(AssertionError):
        scraped(text)


# -- Prometheus -------------------------------------------------------------------------------------------------------


def test_prometheus_text_says_what_the_totals_are():
    model, cache = make_model("llama"), SuffixCache()
    for ids in (A + B + question(1), head(1) + B + question(2), A + B + question(1)):
        ask(model, ids, cache)
    now, families = cache.stats.to_dict(), scraped(cache.stats.prometheus())
    assert all(name.startswith(PREFIX) for name in families)

    def value(name: str, **labels) -> float:
        return families[PREFIX + name]["samples"][frozenset(labels.items())]

    assert value("requests_total") == 3 == now["requests"]
    assert value("prompt_tokens_total") == now["prompt_tokens"]
    assert [value("tokens_total", kind=kind) for kind in KINDS] == [now[f"{kind}_tokens"] for kind in KINDS]
    assert sum(families[PREFIX + "tokens_total"]["samples"].values()) == now["prompt_tokens"]
    assert value("hit_ratio") == now["hit_rate"] > 0
    assert value("segments") == now["segments"] > 0
    assert value("used_bytes") == now["bytes_used"] > 0 and value("slab_bytes") == now["bytes_total"]
    sizes = families[PREFIX + "bytes"]["samples"]
    assert {dict(labels)["kind"]: size for labels, size in sizes.items()} == now["bytes_by_kind"]
    private = sizes[frozenset({("kind", "private")})]
    assert sum(sizes.values()) - private == value("used_bytes")


def test_every_total_has_a_metric():
    """Whatever is added to the totals must be added to the text: each of them is set apart and looked for in it."""
    kinds = {"exact": 1, "waste": 1}
    now = {name: value for name, value in CacheStats(bytes_by_kind=lambda: kinds).to_dict().items()}
    missing = []
    for number, name in enumerate(now):
        changed = {**now, name: {"exact": 12345, "waste": 1} if name == "bytes_by_kind" else 12345 + number}
        before = [list(family.samples) for family in families_of(now)]
        after = [list(family.samples) for family in families_of(changed)]
        missing += [name] if before == after else []
    assert missing == []


def test_a_store_without_calls_has_a_text_too():
    families = scraped(SuffixCache().stats.prometheus())
    assert families[PREFIX + "requests_total"]["samples"] == {frozenset(): 0}
    assert families[PREFIX + "hit_ratio"]["samples"] == {frozenset(): 0}
    assert PREFIX + "bytes" not in scraped(CacheStats().prometheus())  # no kinds: no family without samples


@pytest.mark.parametrize("text", ['a"b', "a\\b", "a\nb", "\\n", '\\"', "", "ä, b=c}", "a\\\nb"])
def test_labels_are_put_on_every_sample_and_escaped(text):
    stats = SuffixCache().stats
    families = scraped(stats.prometheus({"model": text, "replica": "1"}))
    for family in families.values():
        for labels in family["samples"]:
            assert {"model": text, "replica": "1"}.items() <= dict(labels).items()


@pytest.mark.parametrize(
    "labels, error",
    [
        ({"kind": "x"}, ValueError),
        ({"__name__": "x"}, ValueError),
        ({"1a": "x"}, ValueError),
        ({"a-b": "x"}, ValueError),
        ({"": "x"}, ValueError),
        ({"a\n": "x"}, ValueError),
        ({"a": 1}, TypeError),
        ({1: "a"}, TypeError),
        (["a"], TypeError),
    ],
)
def test_wrong_labels_are_named(labels, error):
    with pytest.raises(error, match="label"):
        CacheStats().prometheus(labels)


def test_the_reader_of_prometheus_reads_it_too():
    parser = pytest.importorskip("prometheus_client.parser")
    text = SuffixCache().stats.prometheus({"model": 'a"\\\n'})
    got = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    want = {(name, labels): v for name, family in scraped(text).items() for labels, v in family["samples"].items()}
    assert got == want


def test_a_sessions_text_tells_of_it_alone():
    model, cache = make_model("llama"), SuffixCache()
    ask(model, A + question(1), cache.session("alice"))
    bob = scraped(cache.session("bob").stats.prometheus())
    assert not any(value for family in bob.values() for value in family["samples"].values())
    alice = scraped(cache.session("alice").stats.prometheus())
    assert alice[PREFIX + "requests_total"]["samples"] == {frozenset(): 1}


# -- events -----------------------------------------------------------------------------------------------------------

BUILT_IN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
WORDS = {"event", "scope", "session", "cause", "reason"}


class Keeper(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record):
        self.records.append(record)

    def of(self, event: str) -> list[logging.LogRecord]:
        return [record for record in self.records if record.event == event]


@pytest.fixture
def told():
    """What the events' logger is told while somebody listens."""
    logger, keeper = logging.getLogger("hf_suffix_cache.events"), Keeper()
    before = logger.level, logger.propagate
    logger.addHandler(keeper)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield keeper
    logger.removeHandler(keeper)
    logger.setLevel(before[0])
    logger.propagate = before[1]


def extras(record) -> dict:
    return {name: value for name, value in vars(record).items() if name not in BUILT_IN}


def test_hits_and_misses_are_told_with_the_numbers_of_their_reports(told):
    model, cache = make_model("llama"), SuffixCache()
    reports = [ask(model, ids, cache).report for ids in (A + B + question(1), head(1) + B + question(2))]
    miss, hit = told.records
    assert (miss.event, hit.event) == ("miss", "hit")
    for record, report in zip((miss, hit), reports, strict=True):
        for name in [f"{kind}_tokens" for kind in KINDS] + ["prompt_tokens", "computed_rows", "generated_tokens"]:
            assert getattr(record, name) == getattr(report, name)
        assert record.hit_rate == report.hit_rate and record.expected_kl == report.expected_kl
        assert record.total_seconds == report.timings["total"] > 0
        assert record.scope == "anonymous" and record.session is None
        assert f"{report.prompt_tokens} tokens" in record.getMessage()
    assert miss.cause == "empty" and hit.shifted_tokens > 0


def test_nothing_is_told_unless_somebody_listens(caplog):
    model, cache = make_model("llama"), SuffixCache()
    with caplog.at_level(logging.WARNING):
        ask(model, A + question(1), cache)
    assert not [record for record in caplog.records if record.name == "hf_suffix_cache.events"]
    with caplog.at_level(logging.INFO, logger="hf_suffix_cache.events"):  # control
        ask(model, A + question(1), cache)
    assert [record.event for record in caplog.records if record.name == "hf_suffix_cache.events"] == ["hit"]


def test_runs_of_the_packages_own_are_no_events(told):
    model, cache = make_model("llama"), SuffixCache(audit_rate=1.0)
    ask(model, A + B + question(1), cache)
    ask(model, head(1) + B + question(2), cache)  # which is audited: another run of the model
    cache.settle(model)
    assert [record.event for record in told.records] == ["miss", "hit", "audit"]


def test_audits_are_told(told):
    model, cache = make_model("llama"), SuffixCache(audit_rate=1.0)
    ask(model, A + B + question(1), cache)
    ask(model, head(1) + B + question(2), cache.session("alice"))
    assert told.of("audit") == []  # nothing approximate yet
    ask(model, head(2) + B + question(3), cache)
    (record,), (audit,) = cache.audits.records, told.of("audit")
    assert (audit.true_kl, audit.bound, audit.covered) == (record.true, None, None) and audit.true_kl > 0


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_expiries_are_told_with_the_next_call(told):
    clock = Clock()
    model, cache = make_model("llama"), SuffixCache(fidelity="exact", clock=clock)
    alice = cache.session("alice", ttl=60)
    ask(model, A + question(1), alice)
    ask(model, B + question(2), alice)
    ask(model, A + question(1), cache.session("bob", ttl=None))
    clock.now += 59
    ask(model, new_text(20, 1), cache)
    assert told.of("expiry") == []
    clock.now += 1
    ask(model, new_text(20, 2), cache)
    (record,) = told.of("expiry")
    assert record.count == 2 == cache.stats.expirations
    assert record.session == told.records[0].session is not None and record.scope == "session"
    assert cache.session("bob").stats.expirations == 0


def test_evictions_are_told_with_the_next_call(told):
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", max_bytes=420 * 3 * 2 * 2 * 16 * 4, keep_conversations=0)
    for number in range(12):
        ask(model, old_text(90, number), cache.session(number % 2), steps=1)
    evictions = told.of("eviction")
    assert sum(record.count for record in evictions) == cache.stats.evictions > 0
    sessions = {record.session for record in told.of("miss")}
    assert len(sessions) == 2 and {record.session for record in evictions} <= sessions


def test_events_name_no_session_and_quote_no_text(told, monkeypatch):
    """Every attribute of every record is a number, or one of a few words."""
    model, cache = make_model("llama"), SuffixCache(audit_rate=1.0, namespace="tenant")
    secret = cache.session("secret-name")
    for ids in (A + B + question(1), head(1) + B + question(2)):
        ask(model, ids, secret)
    ask(model, A + question(1), secret, use_cache=False)

    def broken(self, ids):
        raise ValueError(f"can't take {ids.tolist()}")

    monkeypatch.setattr(Reading, "match", broken)
    report = ask(model, A + question(1), secret).report
    assert str(A)[:20].strip("[") in report.reason  # control: the fault quotes the prompt
    assert told.of("miss")[-1].reason == "reuse failed: ValueError"
    assert len(told.records) >= 5
    for record in told.records:
        words = " ".join([record.getMessage(), *(str(value) for value in extras(record).values())])
        assert "secret-name" not in words and "tenant" not in words
        for name, value in extras(record).items():
            assert value is None or isinstance(value, (bool, int, float)) or name in WORDS, name
        assert getattr(record, "cause", None) in (None, *CAUSES)
        assert len(re.findall(r"\d+", record.getMessage())) <= 6  # counts, and no list of tokens


def test_sessions_are_hashed_with_a_salt():
    first, second = Events(), Events()
    alice, bob = session_scope("", "alice"), session_scope("", "bob")
    assert first.session_hash(alice) == first.session_hash(session_scope("", "alice"))
    hashes = [first.session_hash(scope) for scope in (alice, bob, session_scope("", 1), session_scope("", "1"))]
    hashes += [first.session_hash(session_scope("a", "lice")), first.session_hash(session_scope("al", "ice"))]
    assert len(set(hashes)) == len(hashes)
    assert first.session_hash(alice) != second.session_hash(alice)
    assert first.session_hash(ANONYMOUS) is None and first.session_hash(Scope("shared")) is None


def test_handlers_may_ask_the_cache():
    """No lock is held while an event is told: another thread that asks the store is not kept waiting."""
    clock = Clock()
    model, cache = make_model("llama"), SuffixCache(clock=clock, audit_rate=1.0)
    logger, stuck, asked = logging.getLogger("hf_suffix_cache.events"), [], []

    class Asking(logging.Handler):
        def emit(self, record):
            thread = threading.Thread(target=lambda: (cache.stats.to_dict(), cache.explain(model, A)), daemon=True)
            thread.start()
            thread.join(timeout=5)
            asked.append(record.event)
            stuck.extend([record.event] if thread.is_alive() else [])

    handler = Asking()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        ask(model, A + B + question(1), cache.session("alice", ttl=10))
        ask(model, head(1) + B + question(2), cache.session("alice", ttl=10))
        clock.now += 11
        ask(model, A + question(3), cache)
        assert {"hit", "miss", "audit", "expiry"} <= set(asked) and stuck == []
        with cache._store.lock:  # control: under the store's lock it would be
            thread = threading.Thread(target=cache.stats.to_dict, daemon=True)
            thread.start()
            thread.join(timeout=0.2)
            assert thread.is_alive()
        thread.join(timeout=5)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


# -- why a call is served little --------------------------------------------------------------------------------------


def test_what_is_served_well_is_not_looked_into():
    model, cache = make_model("llama"), SuffixCache()
    ask(model, A + B + question(1), cache)
    assert ask(model, A + B + question(2), cache).report.causes == {}
    assert ask(model, old_text(60, 8), cache).report.causes == {"unstored": 59, "last": 1}


def test_nobody_waits_for_it(monkeypatch):
    model, cache, seen = make_model("llama"), SuffixCache(), []
    note = Search.note

    def watched(search, report, *args):
        seen.append("first_token" in report.timings)
        note(search, report, *args)

    monkeypatch.setattr(Search, "note", watched)
    ask(model, A + question(1), cache)
    assert seen == [True]


def test_the_first_call_of_a_session_and_of_a_cache():
    model, cache = make_model("llama"), SuffixCache()
    assert ask(model, A + question(1), cache).report.causes["empty"] == len(A + question(1)) - 1
    assert ask(model, A + question(1), cache.session("alice")).report.causes["session"] > 0
    assert "session" not in ask(model, B + question(2), cache.session("alice")).report.causes


def test_a_changed_model():
    model, cache = make_model("llama"), SuffixCache()
    ask(model, A + question(1), cache)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    causes = ask(model, A + question(1), cache).report.causes
    assert causes == {"state": len(A + question(1)) - 1, "last": 1}
    assert ask(model, B + question(2), cache).report.causes["unstored"] > 0  # control: from then on it is known


def test_text_that_may_not_be_moved():
    model = make_model("llama")
    exact = stored(model, A + B + question(1), fidelity="exact")
    assert ask(model, head(1) + A + B + question(2), exact).report.causes["unmoved"] == len(A + B)
    model = make_model("gpt2")
    front = stored(model, A + B + question(1))
    assert ask(model, head(1) + A + B + question(2), front).report.causes["front"] == len(A + B)


def test_pieces_that_are_too_short():
    model = make_model("llama")
    cache = stored(model, A + B + question(1))
    pieces = [part for number in range(4) for part in (new_text(6, 900 + number), A[8 * number : 8 * number + 11])]
    ids = [token for piece in pieces for token in piece] + new_text(30, 950)
    assert ask(model, ids, cache).report.causes["short"] >= 4 * 8
    moved = stored(model, A + B + question(1), min_match_tokens=8, seam_tokens=2)  # control
    assert ask(model, ids, moved).report.prompt_tokens - moved.last_report.new_tokens >= 4 * 8


def test_plain_forwards_that_want_all_logits_say_so():
    model, cache = make_model("llama"), SuffixCache()
    ids = torch.tensor([A + B])
    with cache.attach(model), torch.no_grad():
        model(ids)
        model(ids)
        assert cache.last_report.causes == {} and "logits" in cache.last_report.reason
        model(ids + 1, logits_to_keep=5)
    assert cache.last_report.causes == {"unstored": len(A + B) - 5, "last": 5}


# -- a low hit rate ---------------------------------------------------------------------------------------------------


def of(served: int, computed: int, causes=None, reason=None, repaired: int = 0) -> ReuseReport:
    """A report of so many tokens."""
    spans, at = [], 0
    for kind, count in (("exact", served), ("repaired", repaired), ("new", computed)):
        if count:
            spans.append(Span(at, at + count, kind))
            at += count
    return ReuseReport(spans=(tuple(spans),), causes=causes or {}, reason=reason)


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "commonest reason" in record.getMessage()]


def test_a_low_hit_rate_is_told_once_with_the_commonest_reason(caplog):
    events = Events()
    for number in range(LOW_CALLS):
        assert lines(caplog) == []
        causes = {"short": 60, "unstored": 20, "last": 1} if number else {"unstored": 81}
        events.finished(of(19, 81, causes), ANONYMOUS)
    (line,) = lines(caplog)
    assert line.startswith("19 % of the tokens of the newest 50") and "min_match_tokens" in line
    assert "explain" in line and not events.wants_causes
    for _ in range(3 * LOW_CALLS):
        events.finished(of(0, 100, {"unstored": 99, "last": 1}), ANONYMOUS)
    assert len(lines(caplog)) == 1


def test_a_hit_rate_that_is_not_low_is_not_told(caplog):
    events = Events()
    for _ in range(3 * LOW_CALLS):
        events.finished(of(20, 80), ANONYMOUS)
    for _ in range(LOW_CALLS // 2):  # not low over all of the newest calls yet
        events.finished(of(40, 60), ANONYMOUS)
        events.finished(of(10, 90, {"unstored": 90}), ANONYMOUS)
    assert lines(caplog) == [] and events.wants_causes
    for _ in range(LOW_CALLS):  # control
        events.finished(of(10, 90, {"unstored": 90}), ANONYMOUS)
    assert len(lines(caplog)) == 1


def test_long_prompts_count_for_more(caplog):
    events = Events()
    for _ in range(LOW_CALLS // 2):
        events.finished(of(9, 1), ANONYMOUS)
        events.finished(of(0, 1000, {"unstored": 1000}), ANONYMOUS)
    assert lines(caplog)[0].startswith("<1 %")


@pytest.mark.parametrize("cause", [cause for cause in REMEDIES if cause != "repaired"])
def test_every_cause_has_a_sentence(caplog, cause):
    events = Events()
    for _ in range(LOW_CALLS):
        events.finished(of(0, 100, {cause: 80, "last": 1}), ANONYMOUS)
    assert REMEDIES[cause] in lines(caplog)[0] and cause in CAUSES


def test_causes_of_what_is_not_served_all_have_a_sentence():
    assert set(CAUSES) - set(REMEDIES) == {"exact", "carried", "shifted", "tokenised", "broken", "refused"}


def test_recomputed_and_refused_calls_have_a_sentence(caplog):
    events = Events()
    for _ in range(LOW_CALLS):
        events.finished(of(5, 15, repaired=80), ANONYMOUS)
    assert REMEDIES["repaired"] in lines(caplog)[0]
    events = Events()
    for number in range(LOW_CALLS):
        events.finished(of(0, 90, reason="autocast is on" if number % 3 else "use_cache=False"), ANONYMOUS)
    assert "reuse was refused: autocast is on" in lines(caplog)[1]


def test_evictions_are_named_where_the_text_seems_new(caplog):
    for evictions in (0, 1234):
        events = Events(lambda evictions=evictions: evictions)
        for _ in range(LOW_CALLS):
            events.finished(of(0, 100, {"unstored": 99}), ANONYMOUS)
    without, named = lines(caplog)
    assert "max_bytes" not in without and "1,234 evictions; see `max_bytes`" in named


def test_registering_is_not_meant_to_find_anything(caplog):
    model, cache = make_model("llama"), SuffixCache()
    cache.register(model, [old_text(20, 600 + number) for number in range(LOW_CALLS + 5)], at="front")
    assert cache.stats.requests > LOW_CALLS and cache.stats.hit_rate < 0.2 and lines(caplog) == []


def test_new_texts_make_a_cache_say_so(caplog):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    for number in range(LOW_CALLS + 10):
        ask(model, old_text(30, 300 + number), cache.using(fidelity="exact"), steps=1)
    (line,) = lines(caplog)
    assert "the text is new" in line
    again = SuffixCache(fidelity="exact")  # control: one text, again and again
    for _ in range(LOW_CALLS + 10):
        ask(model, old_text(30, 300), again, steps=1)
    assert len(lines(caplog)) == 1


def test_sessions_with_one_text_make_a_cache_say_so(caplog):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    for number in range(LOW_CALLS):
        ask(model, A + question(1), cache.session(number), steps=1)
    assert "first call of a session" in lines(caplog)[0] and "share_prefix" in lines(caplog)[0]


def test_threads_are_told_once(caplog):
    events = Events()

    def work():
        for _ in range(2 * LOW_CALLS):
            events.finished(of(0, 10, {"unstored": 10}), ANONYMOUS)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(caplog)) == 1
