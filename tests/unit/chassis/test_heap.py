"""What is settled is passed over, and freed once it is released."""

import ctypes
import gc
import mmap
import sys
import weakref
from collections.abc import Iterator

import pytest

from corolla.chassis import heap


@pytest.fixture(autouse=True)
def _stays_settled() -> Iterator[None]:
    """Lets the collector pass over what the test session has imported again, as it did before the test."""
    yield
    heap.settle()


class Node:
    """Part of a cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_settled_is_passed_over_until_it_is_released() -> None:
    node = Node()
    gone = weakref.ref(node)
    heap.settle()
    try:
        del node
        gc.collect()
        assert gone() is not None
    finally:
        heap.release()
    assert gone() is None
    assert gc.get_freeze_count() > 0, "what is left need not be visited again"


def test_what_is_garbage_already_is_not_kept() -> None:
    gone = weakref.ref(Node())
    heap.settle()
    heap.release()
    assert gone() is None


def test_the_collector_seldom_visits_what_a_service_keeps() -> None:
    """Its event loop stands still meanwhile: 300,000 objects are those of 3,000 sessions."""
    visited: list[int] = []

    def note(phase: str, facts: dict[str, int]) -> None:
        if phase == "start":
            visited.append(facts["generation"])

    heap.settle()
    gc.callbacks.append(note)
    try:
        kept = [[each] for each in range(300_000)]
    finally:
        gc.callbacks.remove(note)
    assert len(kept) == 300_000
    assert 1 in visited
    assert 2 not in visited


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back as Linux does")
def test_only_whole_pages_of_a_range_are_given_back() -> None:
    num_bytes = 4 * mmap.PAGESIZE
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"x" * num_bytes
        held = ctypes.c_char.from_buffer(memory)
        heap.discard(ctypes.addressof(held) + 1, 3 * mmap.PAGESIZE)
        del held
        expected = [b"x" * mmap.PAGESIZE, b"\0" * mmap.PAGESIZE, b"\0" * mmap.PAGESIZE, b"x" * mmap.PAGESIZE]
        assert bytes(memory) == b"".join(expected)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_memory_in_huge_pages_is_memory_as_any_other() -> None:
    num_bytes = 4 * heap.HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = (ctypes.c_char * num_bytes).from_buffer(memory)
    # Less than one such page, and none that begins at one, are left alone.
    for start, size in ((0, 4096), (4096, heap.HUGE_PAGE_BYTES), (0, num_bytes), (4096, num_bytes - 8192)):
        heap.prefer_huge_pages(ctypes.addressof(view) + start, size)
    memory[:] = b"ab" * (num_bytes // 2)
    assert memory[:4] == memory[-4:] == b"abab"
    del view
    memory.close()
