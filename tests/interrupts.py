"""Interrupts at any place: where Python looks for signals, that is at calls, as they begin and as they end."""

import os
import sys
from contextlib import contextmanager

import hf_suffix_cache

PACKAGE = os.path.dirname(hf_suffix_cache.__file__)
# What changes a store, or holds anything of one: elsewhere one place is as good as another.
FILES = ("store/", "view.py", "request.py", "drafting.py", "loading.py", "prompt.py", "generation.py", "opening.py")
INSIDE = tuple(os.path.join(PACKAGE, name) for name in FILES)


class Interrupts:
    """
    Raises in the `place`-th call that these files make or get; with None it counts them.

    A lock is let go by a call too, and a signal is looked for when it has come to its end, so none is raised before.
    """

    def __init__(self, place: int | None, error: type[BaseException] = KeyboardInterrupt):
        self.place, self.error, self.seen = place, error, 0
        self.where = None

    def __call__(self, frame, event, arg):
        if event == "c_call" and getattr(arg, "__name__", "") in ("__exit__", "release"):
            return
        if event not in ("call", "c_call", "c_return") or not frame.f_code.co_filename.startswith(INSIDE):
            return
        self.seen += 1
        if self.seen == self.place:
            sys.setprofile(None)
            self.where = f"{os.path.relpath(frame.f_code.co_filename, PACKAGE)}:{frame.f_lineno} {event} {arg}"
            raise self.error(self.where)


@contextmanager
def interrupted(place: int | None, error: type[BaseException] = KeyboardInterrupt):
    """Inside, the `place`-th call raises; yields the `Interrupts`."""
    interrupts = Interrupts(place, error)
    sys.setprofile(interrupts)
    try:
        yield interrupts
    except error:
        if interrupts.where is None:
            raise
    finally:
        sys.setprofile(None)
