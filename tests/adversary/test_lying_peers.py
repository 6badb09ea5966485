"""Block servers that send wrong parts of the model's files, or ask for too many: each costs its own stream."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from google.protobuf.message import Message

from corolla.block_server.part_fetcher import PartFetcher
from corolla.block_server.part_sender import MOST_ASKED, PartSender
from corolla.block_server.peers import Peer
from corolla.chassis.errors import MalformedMessage, QueueFull, StartupError
from corolla.chassis.tasks import TaskGroup
from corolla.models.model_manifest import PART_BYTES, ManifestFile, ModelManifest, PartNumber
from corolla.models.shared_files import SharedFiles
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import router_pb2
from corolla.wire.frames import Buffer, Frame
from corolla.wire.stream import Receiver, Stream, StreamListener, connect
from tests.integration.waiting import until

NUM_PARTS = 4
Answer = Callable[[Stream, pb.Fetch], None]


class Model:
    """One file of random bytes, whole in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.bytes = os.urandom((NUM_PARTS - 1) * PART_BYTES + 300)
        parts = [self.bytes[at : at + PART_BYTES] for at in range(0, len(self.bytes), PART_BYTES)]
        checksums = "".join(hashlib.sha256(each).hexdigest() for each in parts)
        file = ManifestFile("weights.gguf", len(self.bytes), 0, checksums)
        self.manifest = ModelManifest("weights.gguf", "0" * 64, [file])
        self.content = self.manifest.written()
        self.digest = hashlib.sha256(self.content).digest()
        (folder / "whole").mkdir()
        (folder / "whole" / "weights.gguf").write_bytes(self.bytes)
        self.whole = SharedFiles(self.manifest, self.content, folder / "whole")

    def damaged(self, *parts: int) -> SharedFiles:
        """The file on a machine whose disk has changed these parts."""
        folder = self._folder / f"without {parts}"
        folder.mkdir()
        changed = bytearray(self.bytes)
        for part in parts:
            changed[part * PART_BYTES] ^= 1
        (folder / "weights.gguf").write_bytes(changed)
        return SharedFiles(self.manifest, self.content, folder)

    def lacking(self, fetcher: PartFetcher) -> SharedFiles:
        """The same file on another machine, which has nothing of it."""
        files = SharedFiles(self.manifest, self.content, self._folder / "there", fetcher.get)
        files.fetch_heads()
        return files


class PlayedServer:
    """A server that welcomes everybody, and answers each Fetch as a test wants."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = StreamListener("127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._listener.port}"
        self.num_streams = self.num_asked = 0

    async def __aenter__(self) -> "PlayedServer":
        await self._listener.start(self._accept)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._listener.close()

    def _accept(self, stream: Stream) -> Receiver:
        self.num_streams += 1

        def receive(frame: Frame) -> None:
            if isinstance(frame.control, pb.Hello):
                stream.send(pb.Welcome())
            elif isinstance(frame.control, pb.Fetch):
                self.num_asked += 1
                self._answer(stream, frame.control)

        return receive


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


@asynccontextmanager
async def honest_server(
    model: Model, files: SharedFiles | None = None, *, is_computing: bool = False
) -> AsyncIterator[PlayedServer]:
    tasks, peers = TaskGroup(), dict[Stream, Peer]()
    sender = PartSender(files or model.whole, model.digest, tasks, lambda: is_computing, wait)

    def answer(stream: Stream, fetch: pb.Fetch) -> None:
        sender.ask(fetch, peers.setdefault(stream, Peer(b"", stream)))

    async with PlayedServer(answer) as server:
        yield server
    await tasks.close()


def fetcher_of(
    model: Model, *rounds: Sequence[PlayedServer], part_timeout_s: float = 30.0, notice_s: float = 5.0
) -> PartFetcher:
    """A fetcher that finds these servers the first time that it asks, the next ones the second time, and so on."""
    left = list(rounds)

    async def find_peers() -> Sequence[router_pb2.PlacedServer]:
        found = left.pop(0) if len(left) > 1 else left[0]
        return [
            router_pb2.PlacedServer(
                server=router_pb2.ServerDescription(address=each.address), state=router_pb2.SERVER_STATE_READY
            )
            for each in found
        ]

    return PartFetcher(
        model.digest, find_peers, connect, part_timeout_s=part_timeout_s, retry_s=0.01, notice_s=notice_s
    )


def wrong_bytes(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    stream.send(pb.Part(file=fetch.file, part=fetch.part), os.urandom(PART_BYTES))


def another_part(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    stream.send(pb.Part(file=fetch.file, part=fetch.part), model.bytes[1 : PART_BYTES + 1])


def too_few_bytes(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    stream.send(pb.Part(file=fetch.file, part=fetch.part), b"")


def too_many_bytes(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    stream.send(pb.Part(file=fetch.file, part=fetch.part), model.bytes[: PART_BYTES + 1])


def nobody_asked(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    for _ in range(8):
        stream.send(pb.Part(file=2**32 - 1, part=2**32 - 1), bytes(PART_BYTES))


def again_and_again(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    start = fetch.part * PART_BYTES
    for _ in range(8):
        stream.send(pb.Part(file=fetch.file, part=fetch.part), model.bytes[start : start + PART_BYTES])


def another_frame(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    stream.send(pb.Fetch(manifest=model.digest, file=1))


def one_large_frame(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    stream.send(pb.Part(file=fetch.file, part=fetch.part), bytes(2 << 20))


def lacks_it(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    stream.send(pb.Part(file=fetch.file, part=fetch.part, is_absent=True))


def too_many_pieces(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    for _ in range(3):
        stream.send(pb.Part(file=fetch.file, part=fetch.part, has_more=True), bytes(PART_BYTES // 2))


def empty_pieces(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    for _ in range(8):
        stream.send(pb.Part(file=fetch.file, part=fetch.part, has_more=True), b"")


def dies_between_pieces(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    stream.send(pb.Part(file=fetch.file, part=fetch.part, has_more=True), bytes(1))
    stream.close()


def dies(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    stream.abort()


def is_silent(model: Model, stream: Stream, fetch: pb.Fetch) -> None:
    pass


LIES = (
    wrong_bytes, another_part, too_few_bytes, too_many_bytes, nobody_asked, again_and_again, another_frame,
    too_many_pieces, empty_pieces,
)  # fmt: skip
FAILURES = (one_large_frame, lacks_it, dies, dies_between_pieces, is_silent)


@pytest.mark.parametrize(
    "how",
    [
        wrong_bytes, nobody_asked, dies,
        *(pytest.param(how, marks=pytest.mark.full) for how in (*LIES, *FAILURES)
          if how not in (wrong_bytes, nobody_asked, dies)),
    ],
)  # fmt: skip
async def test_a_server_that_lies_or_fails_costs_only_itself(
    model: Model, how: Callable[[Model, Stream, pb.Fetch], None]
) -> None:
    async with PlayedServer(partial(how, model)) as other, honest_server(model) as honest:
        fetcher = fetcher_of(model, [other], [other, honest], part_timeout_s=0.3 if how is is_silent else 30.0)
        files = await asyncio.to_thread(model.lacking, fetcher)
        await asyncio.to_thread(files.fetch, [(files.path, 0, len(model.bytes))])
        assert files.path.read_bytes() == model.bytes
        assert other.num_asked
        if how in LIES:
            assert other.num_streams == 1


async def test_what_a_server_sent_before_it_died_is_not_sent_again(model: Model) -> None:
    num_sent = 0

    def sends_two(stream: Stream, fetch: pb.Fetch) -> None:
        nonlocal num_sent
        if num_sent == 2:
            stream.abort()
            return
        num_sent += 1
        again = model.bytes[fetch.part * PART_BYTES : (fetch.part + 1) * PART_BYTES]
        stream.send(pb.Part(file=1, part=fetch.part), again)

    async with PlayedServer(sends_two) as dying, honest_server(model) as honest:
        fetcher = fetcher_of(model, [dying], [honest])
        files = await asyncio.to_thread(model.lacking, fetcher)
        await asyncio.to_thread(files.fetch, [(files.path, 0, len(model.bytes))])
        assert files.path.read_bytes() == model.bytes
        assert honest.num_asked == NUM_PARTS - 2


async def wait() -> int:
    """Lets a server that computes send a piece of a third of a part."""
    await asyncio.sleep(0)
    return PART_BYTES // 3


async def test_a_server_that_computes_sends_parts_in_pieces(model: Model) -> None:
    async with honest_server(model, is_computing=True) as server:
        fetcher = fetcher_of(model, [server])
        files = await asyncio.to_thread(model.lacking, fetcher)
        await asyncio.to_thread(files.fetch, [(files.path, 0, len(model.bytes))])
        assert files.path.read_bytes() == model.bytes


async def test_each_of_two_servers_sends_what_the_other_one_lacks(model: Model) -> None:
    """A machine that joined has only its own span, and one with a bad disk lacks what is damaged; neither has lied."""
    async with (
        honest_server(model, model.damaged(0, 1)) as one,
        honest_server(model, model.damaged(2, 3)) as other,
    ):
        fetcher = fetcher_of(model, [one, other])
        files = await asyncio.to_thread(model.lacking, fetcher)
        await asyncio.to_thread(files.fetch, [(files.path, 0, len(model.bytes))])
        assert files.path.read_bytes() == model.bytes
        assert one.num_streams == other.num_streams == 2
        assert one.num_asked + other.num_asked == NUM_PARTS + 2


async def test_the_log_names_the_servers_that_send_nothing(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    async with PlayedServer(partial(lacks_it, model)) as server:
        fetcher = fetcher_of(model, [server], notice_s=0.0)
        waiting = asyncio.ensure_future(asyncio.to_thread(fetcher.manifest))
        await until(lambda: server.num_streams > 2)
        fetcher.stop()
        with pytest.raises(StartupError):
            await waiting
    (line,) = [each for each in caplog.messages if "waiting" in each]
    assert server.address in line


async def test_the_manifest_comes_from_a_server_that_has_the_one_that_was_named(model: Model) -> None:
    async with PlayedServer(partial(wrong_bytes, model)) as liar, honest_server(model) as honest:
        fetcher = fetcher_of(model, [liar], [liar, honest])
        assert await asyncio.to_thread(fetcher.manifest) == model.content
        assert liar.num_streams == 1


async def test_a_process_that_ends_waits_for_no_server(model: Model) -> None:
    async with PlayedServer(partial(is_silent, model)) as server:
        fetcher = fetcher_of(model, [server])
        waiting = asyncio.ensure_future(asyncio.to_thread(fetcher.manifest))
        await until(lambda: server.num_asked > 0)
        fetcher.stop()
        with pytest.raises(StartupError):
            await waiting


class PlayedPeer:
    """A peer that asks, and does not read while `num_waiting_bytes` says so. It counts the frames that it gets."""

    def __init__(self) -> None:
        self.num_waiting_bytes = self.num_frames = 0
        self.sent: list[int] = []

    def send(self, control: Message, payload: Buffer = b"") -> None:
        assert isinstance(control, pb.Part)
        self.num_frames += 1
        if not control.has_more:
            self.sent.append(control.part)


@pytest.mark.parametrize(
    "wrong", [{"manifest": b"x" * 32}, {"manifest": b""}, {"file": 2}, {"file": 2**32 - 1}, {"part": NUM_PARTS}]
)
async def test_a_part_that_no_file_has_is_refused(model: Model, wrong: dict[str, object]) -> None:
    sender = PartSender(model.whole, model.digest, TaskGroup(), lambda: False)
    fetch = pb.Fetch(**{"manifest": model.digest, "file": 1, "part": 0, **wrong})  # type: ignore[arg-type]
    with pytest.raises(MalformedMessage):
        sender.ask(fetch, cast(Peer, PlayedPeer()))


async def test_a_peer_that_asks_for_much_or_does_not_read_costs_bounded_memory(model: Model) -> None:
    tasks = TaskGroup()
    sender = PartSender(model.whole, model.digest, tasks, lambda: True)
    greedy, other = PlayedPeer(), PlayedPeer()
    greedy.num_waiting_bytes = 8 << 20
    for part in range(MOST_ASKED):
        sender.ask(pb.Fetch(manifest=model.digest, file=1, part=part), cast(Peer, greedy))
    with pytest.raises(QueueFull):
        sender.ask(pb.Fetch(manifest=model.digest, file=1), cast(Peer, greedy))
    sender.ask(pb.Fetch(manifest=model.digest, file=1, part=3), cast(Peer, other))
    await until(lambda: bool(other.sent))
    assert not greedy.sent
    greedy.num_waiting_bytes = 0
    await until(lambda: len(greedy.sent) == MOST_ASKED)
    assert greedy.sent == list(range(MOST_ASKED))
    await tasks.close()


async def test_peers_that_wait_for_their_turns_have_no_part_in_memory(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, num_read, is_sending, may_send = TaskGroup(), 0, asyncio.Event(), asyncio.Event()
    read = model.whole.read

    def counted(number: PartNumber) -> bytes | None:
        nonlocal num_read
        num_read += 1
        return read(number)

    async def hold() -> int:
        is_sending.set()
        await may_send.wait()
        return PART_BYTES

    monkeypatch.setattr(model.whole, "read", counted)
    sender = PartSender(model.whole, model.digest, tasks, lambda: True, hold)
    peers = [PlayedPeer() for _ in range(6)]
    for peer in peers:
        for part in range(MOST_ASKED):
            sender.ask(pb.Fetch(manifest=model.digest, file=1, part=part), cast(Peer, peer))
    await is_sending.wait()
    # Threads take what they are given in order.
    await asyncio.to_thread(lambda: None)
    assert num_read <= 2
    may_send.set()
    await until(lambda: all(peer.sent == list(range(MOST_ASKED)) for peer in peers))
    await tasks.close()


async def test_a_server_that_computes_sends_pieces(model: Model) -> None:
    tasks, peer = TaskGroup(), PlayedPeer()
    sender = PartSender(model.whole, model.digest, tasks, lambda: True, wait)
    sender.ask(pb.Fetch(manifest=model.digest, file=1), cast(Peer, peer))
    await until(lambda: bool(peer.sent))
    assert peer.num_frames == 4
    await tasks.close()
