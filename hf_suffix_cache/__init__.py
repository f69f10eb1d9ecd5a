"""hf_suffix_cache: text that an earlier call has run through the model is not prefilled again, wherever it stands."""

from .bound import Calibration
from .cache import SuffixCache
from .config import PoolExhausted, SuffixCacheConfig, UnsupportedModelError
from .diagnosis import diagnose
from .explaining import Explanation
from .generation import uninstall
from .planning import Span
from .registration import system_turn
from .report import ReuseReport

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "Explanation",
    "PoolExhausted",
    "ReuseReport",
    "Span",
    "SuffixCache",
    "SuffixCacheConfig",
    "UnsupportedModelError",
    "diagnose",
    "system_turn",
    "uninstall",
]
