"""Sessions that take a while to open: an adapter to load, a long text or a grammar to read, choices to leave out.

All that happens in threads, the reading in one of its own, before the session is opened, and holds up nobody else.
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
from corolla.chassis.handlers import where
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb

log = logging.getLogger(__name__)

_MOST_OF_PEER: Final = 1024
"""More than the answers of a client service, all of which may come at once when another last hop dies."""
_MOST_LEFT_OUT: Final = 16
"""Not more than a last hop chooses between two states of the random stream."""
_LONG_TEXT_TOKENS: Final = 2048


def takes_a_while(message: pb.Sampler) -> bool:
    """Whether a sampler should not be made on the event loop, apart from its grammar."""
    return len(message.token_ids) > _LONG_TEXT_TOKENS or message.num_skipped > _MOST_LEFT_OUT


@dataclass(frozen=True, slots=True)
class _Preparation:
    epoch: int
    peer: Peer
    task: asyncio.Task[None]


class Preparations:
    """What is being prepared, by session. A session that is opened again, or closed, is not prepared any further.

    Args:
        tasks: of this server.
        grammars: that it follows; None where it follows none.
    """

    def __init__(self, tasks: TaskGroup, grammars: Grammars | None = None) -> None:
        self._tasks = tasks
        self._grammars = grammars
        self._of_sessions: dict[bytes, _Preparation] = {}

    def __len__(self) -> int:
        return len(self._of_sessions)

    def start(
        self,
        control: pb.Open,
        peer: Peer,
        make: Callable[[pb.Open], SessionSampler] | None,
        then: Callable[[SessionSampler | None], None],
        refuse: Callable[[CorollaError], None],
        load: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Makes the sampler of an Open in a thread.

        Args:
            make: None where the session has none.
            then: is called with it, on the event loop.
            load: is awaited first.
            refuse: is called instead with what was wrong.

        Raises:
            QueueFull: too many are being made for this peer.
        """
        if sum(each.peer is peer for each in self._of_sessions.values()) >= _MOST_OF_PEER:
            raise QueueFull("a block server prepares too many sessions of one client")

        def make_ready(make: Callable[[pb.Open], SessionSampler]) -> SessionSampler:
            sampler = make(control)
            sampler.skip()
            return sampler

        async def prepare() -> None:
            try:
                if load is not None:
                    await load()
                if self._grammars is not None and control.sampler.HasField("grammar"):
                    await self._grammars.read(control.tenant, control.sampler.grammar.text)
                sampler = None if make is None else await asyncio.to_thread(make_ready, make)
            except CorollaError as error:
                refuse(error)
            except Exception as failure:
                log.error("sampler not made", extra={"where": where(failure)})
                refuse(InternalError("a sampler could not be made"))
            else:
                then(sampler)
            finally:
                if self._of_sessions.get(control.session_id) is preparation:
                    del self._of_sessions[control.session_id]

        task = self._tasks.start(prepare(), "preparation of a session")
        preparation = self._of_sessions[control.session_id] = _Preparation(control.epoch, peer, task)

    def cancel(self, session_id: bytes, epoch: int) -> None:
        """Nobody wants the session in this epoch or an earlier one any more."""
        preparation = self._of_sessions.get(session_id)
        if preparation is not None and preparation.epoch <= epoch:
            del self._of_sessions[session_id]
            self._tasks.cancel(preparation.task)

    def cancel_of(self, peer: Peer) -> None:
        """The stream on which these sessions were to be opened has ended."""
        for session_id, preparation in list(self._of_sessions.items()):
            if preparation.peer is peer:
                self.cancel(session_id, preparation.epoch)
