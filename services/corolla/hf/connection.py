"""Where blocking code meets the data plane: one thread with an event loop for each model that a process uses."""

import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, TypeVar

from corolla.chain.control import ControlPlane
from corolla.chain.identity import SessionIdentity
from corolla.chain.placement import PlacementWatch
from corolla.chain.recovery import Recovery
from corolla.chain.recovery_budget import RecoveryBudget
from corolla.chain.replay import Replayer
from corolla.chain.reservations import ChainLimits, OpenOptions, Reservations
from corolla.chain.routes import Routes
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import CorollaError, HopUnavailable, StartupError
from corolla.chassis.loop_thread import LoopStopped, LoopThread
from corolla.chassis.tasks import TaskGroup
from corolla.hf.row_group import RowGroup
from corolla.wire.stream import between_servers

Result = TypeVar("Result")

_SILENCE_S: Final = 5.0
"""Longer than in a client service: the caller's own work in this process keeps answers from being heard."""

# A session lives as long as this process keeps its streams; its lease only has to outlast a thinking user.
LIMITS: Final = ChainLimits(
    prefill_chunk_tokens=256, prefill_chunk_tokens_during_decode=256, step_timeout_s=60.0, lease_ms=3_600_000
)


class Connection:
    """To the router and the block servers of one model.

    It is closed when nobody holds it any more, and at the end of the process.

    Args:
        router: `host:port`.
        model: name under which the router knows the model.
        fingerprint: of the weights that every block server must have.
        num_blocks: of the model.
    """

    _shared: ClassVar["weakref.WeakValueDictionary[tuple[object, ...], Connection]"] = weakref.WeakValueDictionary()
    _shared_lock: ClassVar = threading.Lock()

    def __init__(self, router: str, model: str, fingerprint: str, num_blocks: int) -> None:
        self._process_id = os.getpid()
        self._thread = LoopThread("corolla")
        self._planes = self.call(_connect(router, model, fingerprint, num_blocks))
        self.close = weakref.finalize(self, self._thread.stop, self._planes.close)

    @classmethod
    def shared(cls, router: str, model: str, fingerprint: str, num_blocks: int) -> "Connection":
        """The connection that models of this process have in common."""
        key = (os.getpid(), router, model, fingerprint)
        with cls._shared_lock:
            connection = cls._shared.get(key)
            if connection is None or not connection.close.alive:
                connection = cls._shared[key] = cls(router, model, fingerprint, num_blocks)
            return connection

    def __deepcopy__(self, memo: dict[int, Any]) -> "Connection":
        """A model that is copied, as for a frozen reference, steps through the same servers."""
        return self

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine in the connection's thread and waits for it; an interrupt cancels it.

        Raises:
            StartupError: the process was forked since the connection was made.
        """
        if os.getpid() != self._process_id:
            work.close()
            raise StartupError("a connection does not survive a fork; load the model in the process that uses it")
        try:
            return self._thread.call(work)
        except LoopStopped:
            raise HopUnavailable("the model's connection is closed") from None

    def post(self, work: Callable[[], None]) -> None:
        """Runs something soon in the connection's thread, unless that has ended."""
        if os.getpid() == self._process_id:
            self._thread.post(work)

    async def open_rows(
        self, new: Sequence[SessionIdentity], open_options: OpenOptions, earlier: RowGroup | None = None
    ) -> RowGroup:
        """Opens sequences on one chain.

        Args:
            new: more sequences than there were, if any, in the first epoch.
            open_options: for all of them.
            earlier: sequences that stay where they are, opened again.

        Raises:
            NoChain, OutOfPages, HopUnavailable, RouterUnavailable: nothing new stays allocated.
        """
        budget = RecoveryBudget(LIMITS.max_recoveries)
        while True:
            identities = tuple(new)
            if earlier is not None:
                kept = earlier.raise_epoch()
                identities = (*kept, *(replace(identity, epoch=kept[0].epoch) for identity in new))
                open_options = replace(open_options, recorded_chain=earlier.chain, only_chain=earlier.chain)
            try:
                binding = await self._planes.reservations.reserve(identities, open_options)
                break
            except BaseException as failure:
                if earlier is None:
                    raise
                # Its hops keep what was opened on a chain that has sessions already; those that are new go.
                self._planes.reservations.give_back(identities[len(kept) :], earlier.chain.hops)
                if not isinstance(failure, CorollaError):
                    raise
                await earlier.recover(failure, budget)
        return RowGroup(
            binding,
            self._planes.data,
            self._planes.recovery,
            earlier=earlier,
            max_step_tokens=max(LIMITS.prefill_chunk_tokens, len(identities)),
            step_timeout_s=LIMITS.step_timeout_s,
            max_recoveries=LIMITS.max_recoveries,
            num_cached_tokens=binding.num_cached_tokens if earlier is None else 0,
        )


class _Planes:
    """What lives in the thread."""

    def __init__(self, router: str, model: str, fingerprint: str, num_blocks: int) -> None:
        self.control = ControlPlane(router, model)
        # The process is its caller's: whatever fails here is restarted, and ends nothing.
        self.tasks = TaskGroup()
        limits = replace(between_servers(), ping_after_s=1.0, silence_s=_SILENCE_S)
        self.data = DataPlane(fingerprint, self.tasks.subgroup(), limits)
        placement = PlacementWatch(self.control)
        self.tasks.start_essential(placement.run, "placement_watch")
        self.routes = Routes(self.control, placement, fingerprint, num_blocks)
        self.reservations = Reservations(self.routes, self.data, LIMITS)
        replayer = Replayer(self.reservations, self.data, LIMITS)
        self.recovery = Recovery(self.routes, self.reservations, replayer, self.data.handovers, LIMITS)

    async def close(self) -> None:
        await self.tasks.close()
        await self.routes.close()
        await self.data.close()
        await self.control.close()


async def _connect(router: str, model: str, fingerprint: str, num_blocks: int) -> _Planes:
    return _Planes(router, model, fingerprint, num_blocks)
