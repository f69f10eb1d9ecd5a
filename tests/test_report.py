"""Reports: counts that follow the spans, and pictures that fit, escape and show every kind."""

import builtins
import gc
import json
import re
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_suffix_cache.planning import KINDS, PlanSpan, Span
from hf_suffix_cache.report import CacheStats, ReuseReport
from hf_suffix_cache.strip import MAX_ROWS, MAX_RUNS, STYLES, percent

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def spans_of(*pieces):
    """`(kind, tokens)` or `(kind, tokens, shift, segment)` pieces -> spans in a row."""
    spans, start = [], 0
    for kind, tokens, *moved in pieces:
        spans.append(Span(start, start + tokens, kind, *moved))
        start += tokens
    return tuple(spans)


ROW = spans_of(("exact", 40), ("repaired", 4, 30, 7), ("shifted", 96, 30, 7), ("carried", 20), ("new", 33))


def visible(text):
    return [ANSI.sub("", line) for line in text.split("\n")]


rows_of_spans = st.lists(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 60)), max_size=12).map(lambda row: spans_of(*row)),
    max_size=4,
)


@given(rows_of_spans)
@settings(max_examples=100, deadline=None)
def test_set_spans_any_rows_counts_each_token_once(rows):
    report = ReuseReport()
    report.set_spans(rows)
    kinds = [span.kind for row in rows for span in row for _ in range(span.start, span.stop)]
    assert {kind: getattr(report, f"{kind}_tokens") for kind in KINDS} == {kind: kinds.count(kind) for kind in KINDS}
    assert report.prompt_tokens == len(kinds)
    assert report.spans == tuple(tuple(row) for row in rows)
    report.check()


def test_set_spans_twice_counts_the_last_only():
    report = ReuseReport(prompt_tokens=193, spans=(spans_of(("new", 193)),))
    assert (report.new_tokens, report.hit_rate) == (193, 0.0)
    report.set_spans([ROW])
    assert (report.exact_tokens, report.carried_tokens, report.shifted_tokens) == (40, 20, 96)
    assert (report.repaired_tokens, report.new_tokens) == (4, 33)
    assert report.hit_rate == 156 / 193
    report.check()


@pytest.mark.parametrize(
    "row",
    [
        (Span(1, 5, "new"),),
        (Span(0, 5, "new"), Span(6, 8, "new")),
        (Span(0, 5, "new"), Span(4, 8, "new")),
        (Span(5, 8, "new"), Span(0, 5, "new")),
    ],
    ids=["late start", "gap", "overlap", "backwards"],
)
def test_set_spans_not_a_cover_raises_and_changes_nothing(row):
    report = ReuseReport(spans=(ROW,))
    before = report.to_dict()
    with pytest.raises(ValueError, match="span"):
        report.set_spans([ROW, row])
    assert report.to_dict() == before


def test_set_spans_plan_spans_keep_no_run_alive():
    """Rows and text of a segment live as long as the store wants them, not as long as a report is kept."""

    class Run:
        pass

    run = Run()
    report = ReuseReport()
    report.set_spans([[PlanSpan(np.int64(0), np.int64(9), "shifted", np.int64(-4), 3, run=run)]])
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
    assert report.spans == ((Span(0, 9, "shifted", -4, 3),),)
    assert json.loads(json.dumps(report.to_dict()))["spans"][0][0]["shift"] == -4


def test_check_missing_token_raises_with_the_sum():
    report = ReuseReport(prompt_tokens=194, spans=(ROW,))
    with pytest.raises(ValueError, match="193 of 194"):
        report.check()


def test_check_count_changed_by_hand_raises():
    report = ReuseReport(spans=(ROW,))
    report.exact_tokens, report.shifted_tokens = 41, 95
    with pytest.raises(ValueError, match="not those of its spans"):
        report.check()


def test_to_dict_is_json_with_all_attributes_of_the_contract():
    report = ReuseReport(spans=(ROW, ()), computed_rows=np.int64(37).item(), reason='a "reason"')
    report.timings["total"] = np.float32(0.5)
    values = json.loads(json.dumps(report.to_dict()))
    assert set(values) == {
        *("prompt_tokens", "computed_rows", "capability_rows", "generated_tokens", "spans", "reason", "timings"),
        *("healed_rows", "equivalent_rows", "residual", "expected_kl", "level", "features", "causes"),
        *(f"{kind}_tokens" for kind in KINDS),
    }
    assert values["spans"][1] == []
    assert values["spans"][0][1] == {"start": 40, "stop": 44, "kind": "repaired", "shift": 30, "segment": 7}
    assert set(values["timings"]) == {"lookup", "plan", "materialise", "repair", "first_token", "total"}
    assert values["timings"]["total"] == 0.5


def test_str_is_a_short_table_within_80_columns():
    report = ReuseReport(spans=(ROW, ROW), computed_rows=74, generated_tokens=8, capability_rows=12)
    report.timings = dict.fromkeys(report.timings, 123.4567)
    report.reason = "no reuse because " + "of a very long sentence " * 9 + "x" * 200
    lines = str(report).split("\n")
    assert lines[0] == "ReuseReport: 386 prompt tokens in 2 rows, 81 % reused"
    assert "  repaired   8    2 %" in lines and len(lines) < 20
    assert max(map(len, lines)) <= 80
    assert str(ReuseReport()).startswith("ReuseReport: 0 prompt tokens, 0 % reused")
    assert "seconds" not in str(ReuseReport()) and "reason" not in str(ReuseReport())
    assert len(repr(ReuseReport(spans=(spans_of(*[("new", 1), ("exact", 1)] * 1000),)))) < 500


@pytest.mark.parametrize(
    "share, text", [(0, "0 %"), (1e-5, "<1 %"), (0.014, "1 %"), (0.5, "50 %"), (0.999, ">99 %"), (1, "100 %")]
)
def test_percent_never_rounds_to_nothing_or_everything(share, text):
    assert percent(share) == text


@given(rows_of_spans, st.integers(32, 130), st.booleans())
@settings(max_examples=150, deadline=None)
def test_strip_any_spans_fits_width_and_shows_every_kind(rows, width, color):
    report = ReuseReport(spans=rows)
    text = report.strip(width, color)
    lines = visible(text)
    assert max(map(len, lines)) <= width
    assert color or text.isascii() and "\x1b" not in text
    widest = max((row[-1].stop for row in rows if row), default=0)
    for row, line in zip(rows, text.split("\n"), strict=False):
        if row and row[-1].stop * 4 >= widest:  # a much shorter row may have fewer cells than kinds
            for kind in {span.kind for span in row}:
                shown = rf"8;5;{STYLES[kind].xterm}[m;]" if color else re.escape(STYLES[kind].mark)
                assert re.search(shown, line)
    for kind in KINDS:
        count = getattr(report, f"{kind}_tokens")
        assert (f"{kind} {count:,} (" in "\n".join(lines)) == (count > 0)


def test_strip_plain_marks_are_proportional():
    report = ReuseReport(spans=(spans_of(("exact", 10), ("shifted", 20), ("new", 10)),))
    assert report.strip(43, color=False).split("\n") == [
        "=" * 10 + ">" * 20 + "." * 10 + " 40",
        "= exact 10 (25 %)  > shifted 20 (50 %)",
        ". new 10 (25 %)",
    ]


def test_strip_color_has_two_cells_a_column():
    report = ReuseReport(spans=(spans_of(("exact", 41), ("new", 39)),))
    bar = report.strip(43).split("\n")[0]
    exact, new = STYLES["exact"].xterm, STYLES["new"].xterm
    assert bar == (
        f"\x1b[38;5;{exact}m{'█' * 20}\x1b[0m\x1b[38;5;{exact};48;5;{new}m▌\x1b[0m\x1b[38;5;{new}m{'█' * 19}\x1b[0m 80"
    )


def test_strip_few_repaired_rows_in_a_long_prompt_still_show():
    report = ReuseReport(spans=(spans_of(("shifted", 6000), ("repaired", 4), ("shifted", 3996)),))
    assert report.strip(80, color=False).split("\n")[0].count(STYLES["repaired"].mark) == 1


def test_strip_scattered_repaired_rows_get_their_share():
    """3 of every 20 rows: no cell of 14 tokens has a majority of them."""
    report = ReuseReport(spans=(spans_of(*[("shifted", 17), ("repaired", 3)] * 60),))
    bar = report.strip(86, color=False).split("\n")[0]
    assert 10 <= bar.count(STYLES["repaired"].mark) <= 14


def test_strip_rows_share_one_scale_and_many_rows_are_cut():
    report = ReuseReport(spans=[spans_of(("new", 100)), spans_of(("new", 50)), ()] + [ROW] * 40)
    lines = visible(report.strip(80, color=False))
    assert lines[1].count(".") == lines[0].count(".") // 2 and lines[2].strip() == "2  0"
    assert len(lines) <= MAX_ROWS + 4 and lines[MAX_ROWS] == "and 27 more rows"
    assert "and 27 more rows" in report.html()


def test_strip_too_narrow_raises():
    with pytest.raises(ValueError, match="32"):
        ReuseReport(spans=(ROW,)).strip(width=20)


def test_html_text_is_escaped():
    report = ReuseReport(spans=(spans_of(("exact", 1), ("new", 2)),), reason="<script>alert('r')</script> & so")
    page = report.html(["<b>", "&amp;", "</div>"])
    assert "&lt;b&gt;" in page and "&amp;amp;" in page and "&lt;/div&gt;" in page
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert report._repr_html_() == report.html()
    for tag in ("div", "span", "svg", "rect", "title"):
        assert page.count(f"<{tag} ") + page.count(f"<{tag}>") == page.count(f"</{tag}>")


def test_html_spans_are_drawn_in_place_with_a_tooltip():
    page = ReuseReport(spans=(ROW,)).html()
    assert f'<rect x="44" width="96" height="1" fill="{STYLES["shifted"].colour}">' in page
    assert "<title>shifted: 44 to 140 (96 tokens), moved by +30, segment 7</title>" in page
    assert 'viewBox="0 0 193 1"' in page


def test_pictures_of_10000_alternating_tokens_take_under_100_ms_and_stay_small():
    """The worst case: each token a span of its own."""
    row = spans_of(*[(KINDS[index % 5], 1) for index in range(10_000)])
    report = ReuseReport(spans=(row,))
    words = ["word "] * 10_000
    for render in (report.strip, report._repr_html_, lambda: report.html(words), report.__str__):
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            text = render()
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.1
    assert len(report.strip()) < 10_000 and len(report.html()) < 200_000
    assert report.html().count("<rect") <= MAX_RUNS
    assert text.startswith("ReuseReport: 10,000 prompt tokens, 60 % reused")


@pytest.mark.parametrize("tokens", [["a"] * 192, [["a"] * 193], [["a"] * 193, ["a"] * 5], []])
def test_tokens_of_another_length_raise(tokens):
    report = ReuseReport(spans=(ROW, spans_of(("new", 4))))
    with pytest.raises(ValueError, match=r"\[193, 4\]"):
        report.html(tokens)
    with pytest.raises(ValueError, match=r"\[193, 4\]"):
        report.plot(tokens)


def test_plot_bars_legend_and_labels():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    short = spans_of(("exact", 3), ("new", 2))
    ax = ReuseReport(spans=(short, ROW)).plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()][0] == "exact 43 (22 %)"
    assert ax.get_xlim() == (0, 193) and len(ax.collections) == 2 and not ax.texts
    labelled = ReuseReport(spans=(short,)).plot(["$x^", "$", "\n", "b", "c"], ax=plt.subplots()[1])
    assert [text.get_text() for text in labelled.texts] == ["$x^", "$", "\n", "b", "c"]
    long = ReuseReport(spans=(ROW,)).plot(["wörd "] * 193)
    assert long.texts[0].get_text().startswith("wörd wörd") and len(long.texts) == 4  # 4 repaired rows are too narrow
    ReuseReport().plot().figure.canvas.draw()
    labelled.figure.canvas.draw()
    plt.close("all")


def test_plot_without_matplotlib_names_the_extra(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"hf_suffix_cache\[plot\]"):
        ReuseReport(spans=(ROW,)).plot()


def test_styles_cover_every_kind_once():
    assert tuple(STYLES) == KINDS
    assert len({style.mark for style in STYLES.values()}) == len(KINDS)


def test_colours_stay_apart_for_colour_blind_readers():
    """CIELAB distance of any two colours, also as seen with protan, deutan and tritan vision (Machado et al. 2009)."""
    vision = {
        "normal": np.eye(3),
        "protan": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
        "deutan": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9690]],
        "tritan": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
    }
    to_xyz = np.array([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8729]])  # white: 1, 1, 1
    for matrix in vision.values():
        colours = []
        for style in STYLES.values():
            rgb = np.array([int(style.colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
            linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
            x, y, z = np.cbrt(to_xyz @ np.clip(np.array(matrix) @ linear, 0, 1))
            colours.append((116 * y - 16, 500 * (x - y), 200 * (y - z)))
        distance = np.linalg.norm(np.array(colours)[:, None] - np.array(colours), axis=-1)
        assert distance[~np.eye(len(colours), dtype=bool)].min() > 25


def test_stats_update_sums_reports_and_asks_the_store():
    used = [0]
    stats = CacheStats(
        bytes_used=lambda: used[0], bytes_total=lambda: 1 << 30, segments=lambda: 3, evictions=lambda: 1
    )
    assert stats.hit_rate == 0.0 and stats.requests == 0
    stats.update(ReuseReport(spans=(ROW,), computed_rows=37))
    stats.update(ReuseReport(spans=(spans_of(("new", 7)),), computed_rows=7))
    used[0] = 5 << 20
    assert (stats.requests, stats.prompt_tokens, stats.computed_rows, stats.new_tokens) == (2, 200, 44, 40)
    assert (stats.exact_tokens, stats.carried_tokens, stats.shifted_tokens, stats.repaired_tokens) == (40, 20, 96, 4)
    assert stats.hit_rate == 156 / 200
    assert (stats.bytes_used, stats.bytes_total, stats.segments, stats.evictions) == (5 << 20, 1 << 30, 3, 1)
    assert json.loads(json.dumps(stats.to_dict()))["hit_rate"] == 0.78
    lines = str(stats).split("\n")
    assert lines[0] == "CacheStats: 2 requests, 200 prompt tokens, 78 % reused"
    assert lines[-1] == "  store: 3 segments, 5.0 of 1,024.0 MiB, 1 evictions"
    assert max(map(len, lines)) <= 80


def test_stats_without_a_store_are_zero():
    stats = CacheStats()
    assert (stats.bytes_used, stats.bytes_total, stats.segments, stats.evictions) == (0, 0, 0, 0)


def test_stats_gauges_may_take_the_shared_lock():
    """A store whose callables take the very lock that it shares does not deadlock."""
    lock = threading.Lock()

    def segments():
        assert lock.acquire(timeout=1)
        lock.release()
        return 1

    stats = CacheStats(segments=segments, lock=lock)
    stats.update(ReuseReport(spans=(ROW,)))
    assert stats.segments == 1 and stats.to_dict()["segments"] == 1 and "1 segments" in str(stats)


def test_stats_many_threads_lose_no_update():
    stats, report = CacheStats(), ReuseReport(spans=(ROW,), computed_rows=1)
    torn = []

    def work():
        for _ in range(300):
            stats.update(report)
            now = stats.to_dict()
            torn.append(sum(now[f"{kind}_tokens"] for kind in KINDS) != now["prompt_tokens"])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats.requests == stats.computed_rows == 2400 and stats.prompt_tokens == 2400 * 193
    assert not any(torn)
