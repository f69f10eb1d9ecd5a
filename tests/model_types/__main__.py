"""
Measure every causal model type of the installed transformers:

    python -m tests.model_types              # writes benchmarks/results/model_types.csv, prints the README's table
    python -m tests.model_types llama bloom  # these types only; prints what was measured and writes nothing
"""

import csv
import inspect
import logging
import sys
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import transformers

from hf_suffix_cache import SuffixCache

from .builder import build, model_types
from .table import KINDS, expected, measured_family

WELL_KNOWN = """
    llama qwen2 qwen3 mistral gemma3_text gpt_oss phi3 phi gpt_neox stablelm deepseek_v2 deepseek_v3 smollm3 cohere
    cohere2 llama4_text glm glm4 gptj bloom mpt gpt2 opt bert roberta bart whisper mamba jamba qwen3_next deepseek_v32
    nanochat
""".split()  # named first in the README's table
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "model_types.csv"


@dataclass(frozen=True)
class Row:
    """One measured type; `error` says why it could not be built."""

    model_type: str
    class_name: str = ""
    family: str = ""
    kind: str = ""
    reason: str = ""
    layout: str = ""
    windows: str = ""
    reads_attention: str = ""
    rows: int = 0
    seconds: float = 0.0
    error: str = ""
    note: str = ""
    transformers: str = transformers.__version__
    torch: str = torch.__version__


def measured(model_type: str) -> Row:
    """Build and measure one type."""
    known = expected().get(model_type)
    note = known.note if known else "not in types.csv"
    try:
        model = build(model_type)
    except Exception as error:
        return Row(model_type, error=f"{type(error).__name__}: {error}".splitlines()[0], note=note)
    capability = SuffixCache().capability(model)
    family = measured_family(capability) if capability.kind == "shift" else (known.family if known else "")
    return Row(
        model_type,
        type(model).__name__,
        family,
        capability.kind,
        capability.reason or "",
        capability.layout if capability.kind == "shift" else "",
        " ".join("-" if window is None else str(window) for window in capability.windows),
        "yes" if capability.reads_attention else "no",
        capability.rows,
        round(capability.seconds, 3),
        note=note,
    )


def markdown(rows: list[Row]) -> str:
    """Counts by family and kind, with a few names each."""
    lines = ["| rows | kind | types | such as |", "|---|---|---|---|"]
    built = [row for row in rows if not row.error]
    groups = Counter((KINDS.index(row.kind), row.family) for row in built)
    for (kind, family), count in sorted(groups.items(), key=lambda item: (item[0][0], -item[1], item[0][1])):
        names = [row.model_type for row in built if (row.kind, row.family) == (KINDS[kind], family)]
        shown = ", ".join(sorted(names, key=lambda name: (name not in WELL_KNOWN, len(name), name))[:6])
        lines.append(f"| {family} | {KINDS[kind]} | {count} | {shown} |")
    kinds = Counter(row.kind for row in built)
    total = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS)
    lines.append(f"\n{len(rows)} types of transformers {transformers.__version__}: {total}.")
    seconds = sorted(row.seconds for row in built)
    lines.append(
        f"Measuring a tiny model takes {seconds[len(seconds) // 2]:.3f} s (median), {seconds[-1]:.2f} s at most, "
        f"and runs up to {max(row.rows for row in built)} rows."
    )
    lines += [f"Not built: {row.model_type}: {row.error}" for row in rows if row.error]
    return "\n".join(lines)


def main(names: list[str]) -> int:
    """Entry point; returns the exit status: 1 if a type could not be built or is not what `types.csv` says."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    rows = [measured(name) for name in names or model_types()]
    if names:
        for row in rows:
            print(inspect.cleandoc(f"{row.model_type}: {row.kind or row.error} {row.layout} {row.reason}"))
    else:
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
        print(markdown(rows))
    table = expected()
    wrong = [row.model_type for row in rows if row.model_type not in table or row.kind != table[row.model_type].kind]
    if wrong:
        print(f"Not as types.csv says: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
