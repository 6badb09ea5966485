"""Stands before a block server's runner and makes its work fail as a device, a bug or bad weights would."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from corolla.compute.base import BlockRunner, LaunchedBatch, RowWork


class FaultyRunner:
    """Computes like the runner behind it, without recorded steps.

    Args:
        before: sees the rows of each batch first; what it raises, computing them raises.
        after: makes another batch of the one that was launched.
        is_broken: nothing at all can be computed.
    """

    def __init__(
        self,
        runner: BlockRunner,
        *,
        before: Callable[[Sequence[RowWork]], None] = lambda rows: None,
        after: Callable[[LaunchedBatch], LaunchedBatch] = lambda launched: launched,
        is_broken: bool = False,
    ) -> None:
        self._runner = runner
        self._before = before
        self._after = after
        self._is_broken = is_broken

    def prepare(self, *_args: Any) -> None:
        raise AssertionError("no step is recorded")

    def launch(self, rows: Sequence[RowWork], *others: Any) -> LaunchedBatch:
        self._fail_if_broken()
        self._before(rows)
        return self._after(self._runner.launch(rows, *others))

    def finish(self, *args: Any) -> tuple[bool, ...]:
        return self._runner.finish(*args)

    def may_be_recorded(self, *_args: Any) -> bool:
        return False

    def warm_up(self) -> None:
        self._fail_if_broken()
        self._runner.warm_up()

    def _fail_if_broken(self) -> None:
        if self._is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def plant_fault(runner: BlockRunner, **faults: Any) -> Callable[[], None]:
    """Makes a server's own runner fail from now on; see `FaultyRunner`. Returns a function that restores it."""
    faulty = FaultyRunner(copy.copy(runner), **faults)
    names = ("prepare", "launch", "finish", "may_be_recorded", "warm_up")
    for name in names:
        setattr(runner, name, getattr(faulty, name))

    def restore() -> None:
        for name in names:
            delattr(runner, name)

    return restore
