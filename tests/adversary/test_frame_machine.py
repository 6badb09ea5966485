"""Frames in any order to a block server, well formed, senseless and damaged: it refuses what is wrong, and lives."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.frames import CONTROL_CLASSES, FrameParser, encode
from tests.adversary.messages import Known, damaged, messages
from tests.adversary.running import REASONS, Running, running
from tests.checkpoints import HIDDEN_SIZE, VOCAB_SIZE, make_tiny_checkpoint
from tests.frame_bytes import join
from tests.integration.swarm import Swarm

GREETING = b"CRLL\x02\x00\x00\x00"
ALL = common_pb2.BlockSpan(start=0, end=5)
SESSIONS = [letter * 16 for letter in (b"a", b"b", b"c")]
CLIENT = b"k" * 16
KNOWN: Known = {
    bytes: [*SESSIONS, CLIENT, b"t" * 16],
    str: ["tiny", "t", "127.0.0.1:1"],
    int: [3, 4, VOCAB_SIZE - 1, HIDDEN_SIZE, HIDDEN_SIZE * 4],
}
KINDS = st.sampled_from(list(CONTROL_CLASSES.values()))
CONTROLS = KINDS.flatmap(lambda cls: messages(cls, KNOWN))
PAYLOADS = st.just(b"") | st.binary(max_size=32) | st.sampled_from([1, 2, 3]).map(lambda n: bytes(n * HIDDEN_SIZE * 4))
FRAMES = st.tuples(CONTROLS, PAYLOADS)
BYTES = FRAMES.map(lambda frame: join([encode(*frame)]))


class Connection:
    """A raw one. `ended` is set once the server has closed it; `end` is what it said then."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.frames: list[Any] = []
        self.end: pb.End | None = None
        self.ended = asyncio.Event()
        self._news = asyncio.Event()
        self._reader = reader
        self._writer = writer
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def to(cls, address: str) -> "Connection":
        host, _, port = address.rpartition(":")
        connection = cls(*await asyncio.open_connection(host, int(port)))
        await connection.write(GREETING)
        return connection

    async def write(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def send(self, control: Message, payload: bytes = b"") -> None:
        await self.write(join([encode(control, payload)]))

    async def answer(self, number: int) -> Any:
        """The answer to the frame of this number; None where the server has ended the stream."""
        async with asyncio.timeout(30):
            while not self.ended.is_set():
                for frame in self.frames:
                    if isinstance(frame, pb.Opened | pb.Fault) and frame.request_id == number:
                        return frame
                self._news.clear()
                await self._news.wait()
        return None

    async def close(self) -> None:
        self._writer.transport.abort()
        await asyncio.wait({self._reading})

    async def _read(self) -> None:
        parser, greeting = FrameParser(1 << 26), len(GREETING)
        with contextlib.suppress(ConnectionError):
            while data := await self._reader.read(1 << 16):
                greeting, skipped = 0, greeting
                for frame in parser.feed(data[skipped:]):
                    if isinstance(frame.control, pb.End):
                        self.end = frame.control
                    self.frames.append(frame.control)
                self._news.set()
        self.ended.set()
        self._news.set()


class Frames(RuleBasedStateMachine):
    """One caller at a time, which is a client service or a block server, as it says."""

    services: ClassVar[Running]
    swarm: ClassVar[Swarm]
    fingerprint: ClassVar[str]
    numbers: ClassVar[Iterator[int]] = itertools.count(10**6)

    def __init__(self) -> None:
        super().__init__()
        self.connection: Connection | None = None
        self.is_client = True

    @precondition(lambda self: self.connection is None)
    @rule(is_client=st.booleans())
    def connect(self, is_client: bool) -> None:
        self.is_client = is_client
        self.connection = self.services.call(Connection.to(self.swarm.servers[0].address))
        self._send(pb.Hello(client_id=CLIENT if is_client else b"", fingerprint=self.fingerprint))

    @precondition(lambda self: self.connection is None)
    @rule(data=BYTES | damaged(BYTES) | st.binary(max_size=64))
    def begin_wrongly(self, data: bytes) -> None:
        self.connection = self.services.call(Connection.to(self.swarm.servers[0].address))
        self.services.call(self.connection.write(data))
        self.leave()

    @precondition(lambda self: self.connection is not None)
    @rule(
        session_id=st.sampled_from(SESSIONS),
        epoch=st.integers(1, 4),
        max_tokens=st.sampled_from([1, 16, 64]),
        samples=st.booleans(),
    )
    def open(self, session_id: bytes, epoch: int, max_tokens: int, samples: bool) -> None:
        sampler = pb.Sampler(num_tokens_left=8) if samples else None
        self._send(self._an_open(session_id, epoch, max_tokens, sampler))

    @precondition(lambda self: self.connection is not None)
    @rule(
        session_id=st.sampled_from(SESSIONS),
        epoch=st.integers(1, 4),
        position=st.integers(0, 4),
        token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4),
        samples=st.booleans(),
        is_ring_step=st.booleans(),
    )
    def step(
        self, session_id: bytes, epoch: int, position: int, token_ids: list[int], samples: bool, is_ring_step: bool
    ) -> None:
        row = pb.StepRow(
            session_id=session_id, epoch=epoch, position=position, num_tokens=len(token_ids), num_result_tokens=1,
            token_ids=token_ids,
        )  # fmt: skip
        ring = pb.Ring(first_address="a:1", credit_end=8, max_step_tokens=4) if is_ring_step else None
        number = 0 if is_ring_step else next(self.numbers)
        self._send(pb.Step(step_id=number, client_id=CLIENT, rows=[row], blocks=ALL, samples=samples, ring=ring))

    @precondition(lambda self: self.connection is not None)
    @rule(session_id=st.sampled_from(SESSIONS), epoch=st.integers(1, 4), end=st.integers(0, 64), how=st.integers(0, 2))
    def change(self, session_id: bytes, epoch: int, end: int, how: int) -> None:
        kinds = [
            pb.Close(session_id=session_id, epoch=epoch),
            pb.Truncate(session_id=session_id, epoch=epoch, position=end, idle=True),
            pb.Credit(session_id=session_id, epoch=epoch, end=end),
        ]
        self._send(kinds[how])

    @precondition(lambda self: self.connection is not None)
    @rule(frame=FRAMES)
    def send_anything(self, frame: tuple[Message, bytes]) -> None:
        self._send(*frame)

    @precondition(lambda self: self.connection is not None)
    @rule(data=damaged(BYTES))
    def send_damaged(self, data: bytes) -> None:
        """What follows would be read as a part of it."""
        assert self.connection is not None
        self.services.call(self.connection.write(data))
        self.leave()

    @precondition(lambda self: self.connection is not None)
    @rule()
    def is_served(self) -> None:
        """A client's stream is, unless the server has ended it for a reason of the tree."""
        if not self.is_client:
            self.leave()
            return
        connection, number = self.connection, next(self.numbers)
        assert connection is not None
        opening = self._an_open(b"z" * 16, 1, 4, None)
        opening.request_id, opening.transient = number, True
        self._send(opening)
        answer = self.services.call(connection.answer(number))
        if answer is None:
            self.leave()
        else:
            self._send(pb.Close(session_id=b"z" * 16, epoch=1))

    @precondition(lambda self: self.connection is not None)
    @rule()
    def leave(self) -> None:
        assert self.connection is not None
        self.services.call(self.connection.close())
        frames, end = self.connection.frames, self.connection.end
        assert end is None or not end.reason or end.reason in REASONS, end
        for frame in frames:
            if isinstance(frame, pb.Fault | pb.HandoverAnswer):
                assert not frame.reason or frame.reason in REASONS, frame
        self.connection = None

    def teardown(self) -> None:
        if self.connection is not None:
            self.leave()

    def _send(self, control: Message, payload: bytes = b"") -> None:
        assert self.connection is not None
        self.services.call(self.connection.send(control, payload))

    def _an_open(self, session_id: bytes, epoch: int, max_tokens: int, sampler: pb.Sampler | None) -> pb.Open:
        return pb.Open(
            request_id=next(self.numbers), session_id=session_id, epoch=epoch, tenant="t", max_tokens=max_tokens,
            blocks=ALL, lease_ms=1000, sampler=sampler,
        )  # fmt: skip


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Frames]]:
    folder: Path = tmp_path_factory.mktemp("frames")
    model = make_tiny_checkpoint("llama", folder / "tiny")
    services, stack = running(), AsyncExitStack()

    async def start() -> tuple[Swarm, str]:
        swarm = await stack.enter_async_context(Swarm(folder, model, ["0:5"]))
        return swarm, (await swarm.statuses())[0].fingerprint

    Frames.services = services
    Frames.swarm, Frames.fingerprint = services.call(start())
    yield Frames
    services.call(stack.aclose())


async def answer_of(swarm: Swarm) -> list[int]:
    async with swarm.connect() as client:
        return list((await client.generate([1, 2, 3], max_tokens=8, ignore_eos=True)).token_ids)


@pytest.mark.parametrize("num_examples", [25, pytest.param(300, marks=pytest.mark.full)])
def test_a_block_server_bears_any_frames(machine: type[Frames], num_examples: int) -> None:
    services, swarm = machine.services, machine.swarm
    expected = services.call(answer_of(swarm))
    few = settings(max_examples=num_examples, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])
    with services.watched():
        run_state_machine_as_test(machine, settings=few)
        assert services.call(answer_of(swarm)) == expected
