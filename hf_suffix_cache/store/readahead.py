"""Reading rows from files beside the calls that need them, and telling which are computed sooner than read."""

import os
import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from .mapped import StoredRows

WORTH_ASKING = 0.05  # seconds: below, figures of a busy machine would change plans for nothing
READERS = 4  # at a time; more help where a folder is far away, not on a disk
MAX_WAITING = 256  # segments that are read for later

_lock = threading.Lock()
_readers: dict[int, ThreadPoolExecutor] = {}  # by process: threads do not survive a fork
_waiting: dict[StoredRows, Future] = {}


def is_slow(stored: StoredRows, rows: int, row_seconds: float | None) -> bool:
    """
    Whether reading a segment to be served so many rows of it would take longer than running them. It is read while one
    of the speeds is not known, and where that takes no time to speak of.

    Args:
        stored (`StoredRows`): The segment's rows.
        rows (`int`): Rows that would be served.
        row_seconds (`float`, *optional*): What the model takes for a row, as far as that is known.
    """
    if stored.is_read or row_seconds is None:
        return False
    seconds = stored.file.folder.speed.seconds(stored.size)
    return seconds is not None and seconds > max(WORTH_ASKING, rows * row_seconds)


def read(wanted: Collection[StoredRows]) -> None:
    """Have rows read that were not yet, several at a time. What can't be had shows when it is asked for."""
    wanted = [each for each in wanted if not each.is_read]
    for each in wanted:
        with suppress(ValueError, OSError):
            each.announce()
    if len(wanted) > 1:
        for task in [_start(each) for each in wanted]:
            task.result()
    elif wanted:
        _read(wanted[0])


def read_later(wanted: Collection[StoredRows]) -> None:
    """The same while the caller goes on. Beyond `MAX_WAITING` at a time nothing is done."""
    for each in wanted:
        if not each.is_read and len(_waiting) < MAX_WAITING:
            _start(each)


def wait(timeout: float | None = None) -> None:
    """Wait until what is read for later is there."""
    for task in list(_waiting.values()):
        task.result(timeout)


def _start(stored: StoredRows) -> Future:
    with _lock:
        if stored not in _waiting:
            if os.getpid() not in _readers:
                _readers.clear()
                _waiting.clear()
                _readers[os.getpid()] = ThreadPoolExecutor(READERS, thread_name_prefix="hf-suffix-cache-read")
            task = _waiting[stored] = _readers[os.getpid()].submit(_read, stored)
        else:
            return _waiting[stored]
    task.add_done_callback(lambda _: _waiting.pop(stored, None))
    return task


def _read(stored: StoredRows) -> None:
    with suppress(ValueError, OSError):
        stored.read()
