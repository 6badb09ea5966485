"""What is settled is passed over, and freed once it is released."""

import ctypes
import gc
import mmap
import sys
import weakref

import pytest

from corolla.chassis import heap


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
    assert gc.get_freeze_count() == 0


def test_what_is_garbage_already_is_not_kept() -> None:
    gone = weakref.ref(Node())
    heap.settle()
    heap.release()
    assert gone() is None


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
