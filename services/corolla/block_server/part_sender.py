"""Gives other block servers what they lack of the model's files, so slowly that no step of this server is late."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
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
_LOOK_S: Final = 0.002
_BYTES_PER_S: Final = 48 << 20
"""How much this server sends while it computes for sessions."""
_PIECE_S: Final = 0.002
"""The time between two pieces of a part, or the time of a step on the event loop if that is longer. Smaller pieces take
the loop more time in all, and larger ones more at once."""


class PartSender:
    """Sends parts of files, one at a time, in the order in which peers take turns.

    While the server computes, a part leaves in pieces. The size of a piece follows from the time since the piece
    before, so that each step waits for the same small share of its own time: steps of two milliseconds for 96 KiB,
    steps of ten milliseconds for five times that.

    Args:
        digest: the SHA-256 of the files' manifest.
        is_computing: says whether sessions run on this server.
        wait: waits before a piece, and returns how many bytes it may have.
    """

    def __init__(
        self,
        files: SharedFiles,
        digest: bytes,
        tasks: TaskGroup,
        is_computing: Callable[[], bool],
        wait: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        self._files = files
        self._digest = digest
        self._tasks = tasks
        self._is_computing = is_computing
        self._wait = wait or _wait
        self._asked: dict[Peer, deque[pb.Fetch]] = {}
        self._turns = asyncio.Lock()

    def ask(self, fetch: pb.Fetch, peer: Peer) -> None:
        """Sends a part to a peer as soon as it is its turn.

        Raises:
            MalformedMessage: there is no such part.
            QueueFull: the peer, or all peers together, have asked for too many parts.
        """
        if fetch.manifest != self._digest or not self._files.has(PartNumber(fetch.file, fetch.part)):
            raise MalformedMessage("fetch", "names a part of other files than this server has")
        asked = self._asked.get(peer, deque())
        if len(asked) >= MOST_ASKED or sum(map(len, self._asked.values())) >= _MOST_ASKED_BY_ALL:
            raise QueueFull("too many parts of the model's files were asked for at once")
        asked.append(fetch)
        if peer not in self._asked:
            self._asked[peer] = asked
            self._tasks.start(self._send_all(asked, peer), "send_parts")

    async def _send_all(self, asked: deque[pb.Fetch], peer: Peer) -> None:
        following: asyncio.Future[bytes | None] | None = None
        try:
            while asked:
                if peer.num_waiting_bytes > _MOST_WAITING_BYTES:
                    await asyncio.sleep(_LOOK_S)
                    continue
                async with self._turns:
                    content = await (following or self._read(asked[0]))
                    # A thread reads the next part while this one leaves. Where several peers ask, none has a part
                    # waiting for its turn: memory holds two parts, however many peers there are.
                    following = self._read(asked[1]) if len(asked) > 1 and len(self._asked) == 1 else None
                    await self._send(asked[0], content, peer)
                asked.popleft()
        finally:
            if following is not None:
                following.cancel()
            del self._asked[peer]

    def _read(self, fetch: pb.Fetch) -> asyncio.Future[bytes | None]:
        number = PartNumber(fetch.file, fetch.part)
        return asyncio.get_running_loop().run_in_executor(None, self._files.read, number)

    async def _send(self, fetch: pb.Fetch, content: bytes | None, peer: Peer) -> None:
        part = pb.Part(file=fetch.file, part=fetch.part, is_absent=content is None)
        left = memoryview(content or b"")
        while left and self._is_computing():
            num_allowed = await self._wait()
            if num_allowed >= len(left):
                break
            if num_allowed:
                part.has_more = True
                peer.send(part, left[:num_allowed])
                left = left[num_allowed:]
        part.has_more = False
        peer.send(part, left)


async def _wait() -> int:
    """Waits for one turn of the event loop or more. Returns how many bytes may be sent for the time that this took."""
    began_s = time.monotonic()
    await asyncio.sleep(_PIECE_S)
    return int((time.monotonic() - began_s) * _BYTES_PER_S)
