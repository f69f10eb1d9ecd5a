"""Rows that were given up on a device, and lie in the host's memory until they are served again."""

import weakref

import psutil
import torch

from .layout import RowLayout
from .mapped import RowFile, StoredRows
from .pool import BlockPool
from .segments import Segment
from .snapshot import gathered

AUTOMATIC_SHARE = 1 / 4  # of the host's free memory, where the device is another


class HostMemory:
    """
    A budget of the host's memory.

    Args:
        max_bytes (`int`, *optional*): The most that is taken. None: a quarter of what is free at the first time, where
            the pool is on another device; nothing where it is in the host's memory itself.

    Attributes:
        taken (`int`): Bytes that rows take now.
    """

    def __init__(self, max_bytes: int | None = None):
        self.max_bytes = max_bytes
        self.taken = 0

    def limit(self, pool: BlockPool) -> int:
        """The most bytes that rows of this pool, with all others, may take."""
        if self.max_bytes is None:
            if all(shape.device.type == "cpu" for shape in pool.groups):
                return 0
            self.max_bytes = int(AUTOMATIC_SHARE * psutil.virtual_memory().available)
        return self.max_bytes


class _NoFile(RowFile):
    """Stands where a file would."""

    def __init__(self):
        super().__init__(None, "", 0)


class HostRows(StoredRows):
    """
    Rows of a segment in the host's memory, laid out as in a file.

    Args:
        memory (`HostMemory`): Whose budget they take from, as long as this object lives.
        pool (`BlockPool`), segment (`Segment`), layout (`RowLayout`): What is copied.
        cold (`str`, *optional*): Dtype of the rows where that is smaller than the model's.
    """

    def __init__(self, memory: HostMemory, pool: BlockPool, segment: Segment, layout: RowLayout, cold: str | None):
        super().__init__(_NoFile(), 0, layout.size(len(segment)), "", cold)
        with torch.inference_mode(False):
            self._data = torch.zeros(self.size, dtype=torch.uint8).numpy()
            for piece in layout.pieces(len(segment)):
                if piece.size:
                    place = torch.from_numpy(self._data[piece.offset : piece.offset + piece.size])
                    place.view(piece.dtype).view(piece.shape).copy_(gathered(pool, segment, piece))
        self.is_read = True
        memory.taken += self.size
        weakref.finalize(self, _give_back, memory, self.size).atexit = False

    def is_there(self) -> bool:
        """They are."""
        return True

    def read(self):
        """Their bytes, and where they begin in them."""
        return self._data, 0

    def look(self) -> None:
        """They stay."""

    def announce(self) -> None:
        """There is nothing to read."""


def _give_back(memory: HostMemory, size: int) -> None:
    memory.taken -= size
