"""What is settled is passed over, and freed once it is released."""

import gc
import weakref

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
