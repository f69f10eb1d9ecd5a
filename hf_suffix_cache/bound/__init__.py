"""
What a request's error is expected to be, and the rule that keeps it under a stated bound.

    features      names of what is seen of a request, the levels of repair, `LevelTrace`
    predictor     log KL from features
    conformal     the rule, and its margin by conformal risk control
    calibration   predictor and margins of one model, per workload label; the built-in one
    files         JSON with version and checksum
    audit         is the bound true? A share of requests run both ways tells

numpy alone: no torch, no model.
"""

from .audit import Auditor, AuditRecord, Coverage
from .calibration import Calibration, builtin
from .conformal import Walk, next_level, smallest_sample, walk
from .features import APPROXIMATE, EPSILON, FEATURES, FULL, LEVEL_NAMES, LEVELS, LevelTrace
from .predictor import Predictor, spearman

__all__ = [
    "APPROXIMATE",
    "EPSILON",
    "FEATURES",
    "FULL",
    "LEVELS",
    "LEVEL_NAMES",
    "AuditRecord",
    "Auditor",
    "Calibration",
    "Coverage",
    "LevelTrace",
    "Predictor",
    "Walk",
    "builtin",
    "next_level",
    "smallest_sample",
    "spearman",
    "walk",
]
