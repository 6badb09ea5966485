"""Stands before a block server's runner and makes its work fail as a device, a bug or bad weights would."""

from collections.abc import Callable, Sequence
from typing import Any

from corolla.block_server.batch_executor import BatchRunner
from corolla.compute.span_runner import BatchOutput, LaunchedBatch, RowWork


class FaultyRunner:
    """Computes like the runner behind it.

    Args:
        before: sees the rows of each batch first; what it raises, computing them raises.
        after: makes another output of the true one.
        is_broken: nothing at all can be computed.
    """

    def __init__(
        self,
        runner: BatchRunner,
        *,
        before: Callable[[Sequence[RowWork]], None] = lambda rows: None,
        after: Callable[[BatchOutput], BatchOutput] = lambda output: output,
        is_broken: bool = False,
    ) -> None:
        self._runner = runner
        self._before = before
        self._after = after
        self._is_broken = is_broken

    def forward_each(self, rows: Sequence[RowWork], *others: Any) -> BatchOutput:
        self._fail_if_broken()
        self._before(rows)
        return self._after(self._runner.forward_each(rows, *others))

    def launch(self, rows: Sequence[RowWork], *_others: Any) -> LaunchedBatch | None:
        """Launches nothing, so that `forward_each` computes every step."""

    def prepare_next(self, *_args: Any) -> None:
        raise AssertionError("nothing was launched")

    def launch_next(self, *_args: Any) -> None:
        """Launches nothing ahead, so that `forward_each` computes every step."""

    def finish(self, *_args: Any) -> tuple[bool, ...]:
        raise AssertionError("nothing was launched")

    def warm_up(self) -> None:
        self._fail_if_broken()
        self._runner.warm_up()

    def _fail_if_broken(self) -> None:
        if self._is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
