"""Keeps the standbys of this hop's sessions up to date: it copies tokens there in the background, while steps go on."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from corolla.block_server.handover.plan import LEAST_TOKENS, HandoverProgress, part_tokens
from corolla.block_server.handover.sender import HandoverLink, HandoverSender
from corolla.block_server.hop_session import HopSession, SessionState, nothing
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.neighbours import Neighbours
from corolla.block_server.peers import PeerTable
from corolla.block_server.sessions import SessionTable
from corolla.cache.store import SessionCache
from corolla.chassis.errors import CorollaError, HopSessionLost
from corolla.chassis.handlers import call_path
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.stream import Connect

log = logging.getLogger(__name__)

_PAUSE_S: Final = 0.02
_SESSIONS_PER_PAUSE: Final = 8
"""A session that has caught up pauses before its next part, and longer among many, so that parts hold up few steps."""
_MOST_PARTS: Final = 4
"""How many parts are copied or travel at a time, for all sessions together."""


@dataclass(slots=True)
class _Standby:
    """One session's standby, and the task that copies there."""

    version: int
    address: str
    transfer_id: bytes
    progress: HandoverProgress
    task: asyncio.Task[None]


@dataclass(slots=True)
class _SharedLink:
    link: HandoverLink
    stack: AsyncExitStack
    num_users: int = 0


@dataclass(eq=False, repr=False)
class Standbys:
    """The standbys that clients have named for the sessions of this server.

    Args:
        neighbours: knows the addresses of block servers; the server connects to no others.
        fingerprint: the weights and protocol of this server, which its standbys share.
        least_tokens: the fewest tokens of a part of a short text.
    """

    sessions: SessionTable[SessionCache]
    sender: HandoverSender
    peers: PeerTable
    neighbours: Neighbours
    connect: Connect
    fingerprint: str
    tasks: TaskGroup
    metrics: BlockServerMetrics
    least_tokens: int = LEAST_TOKENS
    _by_session: dict[bytes, _Standby] = field(init=False, default_factory=dict)
    # The transfer ids of standbys, by session, whose addresses a router is asked for.
    _looked_up: dict[bytes, bytes] = field(init=False, default_factory=dict)
    _links: dict[str, _SharedLink] = field(init=False, default_factory=dict)
    _room: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(_MOST_PARTS))

    @property
    def num_copied_tokens(self) -> int:
        """How many tokens of this hop's sessions standbys hold, or are about to hold."""
        return sum(each.progress.num_received for each in self._by_session.values())

    @property
    def lags(self) -> list[int]:
        """How many tokens its standby lacks of each session that has one."""
        held = ((self.sessions.get(session_id), each.progress) for session_id, each in self._by_session.items())
        return [
            max(0, session.cache.num_tokens - progress.num_received)
            for session, progress in held
            if session is not None
        ]

    def name(self, control: pb.Standby, *, may_look: bool = True) -> None:
        """Takes a client's word which server stands by for a session. Must be called between iterations.

        Args:
            may_look: whether to ask a router for a server that is unknown here, since it may have joined just now.
        """
        session, looked_up = self.sessions.get(control.session_id), self._looked_up.get(control.session_id)
        if not may_look and looked_up != control.transfer_id:
            return  # the client has named another one meanwhile
        self._looked_up.pop(control.session_id, None)
        if session is None or session.request.epoch != control.epoch or session.state is not SessionState.RUNNING:
            return
        self._forget(control.session_id)
        address = control.hop.address
        if not address:
            return
        # The handover of a session that leaves counts what it has sent by the same note as a copy to a standby.
        if self.sessions.is_draining or not (may_look or self.neighbours.has_address(address)):
            self._tell(session, 0)
            return
        if not self.neighbours.has_address(address):
            self._looked_up[control.session_id] = control.transfer_id
            again = partial(self.name, control, may_look=False)
            self.neighbours.look_again(lambda _: self.sender.engine.between_iterations(again))
            return
        progress = HandoverProgress()
        # A step that took tokens back may have come here before this frame.
        num_held = control.num_tokens if session.rewound_step_id <= control.step_id else 0
        progress.begin(num_held)
        # The standby may hold the beginning of a prompt that is not computed here yet.
        session.cache.num_unchanged_tokens = num_held
        task = self.tasks.start(self._keep(session, session.version, control, progress), "copy to a standby")
        self._by_session[control.session_id] = _Standby(session.version, address, control.transfer_id, progress, task)

    def release(self, session_id: bytes, version: int) -> str:
        """Stops copying a session that is about to be handed over. Returns the address of its standby; empty: none.

        A handover to that address sends only what the standby lacks.
        """
        standby = self._by_session.get(session_id)
        if standby is None or standby.version != version:
            return ""
        self._forget(session_id)
        self.sender.continue_with(session_id, standby.address, standby.transfer_id, standby.progress)
        return standby.address

    def _forget(self, session_id: bytes) -> None:
        standby = self._by_session.pop(session_id, None)
        if standby is not None:
            self.tasks.cancel(standby.task)

    async def _keep(
        self, session: HopSession[SessionCache], version: int, control: pb.Standby, progress: HandoverProgress
    ) -> None:
        """Copies what a session settles until its turn or epoch ends, or the standby is lost."""
        request, has_answered = session.request, False
        try:
            async with self._linked(control.hop.address) as link:
                while self.sessions.in_version(request.session_id, version).state is SessionState.RUNNING:
                    if not self._is_due(session, progress):
                        num_sent = min(progress.num_received, session.cache.num_unchanged_tokens)
                        if num_sent and not has_answered:
                            self._tell(session, num_sent)
                            has_answered = True
                        await self._until_due(session, version, progress)
                        continue
                    async with self._room:
                        num_bytes = await self.sender.copy_settled(session, control.transfer_id, progress, link)
                    self.metrics.standbys.bytes.labels("out").inc(num_bytes)
                    if control.after_each_part and not has_answered:
                        self._tell(session, progress.num_received, is_part=True)
            return
        except HopSessionLost:
            pass  # here or there; the client names another standby if it still needs one
        except CorollaError as failure:
            facts = {"address": control.hop.address, "reason": failure.reason}
            log.info("a standby does not take a session any more", extra=facts)
        except Exception as failure:
            # The device may fail to read these pages, and still compute other sessions.
            log.error("could not copy a session to its standby", extra={"where": call_path(failure)})
        finally:
            held = self._by_session.get(request.session_id)
            if held is not None and held.transfer_id == control.transfer_id:
                del self._by_session[request.session_id]
        if session.version == version:
            self._tell(session, 0)

    async def _until_due(self, session: HopSession[SessionCache], version: int, progress: HandoverProgress) -> None:
        """Returns after a pause, once the next part should be copied, or the session's turn or epoch has ended."""
        has_changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def look() -> None:
            is_over = session.version != version or session.state is not SessionState.RUNNING
            if is_over or self._is_due(session, progress):
                # The compute thread looks, too: it reads the last part of a handover.
                loop.call_soon_threadsafe(has_changed.set)

        session.on_change = look
        try:
            await asyncio.sleep(_PAUSE_S * (1 + len(self._by_session) // _SESSIONS_PER_PAUSE))
            await has_changed.wait()
        finally:
            if session.on_change is look:
                session.on_change = nothing

    def _is_due(self, session: HopSession[SessionCache], progress: HandoverProgress) -> bool:
        """Enough tokens are settled for the next part of the copy."""
        num_settled = min(session.num_settled_tokens, session.cache.num_tokens)
        num_sent = min(progress.num_received, session.cache.num_unchanged_tokens)
        return num_settled >= num_sent + part_tokens(num_settled, self.least_tokens)

    def _tell(self, session: HopSession[SessionCache], num_tokens: int, *, is_part: bool = False) -> None:
        """Tells the client how many tokens of a session its standby holds; 0: the standby is lost."""
        request = session.request
        if (peer := self.peers.get(request.client_id)) is not None:
            word = pb.Standby(
                session_id=request.session_id, epoch=request.epoch, num_tokens=num_tokens, after_each_part=is_part
            )
            peer.send(word)

    @asynccontextmanager
    async def _linked(self, address: str) -> AsyncIterator[HandoverLink]:
        """The stream to a standby's server, which all sessions share."""
        shared = self._links.get(address)
        if shared is None or shared.link.is_broken:
            shared = self._links[address] = _SharedLink(HandoverLink(address, self.connect), AsyncExitStack())
            await shared.stack.enter_async_context(shared.link.connect(self.fingerprint))
        shared.num_users += 1
        try:
            yield shared.link
        finally:
            shared.num_users -= 1
            if not shared.num_users:
                if self._links.get(address) is shared:
                    del self._links[address]
                await shared.stack.aclose()
