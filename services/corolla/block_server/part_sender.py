"""Gives other block servers what they lack of the model's files, so slowly that no step of this server is late."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from corolla.block_server.peers import Peer
from corolla.chassis.errors import MalformedMessage, QueueFull
from corolla.chassis.tasks import TaskGroup
from corolla.models.model_manifest import PartNumber
from corolla.models.shared_files import SharedFiles
from corolla.v1 import blocks_pb2 as pb

MOST_ASKED: Final = 4
"""The most parts that one stream may have asked for and not been sent."""
_MOST_ASKED_BY_ALL: Final = 256
_MOST_WAITING_BYTES: Final = 2 << 20
"""A stream gets the next part once fewer bytes than this wait for it, so memory is bounded where peers do not read."""
_LOOK_S: Final = 0.005
_PAUSE_S: Final = 0.02
"""How long this server sends no part after each one, while it computes for sessions. A part takes the event loop a
millisecond or two, most of it for TLS."""


class PartSender:
    """Sends parts of files, one at a time, in the order in which peers take turns.

    Args:
        digest: the SHA-256 of the files' manifest.
        is_computing: says whether sessions run on this server.
    """

    def __init__(self, files: SharedFiles, digest: bytes, tasks: TaskGroup, is_computing: Callable[[], bool]) -> None:
        self._files = files
        self._digest = digest
        self._tasks = tasks
        self._is_computing = is_computing
        self._asked: dict[Peer, deque[PartNumber]] = {}
        self._turns = asyncio.Lock()

    def ask(self, fetch: pb.Fetch, peer: Peer) -> None:
        """Sends a part to a peer as soon as it is its turn.

        Raises:
            MalformedMessage: there is no such part.
            QueueFull: the peer, or all peers together, have asked for too many parts.
        """
        number = PartNumber(fetch.file, fetch.part)
        if fetch.manifest != self._digest or not self._files.has(number):
            raise MalformedMessage("fetch", "names a part of other files than this server has")
        asked = self._asked.get(peer, deque())
        if len(asked) >= MOST_ASKED or sum(map(len, self._asked.values())) >= _MOST_ASKED_BY_ALL:
            raise QueueFull("too many parts of the model's files were asked for at once")
        asked.append(number)
        if peer not in self._asked:
            self._asked[peer] = asked
            self._tasks.start(self._send_all(asked, peer), "send_parts")

    async def _send_all(self, asked: deque[PartNumber], peer: Peer) -> None:
        try:
            while asked:
                if peer.num_waiting_bytes > _MOST_WAITING_BYTES:
                    await asyncio.sleep(_LOOK_S)
                    continue
                async with self._turns:
                    await self._send(asked[0], peer)
                asked.popleft()
        finally:
            del self._asked[peer]

    async def _send(self, number: PartNumber, peer: Peer) -> None:
        content = await asyncio.to_thread(self._files.read, number)
        peer.send(pb.Part(file=number.file, part=number.part, is_absent=content is None), content or b"")
        if content is not None and self._is_computing():
            await asyncio.sleep(_PAUSE_S)
