"""
The files of a saved store: their names, how each is written whole or not at all, and what of a folder is ever opened.

A folder holds `index.json`, which names all others. Those are named by their content, so that a new one never takes an
old one's place, and the index is replaced last: whoever dies on the way leaves the old store whole.
"""

import hashlib
import json
import mmap
import os
import re
import stat
import uuid
from collections import deque
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

INDEX = "index.json"
FORMAT = "hf_suffix_cache store"
VERSION = 1
MAX_INDEX_BYTES = 256 << 20
MAX_TOKENS_BYTES = 4 << 30
LOCK_SECONDS = 600  # a save of many gigabytes may take minutes, and others wait for it
NUM_READS = 31  # newest ones that a folder's speed is told by
ALIGNMENT = 64  # of tensors in a file, so that they can be used where they lie

_NAMED = re.compile(r"(rows|tokens)-[0-9a-f]{32}\.safetensors")
_TEMPORARY = re.compile(r"saving-[0-9a-f]{32}\.tmp")
_HEAD = '{"format": "%s", "version": %d, "checksum": "%s", "contents": '
_HEAD_READ = re.compile(rb'\{"format": "hf_suffix_cache store", "version": (\d{1,9}), "checksum": "([0-9a-f]{32})", ')
_CONTENTS = b'"contents": '


class DamagedFile(ValueError):
    """What is on disk is not what was saved."""


class Speed:
    """How fast rows were read from a folder, checked and all, by the newest reads."""

    def __init__(self):
        self._reads: deque[tuple[int, float]] = deque(maxlen=NUM_READS)

    def note(self, num_bytes: int, seconds: float) -> None:
        """So many bytes took so long."""
        self._reads.append((num_bytes, seconds))

    def seconds(self, num_bytes: int) -> float | None:
        """What reading so many bytes is expected to take; None before anything was read."""
        reads = list(self._reads)
        read = sum(size for size, _ in reads)
        return num_bytes * sum(seconds for _, seconds in reads) / read if read else None


class Folder:
    """
    A folder on a local disk that holds one store. Files are opened by plain names, links are never followed.

    Args:
        path (`str` or path): Where it is.

    Attributes:
        speed (`Speed`): How fast it can be read.
    """

    is_remote = False

    def __init__(self, path):
        self.path = Path(path)
        self.speed = Speed()

    def __eq__(self, other) -> bool:
        return isinstance(other, Folder) and self.key == other.key

    __hash__ = None

    @property
    def key(self) -> str:
        """Tells it from other folders."""
        return os.path.realpath(self.path)

    def index_checksum(self) -> str | None:
        """Checksum of the index as it is now; None where there is none."""
        return checksum([self.read(INDEX, MAX_INDEX_BYTES)]) if self.size(INDEX) is not None else None

    @contextmanager
    def locked(self, name: str, writing: bool):
        """
        Inside, nobody else holds the lock of this name. Who only reads goes without where the folder, or a lock in it,
        can't be written to.
        """
        from filelock import FileLock, Timeout

        path = self.path / f"{name}.lock"
        if path.is_symlink():  # it would be opened for writing, wherever it leads
            raise DamagedFile(f"{path} is a link, which no store has; remove it.")
        if path.exists() and not path.is_file():
            raise DamagedFile(f"{path} is no plain file, as a store's lock is; remove it.")
        # another lock may be the same file: who holds one waits for ever
        if path.exists() and path.stat().st_nlink > 1:
            raise DamagedFile(f"{path} has more than one name, which no store's lock has; remove it.")
        lock = FileLock(path, mode=0o600, timeout=LOCK_SECONDS)
        try:
            lock.acquire()
        except Timeout as error:
            raise TimeoutError(
                f"{path} is held by another process or thread for more than {LOCK_SECONDS} s: end it, or use another "
                "folder."
            ) from error
        except OSError:
            if writing:
                raise
            lock = None
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def where(self, name: str) -> str:
        """What to call a file in messages."""
        return os.fspath(self.path / name)

    # -- writing ------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Make the folder; raises `ValueError` where there is a file, or another kind of `index.json` in it."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is no folder, so no store can be saved there; choose another path.")
        self._make()
        if (self.path / INDEX).is_dir():
            raise ValueError(f"{self.where(INDEX)} is a folder; save to another folder, or remove that one.")
        if self.is_foreign():
            raise ValueError(
                f"{self.where(INDEX)} is not of a saved store; save to another folder, or remove that file."
            )

    def _make(self) -> None:
        # rows are as secret as the text that they have seen, so nobody else may read them
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, name: str, parts: Iterable) -> None:
        """Write bytes to a file, whole or not at all. When this returns they are on the disk."""
        temporary = self.path / f"saving-{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "xb", opener=_private) as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._sync()

    def sweep(self, keep: set[str]) -> None:
        """Remove files of stores that are no more: all with such names but those to keep."""
        for name in os.listdir(self.path):
            if (is_named(name) and name not in keep) or is_temporary(name):
                self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a file, if that can be: where somebody has it open, on a system that minds, a later `sweep` does."""
        with suppress(OSError):
            os.unlink(self.path / name)

    def _sync(self) -> None:
        """Have the folder's own entries on the disk."""
        if os.name == "posix":
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    # -- reading ------------------------------------------------------------------------------------------------

    def has_index(self) -> bool:
        """Whether there is a store in it, or something in its place."""
        return os.path.lexists(self.path / INDEX)

    def is_foreign(self) -> bool:
        """Whether its `index.json` can be read and is of something else: then nothing in it is touched."""
        try:
            start = self.read(INDEX, MAX_INDEX_BYTES)[:64]
        except DamagedFile:
            return False
        return bool(start) and not start.startswith(f'{{"format": "{FORMAT}"'.encode())

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is no such file, or something else is in its place."""
        try:
            status = os.lstat(self.path / name)
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str, limit: int) -> bytes:
        """All bytes of a file; raises `DamagedFile` where it has more than `limit`, or can't be read."""
        with self._opened(name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > limit:
                raise DamagedFile(f"{self.path / name} has {size:,} bytes, and {limit:,} are the most.")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(size)

    def map(self, name: str, size: int) -> mmap.mmap:
        """The bytes of a file, mapped into memory; raises `DamagedFile` unless there are so many."""
        with self._opened(name) as descriptor:
            actual = os.fstat(descriptor).st_size
            if actual != size or size == 0:
                raise DamagedFile(f"{self.path / name} has {actual:,} bytes, not the {size:,} that were saved.")
            # a private mapping: torch wants memory that may be written to, and nothing ever reaches the file
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)

    def fetch(self, name: str, start: int, stop: int) -> None:
        """Have bytes of a mapped file here: they are."""

    @contextmanager
    def _opened(self, name: str):
        """A descriptor of a plain file in this folder."""
        if name != INDEX and not is_named(name):
            raise DamagedFile(f"{name[:80]!r} is no name of a file of a store.")
        path = self.path / name
        if path.is_symlink():
            raise DamagedFile(f"{path} is a link, which no store has.")
        flags = os.O_RDONLY
        for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):  # where there are some
            flags |= getattr(os, flag, 0)
        try:
            descriptor = os.open(path, flags)
        except OSError as error:
            raise DamagedFile(f"{path} can't be opened: {error.strerror}.") from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DamagedFile(f"{path} is no plain file.")
            yield descriptor
        finally:
            os.close(descriptor)


def _private(path, flags) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


def is_named(name: str) -> bool:
    """Whether a file of a store may have this name, apart from the index."""
    return _NAMED.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    """Whether a file has the name of one that is being written."""
    return _TEMPORARY.fullmatch(name) is not None


# -- contents -------------------------------------------------------------------------------------------------------


def checksum(parts: Iterable) -> str:
    """Of bytes, in any number of parts: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def named_by_content(kind: str, digest: str) -> str:
    """Name of a file of `"rows"` or `"tokens"`."""
    return f"{kind}-{digest}.safetensors"


def header(tensors: Iterable[tuple[str, str, tuple, int]]) -> bytes:
    """
    What a safetensors file begins with; padded, so that the first tensor is aligned.

    Args:
        tensors (iterable of `tuple`): Name, dtype (`"F32"`), shape and bytes of each, in their order.
    """
    table, offset = {"__metadata__": {"format": "pt", "store": str(VERSION)}}, 0
    for name, dtype, shape, size in tensors:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def pack_index(contents: dict) -> bytes:
    """An index, as it is written; records in it become objects of their fields."""
    text = json.dumps(contents, allow_nan=False, separators=(",", ":"), default=vars).encode()
    return (_HEAD % (FORMAT, VERSION, checksum([text]))).encode() + text + b"}\n"


def unpack_index(data: bytes, where) -> dict:
    """
    The contents that `pack_index` was given. Nothing is parsed before its checksum is right; raises `DamagedFile` for
    what is damaged, of another kind or of another version.
    """
    head = _HEAD_READ.match(data)
    if head is None:
        raise DamagedFile(f"{where} is no index of a saved store, or its first bytes are damaged.")
    if int(head[1]) != VERSION:
        raise DamagedFile(f"{where} has format version {int(head[1])}, this release reads {VERSION}; save it again.")
    text = data[head.end() :]
    if not text.startswith(_CONTENTS) or not text.endswith(b"}\n"):
        raise DamagedFile(f"{where} is not complete.")
    text = text[len(_CONTENTS) : -2]
    if checksum([text]) != head[2].decode():
        raise DamagedFile(f"{where} was changed after it was saved: its checksum is off.")
    try:
        contents = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{where} is no legal JSON: {error}") from error
    if not isinstance(contents, dict):
        raise DamagedFile(f"{where} holds no object.")
    return contents


def _refuse(constant: str):
    raise ValueError(f"{constant} is no number")
