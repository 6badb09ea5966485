"""Prepares sessions that take long to open: they need an adapter or a grammar, or have a long text.

Threads do that work before the session is opened, so that other sessions do not wait. All grammars share one thread.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from corolla.block_server.grammars import Grammars
from corolla.block_server.peers import Peer
from corolla.block_server.row_sampling import SessionSampler
from corolla.chassis.errors import CorollaError, InternalError, QueueFull
from corolla.chassis.handlers import call_path
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb

log = logging.getLogger(__name__)

_MOST_OF_PEER: Final = 1024
"""The most pending opens of one peer. A client service has fewer answers; all may be opened when a last hop dies."""
_LONG_TEXT_TOKENS: Final = 2048


def takes_a_while(message: pb.Sampler) -> bool:
    """Making this sampler may hold the event loop too long: it has a long text, or a grammar, which may be new."""
    return len(message.token_ids) > _LONG_TEXT_TOKENS or message.HasField("grammar")


@dataclass(frozen=True, slots=True)
class _PendingOpen:
    epoch: int
    peer: Peer
    task: asyncio.Task[None]


class PendingOpens:
    """The opens that are being prepared, by session. If a session is opened again or closed, its preparation ends.

    Args:
        grammars: reads grammars; None: this server does not support them.
    """

    def __init__(self, tasks: TaskGroup, grammars: Grammars | None = None) -> None:
        self._tasks = tasks
        self._grammars = grammars
        self._by_session: dict[bytes, _PendingOpen] = {}

    def __len__(self) -> int:
        return len(self._by_session)

    def start(
        self,
        control: pb.Open,
        peer: Peer,
        make: Callable[[pb.Open], SessionSampler] | None,
        then: Callable[[SessionSampler | None], None],
        refuse: Callable[[CorollaError], None],
        load: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Starts to prepare the session of an Open, and makes its sampler in a thread.

        Args:
            make: makes the sampler; None if the session has none.
            then: is called with the sampler, on the event loop.
            refuse: is called with the error instead, if the preparation fails.
            load: is awaited first.

        Raises:
            QueueFull: too many sessions of this peer are being prepared.
        """
        if sum(each.peer is peer for each in self._by_session.values()) >= _MOST_OF_PEER:
            raise QueueFull("a block server prepares too many sessions of one client")

        async def prepare() -> None:
            try:
                if load is not None:
                    await load()
                if self._grammars is not None and control.sampler.HasField("grammar"):
                    await self._grammars.read(control.tenant, control.sampler.grammar.text)
                sampler = None if make is None else await asyncio.to_thread(make, control)
            except CorollaError as error:
                refuse(error)
            except Exception as failure:
                log.error("could not make a sampler", extra={"where": call_path(failure)})
                refuse(InternalError("a sampler could not be made"))
            else:
                then(sampler)
            finally:
                if self._by_session.get(control.session_id) is pending:
                    del self._by_session[control.session_id]

        task = self._tasks.start(prepare(), "preparation of a session")
        pending = self._by_session[control.session_id] = _PendingOpen(control.epoch, peer, task)

    def cancel(self, session_id: bytes, epoch: int) -> None:
        """Cancels the pending open of a session if it is for this epoch or an earlier one."""
        pending = self._by_session.get(session_id)
        if pending is not None and pending.epoch <= epoch:
            del self._by_session[session_id]
            self._tasks.cancel(pending.task)

    def cancel_of(self, peer: Peer) -> None:
        """Cancels all pending opens of a peer whose stream has ended."""
        for session_id, pending in list(self._by_session.items()):
            if pending.peer is peer:
                self.cancel(session_id, pending.epoch)
