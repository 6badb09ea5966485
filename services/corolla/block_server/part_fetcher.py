"""Fetches parts of the model's files from other block servers, from several at a time.

Nothing that they send is believed before its checksum was compared. A server that sends something else is not asked
again. A server may lack parts, since a machine that joined has those of its own span: others are asked for these.
"""

import asyncio
import hashlib
import logging
import random
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any, Final, TypeVar

from corolla.block_server.part_sender import MOST_ASKED
from corolla.chassis.errors import CorollaError, StartupError
from corolla.models.model_manifest import MOST_MANIFEST_BYTES, PART_BYTES, PartNumber
from corolla.models.shared_files import MANIFEST, SharedFiles
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import router_pb2
from corolla.wire.frames import Buffer, Frame
from corolla.wire.stream import Connect, Receiver, Stream, StreamEnd, between_servers

log = logging.getLogger(__name__)

_MOST_PEERS: Final = 4
_MOST_FRAME_BYTES: Final = PART_BYTES + (64 << 10)
_MOST_ABSENT: Final = 64
"""A server that lacks so many parts in a row has hardly any of those wanted, and others are found."""

_Result = TypeVar("_Result")
FindPeers = Callable[[], Awaitable[Sequence[router_pb2.PlacedServer]]]


class PartFetcher:
    """Fetches parts of the files of one manifest. The event loop makes it; `get` and `manifest` are for threads.

    Args:
        digest: the SHA-256 of the manifest.
        find_peers: asks the router for the model's block servers.
        connect: begins streams to them.
        part_timeout_s: a server that computes sends slowly; one that sends nothing for so long is left.
        retry_s: how long nothing is tried after all servers have failed.
        notice_s: how long nothing may come before the log says why.
    """

    def __init__(
        self,
        digest: bytes,
        find_peers: FindPeers,
        connect: Connect,
        *,
        part_timeout_s: float = 30.0,
        retry_s: float = 0.5,
        notice_s: float = 5.0,
    ) -> None:
        self._part_timeout_s = part_timeout_s
        self._retry_s = retry_s
        self._notice_s = notice_s
        self._digest = digest
        self._find_peers = find_peers
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._running: set[Future[Any]] = set()
        self._is_stopped = False
        self._liars: set[str] = set()
        self._brought_s, self._has_said_why = 0.0, False
        self._num_missing_bytes = self._num_fetched_bytes = 0
        self._began_s = 0.0

    @property
    def seconds_left(self) -> float:
        """How long the parts that are missing now will take, at the speed so far; 0: none is missing, or not known."""
        if not self._num_fetched_bytes:
            return 0.0
        return self._num_missing_bytes * (self._loop.time() - self._began_s) / self._num_fetched_bytes

    def get(self, files: SharedFiles, numbers: Sequence[PartNumber]) -> None:
        """Gets these parts, however long that takes. Raises StartupError if this process ends meanwhile."""
        self._wait_for(self._get(files, set(numbers)))

    def manifest(self) -> bytes:
        """Gets the manifest itself. Raises as `get` does."""
        return self._wait_for(self._get_manifest())

    def stop(self) -> None:
        """Ends what the threads wait for."""
        self._is_stopped = True
        for future in list(self._running):
            future.cancel()

    def _wait_for(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running.add(future)
        if self._is_stopped:
            future.cancel()
        try:
            return future.result()
        except CancelledError:
            raise StartupError("this process ends before it has all of the model's files") from None
        finally:
            self._running.discard(future)

    async def _get(self, files: SharedFiles, wanted: set[PartNumber]) -> None:
        self._num_missing_bytes, self._num_fetched_bytes = len(wanted) * PART_BYTES, 0
        self._began_s = self._loop.time()
        self._note_progress()
        lacked = defaultdict[str, set[PartNumber]](set)
        while wanted:
            num_wanted, in_order = len(wanted), sorted(wanted)
            links = await self._links()
            for number, link in enumerate(links):
                first = number * num_wanted // len(links)
                link.lacked = lacked[link.address]
                link.untried.extend(each for each in in_order[first:] + in_order[:first] if each not in link.lacked)
            try:
                workers = (self._take_parts(link, files, wanted) for link in links for _ in range(MOST_ASKED))
                await asyncio.gather(*workers)
            finally:
                for link in links:
                    link.stream.close()
            if len(wanted) == num_wanted:
                lacked.clear()  # they may have fetched something meanwhile
                await self._pause(_nothing_from(links))
            else:
                self._note_progress()

    async def _take_parts(self, link: "_Link", files: SharedFiles, wanted: set[PartNumber]) -> None:
        while (number := link.next_of(wanted)) is not None:
            is_taken = False
            try:
                content = await link.ask(number)
                if content is not None:
                    is_taken = await asyncio.to_thread(files.take, number, content)
                    if is_taken:
                        self._num_missing_bytes -= PART_BYTES
                        self._num_fetched_bytes += PART_BYTES
                    else:
                        self._leave_liar(link)
            finally:
                if not is_taken:
                    wanted.add(number)

    async def _get_manifest(self) -> bytes:
        self._note_progress()
        while True:
            links = await self._links()
            try:
                for link in links:
                    if (content := await self._manifest_from(link)) is None:
                        continue
                    digest = await asyncio.to_thread(hashlib.sha256, content)
                    if digest.digest() == self._digest:
                        return content
                    self._leave_liar(link)
            finally:
                for link in links:
                    link.stream.close()
            await self._pause(_nothing_from(links))

    async def _manifest_from(self, link: "_Link") -> bytes | None:
        content = bytearray()
        while len(content) < MOST_MANIFEST_BYTES:
            part = await link.ask(PartNumber(MANIFEST, len(content) // PART_BYTES))
            if part is None:
                return None
            content += part
            if len(part) < PART_BYTES:
                break
        return bytes(content)

    async def _links(self) -> "list[_Link]":
        """Begins streams to servers that may have the files; if there are none, waits for one."""
        while True:
            try:
                placed = await self._find_peers()
            except CorollaError:
                placed = ()
            serving = [each.server for each in placed if each.state != router_pb2.SERVER_STATE_JOINING]
            peers = [each for each in serving if each.address not in self._liars]
            if peers:
                chosen = random.sample(peers, min(_MOST_PEERS, len(peers)))  # spreads the work, and guards nothing
                return [
                    _Link(self._connect, each, self._digest, self._part_timeout_s, self._leave_liar) for each in chosen
                ]
            await self._pause(
                "all that serve sent wrong bytes; look into their logs, then start this machine again"
                if serving
                else "none serves yet"
            )

    def _note_progress(self) -> None:
        self._brought_s, self._has_said_why = self._loop.time(), False

    async def _pause(self, reason: str) -> None:
        """Waits after a try that brought nothing, and logs the reason if nothing has come for long."""
        if not self._has_said_why and self._loop.time() - self._brought_s >= self._notice_s:
            log.warning("waiting for a block server that has the model's files: %s", reason)
            self._has_said_why = True
        await asyncio.sleep(self._retry_s)

    def _leave_liar(self, link: "_Link") -> None:
        log.error("a block server sent other bytes than the manifest says", extra={"address": link.address})
        self._liars.add(link.address)
        link.fail()


def _nothing_from(links: "Sequence[_Link]") -> str:
    addresses = ", ".join(link.address for link in links)
    return f"none of {addresses} sends any; is the port of the other machine open to this one?"


class _Link:
    """A stream on which parts are asked for.

    Args:
        timeout_s: how long a part may take.
        on_lie: is called if the server sends what was not asked for.

    Attributes:
        is_over: nothing more is asked for here.
        untried: the parts that may be asked for here, each of them once.
        lacked: those that the server said to lack.
    """

    def __init__(
        self,
        connect: Connect,
        server: router_pb2.ServerDescription,
        digest: bytes,
        timeout_s: float,
        on_lie: Callable[["_Link"], None],
    ) -> None:
        self.address = server.address
        self.is_over = False
        self.untried: deque[PartNumber] = deque()
        self.lacked: set[PartNumber] = set()
        self._num_absent = 0
        self._digest = digest
        self._timeout_s = timeout_s
        self._on_lie = on_lie
        self._asked: dict[PartNumber, asyncio.Future[Buffer | None]] = {}
        # The pieces of parts that have begun to come.
        self._begun: dict[PartNumber, bytearray] = {}
        self.stream: Stream = connect(
            server.address, self._accept, replace(between_servers(), max_frame_bytes=_MOST_FRAME_BYTES)
        )
        self.stream.ended.add_done_callback(self._on_ended)
        self.stream.send(pb.Hello(fingerprint=server.fingerprint))

    def next_of(self, wanted: set[PartNumber]) -> PartNumber | None:
        """Takes a part out of those wanted that was not asked for here; None: there is none, or the link is over."""
        while self.untried and not self.is_over:
            number = self.untried.popleft()
            if number in wanted:
                wanted.remove(number)
                return number
        return None

    async def ask(self, number: PartNumber) -> Buffer | None:
        """The bytes of a part, which nothing has checked. None: the server lacks it, is lost or silent."""
        if self.is_over:
            return None
        answer: asyncio.Future[Buffer | None] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self.stream.send(pb.Fetch(manifest=self._digest, file=number.file, part=number.part))
        try:
            async with asyncio.timeout(self._timeout_s):
                content = await answer
        except TimeoutError:
            self.fail()
            return None
        if content is not None:
            self._num_absent = 0
        elif not self.is_over:
            self._lacks(number)
        return content

    def _lacks(self, number: PartNumber) -> None:
        self.lacked.add(number)
        self._num_absent += 1
        if self._num_absent >= _MOST_ABSENT:
            self.untried.clear()
        elif self.untried:
            # A server lacks whole runs of parts.
            self.untried.rotate(random.randrange(len(self.untried)))

    def fail(self) -> None:
        """Ends the stream, and what is asked for. What still arrives does not count, since it may only be late."""
        if self.is_over:
            return
        self.is_over = True
        self.stream.abort()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)
        self._asked.clear()
        self._begun.clear()

    def _accept(self, stream: Stream) -> Receiver:
        return self._receive

    def _receive(self, frame: Frame) -> None:
        match frame.control:
            case pb.Welcome():
                return
            case pb.Part() if self._take(frame.control, frame.payload):
                return
        if not self.is_over:
            self._on_lie(self)

    def _take(self, part: pb.Part, payload: Buffer) -> bool:
        """Takes a part, or a piece of one. Returns False if this link did not ask for it, or it has a wrong length."""
        number = PartNumber(part.file, part.part)
        if number not in self._asked:
            return False
        if part.has_more or number in self._begun:
            pieces = self._begun.setdefault(number, bytearray())
            if not payload or len(pieces) + len(payload) > PART_BYTES:
                return False
            pieces += payload
            if part.has_more:
                return True
            payload = self._begun.pop(number)
        if len(payload) > PART_BYTES:
            return False
        if not (answer := self._asked.pop(number)).done():
            answer.set_result(None if part.is_absent else payload)
        return True

    def _on_ended(self, ended: "asyncio.Future[StreamEnd]") -> None:
        self.fail()
