"""Large pages under slabs."""

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from hf_suffix_cache.store.paging import LARGE_PAGE, prefer_large_pages
from hf_suffix_cache.store.pool import BlockPool, Budget, LayerShape

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advised(tensor: torch.Tensor) -> bool:
    """Whether the mapping in the middle of a tensor's memory carries the advice, as the kernel tells it."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        borders = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if borders:
            inside = int(borders[1], 16) <= middle < int(borders[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("the tensor's memory is in no mapping")


@pytest.mark.skipif(sys.platform != "linux" or not SETTING.exists(), reason="this kernel has no large pages")
def test_slabs_ask_for_large_pages_and_small_tensors_do_not():
    # a mapping of its own: the allocator may hand out memory that a slab has left, advice and all
    other = torch.frombuffer(mmap.mmap(-1, 16 * LARGE_PAGE), dtype=torch.uint8)
    assert not advised(other)  # control
    shape = LayerShape(2, 64, 64, torch.float32, torch.device("cpu"))
    pool = BlockPool((shape,) * 4, 16, Budget(256 << 20))
    slab = pool.allocate(4096).slab
    assert advised(slab.keys[shape]) and advised(slab.values[shape])
    assert not prefer_large_pages(torch.empty(1000))


def test_memory_that_can_not_be_advised_is_left_alone(monkeypatch):
    monkeypatch.setattr("hf_suffix_cache.store.paging._madvise", lambda: None)
    assert not prefer_large_pages(torch.empty(4 * LARGE_PAGE, dtype=torch.uint8))
    assert not prefer_large_pages(torch.empty(8, device="meta"))
