"""What all plots share: colours, rows of a CSV by case and metric, bars with intervals."""

import matplotlib

matplotlib.use("Agg")

# blue is the package, orange and grey what it is held against, dark red a target
BLUE, ORANGE, GREY, TARGET = "#005faf", "#ffaf00", "#9a9a9a", "#af0000"


class Table:
    """Rows of one CSV, looked up by case and metric; `by_model` has a table for each model and dtype in it."""

    def __init__(self, rows: list[dict]):
        self.all = rows
        self.rows = {(row["case"], row["metric"]): row for row in rows}
        self.cases = list(dict.fromkeys(row["case"] for row in rows))

    def by_model(self) -> dict[tuple[str, str], "Table"]:
        """Tables of the rows of one `(model, dtype)` each, in the CSV's order."""
        keys = dict.fromkeys((row["model"], row["dtype"]) for row in self.all)
        return {key: Table([row for row in self.all if (row["model"], row["dtype"]) == key]) for key in keys}

    def has(self, case: str, metric: str) -> bool:
        return (case, metric) in self.rows

    def value(self, case: str, metric: str) -> float:
        return float(self.rows[case, metric]["value"])

    def errors(self, case: str, metric: str) -> tuple[float, float]:
        """How far the interval reaches below and above the value; 0 where the row has none."""
        row = self.rows[case, metric]
        value = float(row["value"])
        low, high = (float(row[name]) if row[name] else value for name in ("low", "high"))
        return max(value - low, 0.0), max(high - value, 0.0)

    def caption(self) -> str:
        """With what the figures were measured."""
        row = self.all[-1]
        names = ("model", "dtype", "threads")
        models, dtypes, threads = (list(dict.fromkeys(other[name] for other in self.all)) for name in names)
        model = " and ".join(models) if len(models) < 3 else f"{len(models)} models"
        where = f"{row['machine']}, {' or '.join(sorted(threads))} threads"
        versions = f"torch {row['torch']}, transformers {row['transformers']}"
        return f"{model}, {' and '.join(dtypes)}, {where}, {versions}, {row['date']}"


def bars(axis, table: Table, cases: list[str], metric: str, colours: list[str]) -> None:
    """One bar with its interval and its figure for each case."""
    if not cases or not all(table.has(case, metric) for case in cases):
        axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    values = [table.value(case, metric) for case in cases]
    errors = list(zip(*(table.errors(case, metric) for case in cases), strict=True))
    axis.bar(range(len(cases)), values, yerr=errors, color=colours, width=0.7, capsize=3)
    for place, value in enumerate(values):
        axis.text(place, value, f" {value:.3g}", ha="left", va="bottom", fontsize=7)
    axis.set_xticks(range(len(cases)), [case.replace(", ", ",\n") for case in cases], fontsize=7)
