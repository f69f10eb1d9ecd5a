"""Pictures of a prompt: each token coloured by what became of it, for a terminal, a notebook and a plot."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from hf_suffix_cache.planning import KINDS, Span


class Style(NamedTuple):
    """How one kind of span is shown: xterm colour, the same colour for HTML, ink on it, a mark for plain text."""

    xterm: int
    colour: str
    ink: str
    mark: str


# Blue: true to this very context. Orange: moved. Dark red: moved, then recomputed. Grey: computed. In CIELAB any two
# stay 29 apart under normal, protan, deutan and tritan vision; the marks tell them apart without any colour.
STYLES = {
    "exact": Style(25, "#005faf", "#ffffff", "="),
    "carried": Style(75, "#5fafff", "#000000", "~"),
    "shifted": Style(214, "#ffaf00", "#000000", ">"),
    "repaired": Style(124, "#af0000", "#ffffff", "#"),
    "new": Style(252, "#d0d0d0", "#000000", "."),
}
MAX_ROWS = 16  # rows of a batch in one picture
MAX_RUNS = 1000  # more spans than this are drawn as this many cells: no screen has more columns, and HTML stays small


class Strip:
    """
    The rows of a batch as bars on one scale, with a legend that holds the counts.

    Args:
        spans (sequence of sequences of `Span`): Per row, half-open spans that cover its prompt once and in order.
    """

    def __init__(self, spans: Sequence[Sequence[Span]]):
        self.rows = spans[:MAX_ROWS]
        self.num_hidden = len(spans) - len(self.rows)
        self.lengths = [_length(row) for row in spans]
        self.longest = max(self.lengths[:MAX_ROWS], default=0)
        counts = count_tokens(spans)
        total = sum(counts.values())
        self.legend = {kind: f"{kind} {n:,} ({percent(n / total)})" for kind, n in counts.items() if n}

    def text(self, width: int, color: bool) -> str:
        """Lines of at most `width` columns; see `ReuseReport.strip`."""
        if width < 32:
            raise ValueError(f"`width` must be at least 32 columns, got {width}.")
        several = len(self.rows) > 1
        room = width - len(f" {self.longest:,}") - (3 if several else 0)
        lines = []
        for index, (row, length) in enumerate(zip(self.rows, self.lengths, strict=False)):
            columns = max(1, room * length // self.longest) if length else 0
            lines.append((f"{index:>2} " if several else "") + f"{_bar(row, columns, color)} {length:,}")
        lines += [f"and {self.num_hidden:,} more rows"] if self.num_hidden else []
        return "\n".join(lines + self._text_legend(width, color))

    def _text_legend(self, width: int, color: bool) -> list[str]:
        lines, used = [[]], 0
        for kind, entry in self.legend.items():
            if used + 4 + len(entry) > width:
                lines.append([])
                used = 0
            mark = _paint("█", STYLES[kind].xterm) if color else STYLES[kind].mark
            lines[-1].append(f"{mark} {entry}")
            used += 4 + len(entry)
        return ["  ".join(line) for line in lines if line]

    def html(self, tokens: Sequence | None = None) -> str:
        """Bars, legend and, given `tokens`, the text in the same colours; see `ReuseReport.html`."""
        labels = self._labels(tokens)
        bars = "".join(_svg(row, self.longest) for row in self.rows)
        more = f"<div>and {self.num_hidden:,} more rows</div>" if self.num_hidden else ""
        swatch = "display:inline-block;width:10px;height:10px;margin-right:5px;background:"
        legend = "".join(
            f'<span style="display:inline-block;margin-right:16px">'
            f'<span style="{swatch}{STYLES[kind].colour}"></span>{entry}</span>'
            for kind, entry in self.legend.items()
        )
        texts = "".join(_html_text(row, words) for row, words in zip(self.rows, labels, strict=False))
        return f"{bars}{more}<div>{legend}</div>{texts}"

    def plot(self, tokens: Sequence | None = None, ax=None):
        """Bars and legend on matplotlib axes, which it returns; see `ReuseReport.plot`."""
        labels = self._labels(tokens)
        try:
            import matplotlib.pyplot as plt
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ImportError("`plot` needs matplotlib: pip install hf_suffix_cache[plot].") from error
        num_rows = max(1, len(self.rows))
        if ax is None:
            ax = plt.subplots(figsize=(10, 1.2 + 0.6 * num_rows), layout="constrained")[1]
        for y, row in enumerate(self.rows):
            runs = _runs(row)
            bars = [(start, stop - start) for start, stop, _, _ in runs]
            ax.broken_barh(bars, (y - 0.4, 0.8), facecolors=[STYLES[run.kind].colour for run in runs], linewidth=0)
        for y, (row, words) in enumerate(zip(self.rows, labels, strict=False)):
            self._write(ax, y, row, words)
        ax.set(xlim=(0, max(1, self.longest)), ylim=(num_rows - 0.5, -0.5), xlabel="position in the prompt")
        ax.set_yticks(range(num_rows) if num_rows > 1 else [])
        ax.set_ylabel("row" if num_rows > 1 else "")
        ax.spines[["top", "right", "left"]].set_visible(False)
        handles = [Patch(color=STYLES[kind].colour, label=entry) for kind, entry in self.legend.items()]
        if handles:
            look = {
                "frameon": False,
                "fontsize": "small",
                "handlelength": 1,
                "columnspacing": 1.5,
                "borderaxespad": 0.2,
            }
            ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(KINDS), **look)
        return ax

    def _write(self, ax, y: int, row: Sequence[Span], words: Sequence[str]) -> None:
        """Every token, upright, where there is room for it; else the start of each span that is wide enough."""
        style = {"va": "center", "fontsize": 7, "parse_math": False, "clip_on": True}
        for span in row if self.longest <= 80 else []:
            for at in range(span.start, span.stop):
                ax.text(at + 0.5, y, words[at][:8], color=STYLES[span.kind].ink, ha="center", rotation=90, **style)
        for span in row if self.longest > 80 else []:
            room = int(150 * len(span) / self.longest)  # letters that fit, at 150 to the whole width
            if room >= 8:
                text = " ".join("".join(words[span.start : min(span.stop, span.start + room)]).split())
                ax.text(span.start + self.longest / 300, y, text[:room], color=STYLES[span.kind].ink, **style)

    def _labels(self, tokens: Sequence | None) -> list[Sequence[str]]:
        """Token texts per row, checked against the rows' lengths; none for None."""
        if tokens is None:
            return []
        rows = [tokens] if len(tokens) and isinstance(tokens[0], str) else list(tokens)
        got = [len(words) for words in rows]
        if got != self.lengths:
            raise ValueError(
                f"`tokens` must hold the prompt's tokens without pads, {self.lengths} per row, got {got}."
            )
        return rows


def count_tokens(spans: Sequence[Sequence[Span]]) -> dict[str, int]:
    """Tokens of each kind, over all rows."""
    counts = dict.fromkeys(KINDS, 0)
    for row in spans:
        for span in row:
            counts[span.kind] += len(span)
    return counts


def percent(share: float) -> str:
    """Whole per cents that never call something nothing, or not quite everything everything."""
    if 0 < share < 0.01:
        return "<1 %"
    return ">99 %" if 0.99 < share < 1 else f"{100 * share:.0f} %"


class _Run(NamedTuple):
    """A piece of a bar: half-open positions, how it looks, what it says."""

    start: float
    stop: float
    kind: str
    title: str


def _length(row: Sequence[Span]) -> int:
    return row[-1].stop if row else 0


def _cells(row: Sequence[Span], num_cells: int) -> np.ndarray:
    """
    Index of the kind that each of `num_cells` equal cells shows, int64 `[num_cells]`.

    A cell shows a kind that is in it: the one most short of its share of the bar so far, so that a few repaired rows
    here and there add up to cells. A kind that is still not shown gets the cell where it has most tokens.
    """
    kinds = np.repeat([KINDS.index(span.kind) for span in row], [len(span) for span in row])
    edges = np.arange(num_cells + 1) * len(kinds) // num_cells
    starts, stops = edges[:-1], np.maximum(edges[1:], edges[:-1] + 1)
    tokens = np.zeros((num_cells, len(KINDS)), dtype=np.int64)
    for kind in np.unique(kinds):
        before = np.concatenate([[0], np.cumsum(kinds == kind)])
        tokens[:, kind] = before[stops] - before[starts]
    cells, short = np.zeros(num_cells, dtype=np.int64), np.zeros(len(KINDS))
    for cell, here in enumerate(tokens):
        short += here / here.sum()
        cells[cell] = np.where(here > 0, short, -np.inf).argmax()
        short[cells[cell]] -= 1
    for kind in np.unique(kinds):
        if not (cells == kind).any():
            spare = np.bincount(cells, minlength=len(KINDS))[cells] > 1  # don't hide another kind instead
            cells[np.where(spare, tokens[:, kind], -1).argmax()] = kind
    return cells


def _equal_runs(cells: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges of equal neighbours."""
    borders = [0, *(np.flatnonzero(np.diff(cells)) + 1).tolist(), len(cells)]
    return list(zip(borders, borders[1:], strict=False))


def _runs(row: Sequence[Span]) -> list[_Run]:
    """What to draw of a row: its spans, or equal cells where they are more than a screen can show."""
    if len(row) <= MAX_RUNS:
        return [_Run(span.start, span.stop, span.kind, _title(span)) for span in row]
    cells, size = _cells(row, MAX_RUNS), _length(row) / MAX_RUNS
    runs = [(start, stop, KINDS[cells[start]]) for start, stop in _equal_runs(cells)]
    return [_Run(start * size, stop * size, kind, kind) for start, stop, kind in runs]


def _title(span: Span) -> str:
    moved = f", moved by {span.shift:+,}" if span.shift else ""
    source = "" if span.segment is None else f", segment {span.segment}"
    return f"{span.kind}: {span.start:,} to {span.stop:,} ({len(span):,} tokens){moved}{source}"


def _svg(row: Sequence[Span], longest: int) -> str:
    rects = "".join(
        f'<rect x="{run.start:.6g}" width="{run.stop - run.start:.6g}" height="1" fill="{STYLES[run.kind].colour}">'
        f"<title>{escape(run.title)}</title></rect>"
        for run in _runs(row)
    )
    return (
        f'<svg viewBox="0 0 {max(1, longest)} 1" preserveAspectRatio="none" shape-rendering="crispEdges" '
        f'style="display:block;width:100%;height:20px;margin:3px 0">{rects}</svg>'
    )


def _html_text(row: Sequence[Span], words: Sequence[str]) -> str:
    pieces = []
    for span in row:
        style, text = STYLES[span.kind], escape("".join(words[span.start : span.stop]))
        colours = f"background:{style.colour};color:{style.ink}"
        pieces.append(f'<span title="{escape(_title(span))}" style="{colours}">{text}</span>')
    box = "white-space:pre-wrap;overflow-wrap:anywhere;max-height:320px;overflow:auto;margin-top:6px"
    return f'<div style="{box};font-family:monospace">{"".join(pieces)}</div>'


def _paint(marks: str, colour: int, background: int | None = None) -> str:
    behind = "" if background is None else f";48;5;{background}"
    return f"\x1b[38;5;{colour}{behind}m{marks}\x1b[0m"


def _bar(row: Sequence[Span], columns: int, color: bool) -> str:
    """A row's spans as text of `columns` columns."""
    styles = [STYLES[kind] for kind in KINDS]
    if not columns:
        return ""
    if not color:
        return "".join(styles[kind].mark for kind in _cells(row, columns))
    left, right = _cells(row, 2 * columns).reshape(columns, 2).T
    pieces = []
    for start, stop in _equal_runs(left * len(styles) + right):
        front, behind = styles[left[start]].xterm, styles[right[start]].xterm
        marks = ("█" if front == behind else "▌") * (stop - start)
        pieces.append(_paint(marks, front, None if front == behind else behind))
    return "".join(pieces)
