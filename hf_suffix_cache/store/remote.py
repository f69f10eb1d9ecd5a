"""
A folder that fsspec opens, for example on an object store, read and written through copies on the local disk.

Rows are fetched segment by segment, when they are first asked for. There are no locks but those of this process: one
process may save to such a folder at a time. Whoever reads meanwhile finds the old store or the new one.
"""

import os
import re
import shutil
import tempfile
import threading
import uuid
import weakref
from collections import defaultdict
from collections.abc import Iterable
from contextlib import contextmanager, suppress

from .files import INDEX, MAX_INDEX_BYTES, DamagedFile, Folder, checksum, is_named, is_temporary

_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/?(?!/)")  # of two letters at least: C:/ is a disk
_locks: dict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)


def folder_of(path) -> Folder:
    """
    The folder at a path, or at a URL that fsspec knows (`s3://bucket/store`).

    Raises:
        TypeError, ValueError: for what is no path, and for a protocol that there is not.
        ImportError: where the package that opens it is missing.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"`folder` must be a path or a URL, got {path!r}.")
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise ValueError(f"`folder` must name a folder, got {path!r}; '.' is the working directory.")
    if isinstance(path, str) and _ONE_SLASH.match(path):
        raise ValueError(f"{path} is no path and no URL; a URL has two slashes, and ./{path} is a folder.")
    if not isinstance(path, str) or "://" not in path:
        return Folder(path)
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{path} needs fsspec: pip install 'hf-suffix-cache[remote]'.") from error
    try:
        system, root = url_to_fs(path)
    except ValueError as error:
        raise ValueError(f"{path} is in no place that fsspec knows: {error}.") from error
    except ImportError as error:
        raise ImportError(f"{path} needs another package: {error}.") from error
    if not root.strip("/"):
        raise ValueError(f"{path} names no folder; add one, as in {path.partition('://')[0]}://store.")
    return Folder(root) if "file" in _protocols(system) else RemoteFolder(system, root)


def _protocols(system) -> tuple[str, ...]:
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)


class RemoteFolder(Folder):
    """
    A folder of another file system. Files that were read lie in a local folder of this object, which goes with it.

    Args:
        system (`fsspec.AbstractFileSystem`), root (`str`): Where it is.
    """

    is_remote = True

    def __init__(self, system, root: str):
        self._system = system
        self._root = root.rstrip("/")
        self._whole: set[str] = set()  # files of which there is all in the local folder
        super().__init__(tempfile.mkdtemp(prefix="hf-suffix-cache-"))  # for nobody else's eyes
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    @property
    def key(self) -> str:
        """Tells it from other folders."""
        return f"{_protocols(self._system)[0]}://{self._root}"

    def where(self, name: str) -> str:
        """What to call a file in messages."""
        return f"{self.key}/{name}"

    @contextmanager
    def locked(self, name: str, writing: bool):
        """Inside, no other thread of this process holds the lock of this name."""
        with _locks[self.key, name]:
            yield

    # -- writing ------------------------------------------------------------------------------------------------

    def put(self, name: str, parts: Iterable) -> None:
        """Write bytes to a file, whole or, if it is the index, not at all."""
        super().put(name, parts)
        target = temporary = f"{self._root}/{name}"
        if name == INDEX:  # all others are of no use before it names them
            temporary = f"{self._root}/saving-{uuid.uuid4().hex}.tmp"
        try:
            self._system.put_file(os.fspath(self.path / name), temporary)
            if temporary != target:
                self._system.mv(temporary, target)
        except BaseException:
            with suppress(Exception):
                self._system.rm_file(temporary)
            raise
        self._whole.add(name)

    def sweep(self, keep: set[str]) -> None:
        """Remove files of stores that are no more: all with such names but those to keep."""
        self._system.invalidate_cache(self._root)
        for path in self._system.ls(self._root, detail=False):
            name = path.rsplit("/", 1)[-1]
            if (is_named(name) and name not in keep) or is_temporary(name):
                self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a file, if that can be. What was read of it stays."""
        with suppress(Exception):  # whatever the file system raises
            self._system.rm_file(f"{self._root}/{name}")

    def _make(self) -> None:
        self._system.makedirs(self._root, exist_ok=True)

    # -- reading ------------------------------------------------------------------------------------------------

    def has_index(self) -> bool:
        """Whether there is a store in it, or something in its place."""
        self._system.invalidate_cache(self._root)
        return self._system.exists(f"{self._root}/{INDEX}")

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is no such file, or something else is in its place."""
        try:
            found = self._system.info(f"{self._root}/{name}")
        except FileNotFoundError:
            return None
        return found["size"] if found["type"] == "file" else None

    def read(self, name: str, limit: int) -> bytes:
        """
        All bytes of a file; raises `DamagedFile` where it has more than `limit` or is gone, and `OSError` where it
        can't be read now.
        """
        size = self._checked_size(name)
        if size > limit:
            raise DamagedFile(f"{self.where(name)} has {size:,} bytes, and {limit:,} are the most.")
        return self._range(name, 0, size)

    def map(self, name: str, size: int):
        """
        The bytes of a file, mapped into memory: zeros before they are fetched. Raises `DamagedFile` unless there are
        so many.
        """
        if name not in self._whole:
            actual = self._checked_size(name)
            if actual != size:
                raise DamagedFile(f"{self.where(name)} has {actual:,} bytes, not the {size:,} that were saved.")
            with open(self.path / name, "ab") as file:  # with holes, which take no room
                file.truncate(size)
        return super().map(name, size)

    def fetch(self, name: str, start: int, stop: int) -> None:
        """
        Have bytes of a mapped file here; raises `DamagedFile` where they are gone, and `OSError` where they can't be
        had now.
        """
        if name in self._whole:
            return
        data = self._range(name, start, stop)
        with open(self.path / name, "r+b") as file:
            file.seek(start)
            file.write(data)

    def index_checksum(self) -> str | None:
        """Checksum of the index as it is now; None where there is none."""
        return checksum([self.read(INDEX, MAX_INDEX_BYTES)]) if self.has_index() else None

    def _checked_size(self, name: str) -> int:
        if name != INDEX and not is_named(name):
            raise DamagedFile(f"{name[:80]!r} is no name of a file of a store.")
        try:
            size = self.size(name)
        except Exception as error:  # whatever the file system raises
            raise OSError(f"{self.where(name)} can't be looked at: {error!r}.") from error
        if size is None:
            raise DamagedFile(f"{self.where(name)} is gone.")
        return size

    def _range(self, name: str, start: int, stop: int) -> bytes:
        try:
            data = self._system.cat_file(f"{self._root}/{name}", start=start, end=stop)
        except FileNotFoundError as error:
            raise DamagedFile(f"{self.where(name)} is gone.") from error
        except Exception as error:  # whatever the file system raises
            raise OSError(f"{self.where(name)} can't be read: {error!r}.") from error
        if len(data) != stop - start:
            raise DamagedFile(f"{self.where(name)} ends within what is asked for.")
        return data
