"""
Which shifted rows to recompute: the policies, one file each.

A policy is an object with `select(request) -> positions` and, if it wants to see them, `needs_attention`,
`needs_deviation` or `needs_outside_mass` set to True. The rows that it names, plus the seam rows, are recomputed in
the prompt's own context, together with every new row to the right of the first of them.

Rows may also be chosen while they run: a policy with `filters_layers = True`, `of`, `filters(layer, num_layers)` and
`rows_after(...)`, as `Deviation` has them, lets rows leave the forward from layer to layer.
"""

from .deviation import Deviation
from .first_rows import FirstRows
from .full import FullRepair
from .none import NoRepair
from .outside_mass import OutsideMass
from .policy import MIN_PROBE_QUERIES, PROBE_QUERIES, RepairRequest, best, budget
from .presets import fraction_for, preset
from .question import QuestionAttention

__all__ = [
    "MIN_PROBE_QUERIES",
    "PROBE_QUERIES",
    "Deviation",
    "FirstRows",
    "FullRepair",
    "NoRepair",
    "OutsideMass",
    "QuestionAttention",
    "RepairRequest",
    "best",
    "budget",
    "fraction_for",
    "preset",
]
