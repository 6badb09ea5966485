"""A block server refuses frames that violate the protocol, and keeps serving all other sessions."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.message import Message

from corolla.block_server import servicer
from corolla.block_server.peers import Peer, PeerTable
from corolla.cache.store import SessionCache
from corolla.client.text import formats
from corolla.compute.base import LaunchedBatch, RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.v1.common_pb2 import SamplingParameters
from corolla.wire.frames import MAX_PROMPT_BYTES, Frame, FrameParser, encode
from corolla.wire.tensors import to_payload
from tests.checkpoints import HIDDEN_SIZE, VOCAB_SIZE, make_tiny_checkpoint
from tests.faulty_runner import plant_fault
from tests.frame_bytes import join
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm, tiny_swarm
from tests.integration.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREETING = b"CRLL\x02\x00\x00\x00"
SESSION = b"s" * 16
ALL = common_pb2.BlockSpan(start=0, end=5)


swarm = tiny_swarm(["0:5"])


class Caller:
    """One raw stream to a block server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = FrameParser(1 << 20)
        self._frames: list[Frame] = []
        self._num_greeting_bytes = len(GREETING)
        self.write(GREETING)

    @classmethod
    async def connect(cls, address: str) -> "Caller":
        host, _, port = address.partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def send(self, *frames: Message | tuple[Message, bytes]) -> None:
        parts = [encode(*frame) if isinstance(frame, tuple) else encode(frame) for frame in frames]
        self.write(join(parts))

    async def answer(self) -> Any:
        return (await self._next()).control

    async def result(self) -> Frame:
        """An answer with its payload, which must be a result."""
        frame = await self._next()
        assert isinstance(frame.control, pb.Result), frame.control
        return frame

    async def ending(self) -> str:
        """Why the server ended the stream."""
        while not isinstance(frame := (await self._next()).control, pb.End):
            pass
        return frame.reason

    def hang_up(self) -> None:
        self._writer.transport.abort()

    async def _next(self) -> Frame:
        async with asyncio.timeout(30):
            while not self._frames:
                data = await self._reader.read(1 << 16)
                assert data, "the stream has ended"
                greeting, self._num_greeting_bytes = self._num_greeting_bytes, 0
                frames = self._parser.feed(data[greeting:])
                self._frames += [frame for frame in frames if not isinstance(frame.control, pb.Ping)]
        return self._frames.pop(0)


@asynccontextmanager
async def calling(swarm: Swarm, client_id: bytes = b"c" * 16) -> AsyncIterator[Caller]:
    """A stream with which all ends."""
    async with streaming(swarm, client_id) as caller:
        yield caller
    await swarm.until_empty()


@asynccontextmanager
async def streaming(swarm: Swarm, client_id: bytes = b"c" * 16) -> AsyncIterator[Caller]:
    (status,) = await swarm.statuses()
    caller = await Caller.connect(swarm.servers[0].address)
    try:
        caller.send(pb.Hello(client_id=client_id, fingerprint=status.fingerprint))
        welcome = await caller.answer()
        assert (welcome.span, welcome.dtype) == (ALL, pb.TENSOR_TYPE_FLOAT32)
        yield caller
    finally:
        caller.hang_up()


def an_open(**changes: Any) -> pb.Open:
    fields = {"request_id": 1, "session_id": SESSION, "epoch": 1, "tenant": "t", "max_tokens": 64, "blocks": ALL}
    return pb.Open(**{**fields, "lease_ms": 60_000, "transient": True, **changes})


def a_step(num_tokens: int = 3, *, position: int = 0, session_id: bytes = SESSION, epoch: int = 1,
           step_id: int = 1, payload: bytes | None = None, **changes: Any) -> tuple[pb.Step, bytes]:  # fmt: skip
    row = pb.StepRow(session_id=session_id, epoch=epoch, position=position, num_tokens=num_tokens, num_result_tokens=1)
    fields = {"rows": [row], "dtype": pb.TENSOR_TYPE_FLOAT32, "hidden_size": HIDDEN_SIZE, "blocks": ALL}
    step = pb.Step(**{"step_id": step_id, "client_id": b"c" * 16, **fields, **changes})
    return step, bytes(to_payload(torch.ones(num_tokens, HIDDEN_SIZE))) if payload is None else payload


def scratch_row(session_id: bytes, **changes: Any) -> pb.StepRow:
    """One token of a session that runs in `SESSION` meanwhile."""
    fields = {"epoch": 1, "num_tokens": 1, "num_result_tokens": 1, "scratch_session_id": SESSION}
    return pb.StepRow(session_id=session_id, **{**fields, **changes})


def a_step_of_ids(token_ids: Sequence[int], *, num_tokens: int = 0, **changes: Any) -> tuple[pb.Step, bytes]:
    row = pb.StepRow(session_id=SESSION, epoch=1, num_tokens=num_tokens or len(token_ids), token_ids=token_ids)
    fields = {"rows": [row], "dtype": pb.TENSOR_TYPE_UNSPECIFIED, "hidden_size": 0, "payload": b""}
    return a_step(**{**fields, **changes})


def a_sampling_row(num_tokens: int, num_results: int, token_ids: Sequence[int] = ()) -> pb.StepRow:
    return pb.StepRow(
        session_id=SESSION, epoch=1, num_tokens=num_tokens, num_result_tokens=num_results, token_ids=token_ids
    )


BAD_STEPS: dict[str, tuple[tuple[pb.Step, bytes], str]] = {
    "payload too short": (a_step(payload=bytes(8)), "MALFORMED_MESSAGE"),
    "payload too long": (a_step(payload=bytes(4096)), "MALFORMED_MESSAGE"),
    "no payload": (a_step(payload=b""), "MALFORMED_MESSAGE"),
    "no rows": (a_step(rows=[]), "MALFORMED_MESSAGE"),
    "no tokens": (a_step(0), "MALFORMED_MESSAGE"),
    "too many tokens": (a_step(10_000), "MALFORMED_MESSAGE"),
    "other dtype": (a_step(dtype=pb.TENSOR_TYPE_BFLOAT16), "MALFORMED_MESSAGE"),
    "other hidden size": (a_step(hidden_size=HIDDEN_SIZE + 1), "MALFORMED_MESSAGE"),
    "blocks of others": (a_step(blocks=common_pb2.BlockSpan(start=0, end=6)), "HOP_SESSION_LOST"),
    "no blocks": (a_step(blocks=common_pb2.BlockSpan(start=2, end=2)), "MALFORMED_MESSAGE"),
    "other blocks than opened": (a_step(blocks=common_pb2.BlockSpan(start=0, end=3)), "HOP_SESSION_LOST"),
    "in another's name": (a_step(client_id=b"d" * 16), "MALFORMED_MESSAGE"),
    "a route with a gap": (
        a_step(
            blocks=common_pb2.BlockSpan(start=0, end=2),
            route=[common_pb2.Hop(address="127.0.0.1:1", span=common_pb2.BlockSpan(start=3, end=5))],
        ),
        "MALFORMED_MESSAGE",
    ),
    "two rows in one scratch session": (
        a_step(2, rows=[scratch_row(b"x" * 16), scratch_row(b"y" * 16)], scratch_hops=1),
        "MALFORMED_MESSAGE",
    ),
    "a source in a scratch session": (
        a_step(1, rows=[scratch_row(b"x" * 16, source_session_id=SESSION)], scratch_hops=1),
        "MALFORMED_MESSAGE",
    ),
    "unknown session": (a_step(session_id=b"u" * 16), "HOP_SESSION_LOST"),
    "older epoch": (a_step(epoch=0), "STALE_EPOCH"),
    "later epoch": (a_step(epoch=2), "STALE_EPOCH"),
    "a gap": (a_step(position=5), "POSITION_GAP"),
    "beyond its pages": (a_step(100), "OUT_OF_PAGES"),
    "ids beyond the vocabulary": (a_step_of_ids([5, VOCAB_SIZE]), "MALFORMED_MESSAGE"),
    "fewer ids than tokens": (a_step_of_ids([5, 6], num_tokens=3), "MALFORMED_MESSAGE"),
    "ids and a payload": (a_step_of_ids([5, 6], payload=bytes(2 * HIDDEN_SIZE * 4)), "MALFORMED_MESSAGE"),
    "ids to a later block": (a_step_of_ids([5], blocks=common_pb2.BlockSpan(start=1, end=5)), "MALFORMED_MESSAGE"),
    "ids beside hidden states": (a_step(2, rows=[a_sampling_row(2, 1, [5, 6])]), "MALFORMED_MESSAGE"),
    "tokens without a sampler": (a_step(1, rows=[a_sampling_row(1, 1)], samples=True), "MALFORMED_MESSAGE"),
    "draft tokens that nobody named": (a_step(2, rows=[a_sampling_row(2, 2)], samples=True), "MALFORMED_MESSAGE"),
    "too many draft tokens": (a_step(66, rows=[a_sampling_row(66, 66, range(66))], samples=True), "MALFORMED_MESSAGE"),
    "tokens in the midst of the model": (
        a_step(1, rows=[a_sampling_row(1, 1)], samples=True, blocks=common_pb2.BlockSpan(start=0, end=4)),
        "MALFORMED_MESSAGE",
    ),
}


@pytest.mark.parametrize("name", BAD_STEPS)
async def test_block_server_refuses_a_bad_step_and_keeps_its_stream(name: str, swarm: Swarm) -> None:
    (bad, payload), reason = BAD_STEPS[name]
    async with calling(swarm) as caller:
        caller.send(an_open())
        assert (await caller.answer()).num_cached_tokens == 0
        for number in range(1, 4):
            bad.step_id = number
            caller.send((bad, payload))
            fault = await caller.answer()
            assert (type(fault), fault.reason, fault.step_id) == (pb.Fault, reason, number)
            if reason == "POSITION_GAP":
                assert fault.metadata["num_cached_tokens"] == "0"
        caller.send(a_step(step_id=4))
        result = await caller.answer()
        assert (type(result), result.step_id) == (pb.Result, 4)


def with_prompts(num_tokens: int = 2, *, payload: bytes | None = None, **changes: Any) -> tuple[pb.Open, bytes]:
    facts = {"num_tokens": num_tokens, "dtype": pb.TENSOR_TYPE_FLOAT32, "hidden_size": HIDDEN_SIZE, **changes}
    size = 5 * num_tokens * HIDDEN_SIZE * 4
    return an_open(block_prompts=pb.BlockPrompts(**facts)), bytes(size) if payload is None else payload


BAD_OPENS: dict[str, pb.Open | tuple[pb.Open, bytes]] = {
    "no session id": an_open(session_id=b""),
    "short session id": an_open(session_id=b"s"),
    "epoch 0": an_open(epoch=0),
    "no tokens": an_open(max_tokens=0),
    "no lease": an_open(lease_ms=0),
    "no blocks": an_open(blocks=common_pb2.BlockSpan()),
    "half a page hash": an_open(text=pb.ExpectedText(num_tokens=40, page_hashes=bytes(8))),
    "more pages than tokens": an_open(text=pb.ExpectedText(num_tokens=40, page_hashes=bytes(32))),
    "a text with prompts": an_open(
        text=pb.ExpectedText(num_tokens=40, page_hashes=bytes(16)), block_prompts=pb.BlockPrompts(num_tokens=1)
    ),
    "prompts of no tokens": with_prompts(0),
    "prompts without a payload": with_prompts(payload=b""),
    "prompts cut short": with_prompts(payload=bytes(5 * 2 * HIDDEN_SIZE * 4 - 1)),
    "prompts too long": with_prompts(payload=bytes(5 * 2 * HIDDEN_SIZE * 4 + 4)),
    "prompts for other blocks": with_prompts(payload=bytes(3 * 2 * HIDDEN_SIZE * 4)),
    "prompts of another dtype": with_prompts(dtype=pb.TENSOR_TYPE_FLOAT16, payload=bytes(5 * 2 * HIDDEN_SIZE * 2)),
    "prompts of no dtype": with_prompts(dtype=pb.TENSOR_TYPE_UNSPECIFIED),
    "prompts of another width": with_prompts(hidden_size=2 * HIDDEN_SIZE, payload=bytes(5 * 2 * HIDDEN_SIZE * 8)),
    "prompts of more tokens than bytes can say": with_prompts(2**32 - 1, payload=bytes(8)),
    "prompts over the limit": with_prompts(MAX_PROMPT_BYTES // (5 * HIDDEN_SIZE * 4) + 1),
    "a payload that nothing describes": (an_open(), bytes(8)),
    "a tenant of very many letters": an_open(tenant="t" * 257),
    "a sampler in the midst of the model": an_open(sampler=pb.Sampler(), blocks=common_pb2.BlockSpan(start=0, end=4)),
    "a temperature out of range": an_open(sampler=pb.Sampler(parameters=SamplingParameters(temperature=-1))),
    "a sampler of a text beyond the vocabulary": an_open(
        sampler=pb.Sampler(parameters=SamplingParameters(repetition_penalty=1.1), token_ids=[VOCAB_SIZE])
    ),
}


@pytest.mark.parametrize("name", BAD_OPENS)
async def test_block_server_refuses_a_bad_open(name: str, swarm: Swarm) -> None:
    async with calling(swarm) as caller:
        caller.send(BAD_OPENS[name])
        fault = await caller.answer()
        assert (fault.reason, fault.request_id) == ("MALFORMED_MESSAGE", 1)
        caller.send(an_open(max_tokens=2**31))
        assert (await caller.answer()).reason == "OUT_OF_PAGES"
        caller.send(with_prompts() if isinstance(BAD_OPENS[name], tuple) else an_open())
        assert (await caller.answer()).epoch == 1


@asynccontextmanager
async def held_iteration(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[threading.Event]:
    """Keeps the block server's iteration from ending. Yields an event that is set once one has begun."""
    has_begun, may_end = threading.Event(), threading.Event()
    launch = SpanRunner.launch

    def held_launch(*args: Any) -> LaunchedBatch:
        has_begun.set()
        assert may_end.wait(30)
        return launch(*args)

    with monkeypatch.context() as patch:
        patch.setattr(SpanRunner, "launch", held_launch)
        try:
            yield has_begun
        finally:
            may_end.set()


async def test_steps_of_two_sessions_with_one_scratch_session_run_in_turn(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = b"o" * 16
    async with calling(swarm) as caller:
        caller.send(an_open(), an_open(session_id=other))
        for _ in range(2):
            assert isinstance(await caller.answer(), pb.Opened)
        async with held_iteration(swarm, monkeypatch) as has_begun:
            caller.send(a_step(session_id=other))
            assert await asyncio.to_thread(has_begun.wait, 30)
            for number, session_id in ((2, b"x" * 16), (3, b"y" * 16)):
                caller.send(a_step(1, rows=[scratch_row(session_id)], scratch_hops=1, step_id=number))
        answers = [await caller.answer() for _ in range(3)]
        assert [(type(each), each.step_id) for each in answers] == [(pb.Result, number) for number in (1, 2, 3)]


async def test_a_step_whose_pages_another_session_took_is_refused_alone(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (status,) = await swarm.statuses()
    others = (status.num_pages - 1) * status.page_tokens - 64
    async with calling(swarm) as caller:
        caller.send(an_open(), a_step())
        assert [type(await caller.answer()) for _ in range(2)] == [pb.Opened, pb.Result]
        caller.send(pb.Truncate(session_id=SESSION, epoch=1, position=3))
        caller.send(an_open(session_id=b"n" * 16), an_open(session_id=b"o" * 16, max_tokens=others))
        assert [type(await caller.answer()) for _ in range(2)] == [pb.Opened, pb.Opened]
        async with held_iteration(swarm, monkeypatch) as has_begun:
            caller.send(a_step(session_id=b"o" * 16))
            assert await asyncio.to_thread(has_begun.wait, 30)
            caller.send(a_step(60, position=3, step_id=2), a_step(64, session_id=b"n" * 16, step_id=3))
        answers = {each.step_id: each for each in [await caller.answer() for _ in range(3)]}
        assert answers[2].reason == "OUT_OF_PAGES"
        assert isinstance(answers[3], pb.Result)


@contextmanager
def faulty(swarm: Swarm, **faults: Any) -> Iterator[None]:
    restore = plant_fault(swarm.servers[0].engine.runner, **faults)
    try:
        yield
    finally:
        restore()


async def test_an_unreadable_output_fails_only_its_own_steps(swarm: Swarm) -> None:
    """Reading fails as it does when a device has no room to put the rows of a result together."""

    def unreadable(launched: LaunchedBatch) -> LaunchedBatch:
        return replace(launched, hidden=launched.hidden.to("meta"))

    async with calling(swarm) as caller:
        caller.send(an_open())
        await caller.answer()
        with faulty(swarm, after=unreadable):
            caller.send(a_step())
            assert (await caller.answer()).reason == "STEP_FAILED"
        caller.send(a_step(step_id=2))
        assert (await caller.result()).control == pb.Result(
            step_id=2, rows=a_step()[0].rows, dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=HIDDEN_SIZE
        )


def a_microbatch(step_id: int, **changes: Any) -> tuple[pb.Step, bytes]:
    """Three tokens each of two sessions, as one step."""
    (first, payload), (second, _) = (a_step(session_id=each * 16, step_id=step_id, **changes) for each in (b"1", b"2"))
    first.rows.append(second.rows[0])
    return first, payload + payload


@pytest.mark.parametrize(
    "failure, reason",
    [
        (IndexError("list index out of range"), "STEP_FAILED"),
        (torch.OutOfMemoryError("CUDA out of memory"), "OUT_OF_MEMORY"),
    ],
)
async def test_a_row_that_fails_leaves_the_rest_of_its_batch_intact(
    swarm: Swarm, failure: Exception, reason: str
) -> None:
    bad: list[SessionCache] = []

    def fail_bad(rows: Sequence[RowWork]) -> None:
        bad[:] = bad or [rows[-1].cache]
        if any(row.cache is bad[0] for row in rows):
            raise failure

    async with calling(swarm) as caller:
        caller.send(an_open(session_id=b"1" * 16), an_open(session_id=b"2" * 16))
        assert [type(await caller.answer()) for _ in range(2)] == [pb.Opened, pb.Opened]
        port, splits = swarm.servers[0].metrics_port, "corolla_hop_split_iterations_total"
        num_before = await sample(port, splits)
        with faulty(swarm, before=fail_bad):
            caller.send(a_microbatch(1))
            fault, result = await caller.answer(), await caller.result()
        assert await sample(port, splits) == num_before + 1
        computed: Any = result.control
        assert (fault.step_id, fault.reason) == (1, reason)
        assert [row.session_id for row in fault.rows] == [b"2" * 16]
        assert [row.session_id for row in computed.rows] == [b"1" * 16]
        # The same again: the bad row's session goes on, and nothing of the failure is seen in it.
        caller.send(a_microbatch(2))
        again = await caller.result()
        first, second = torch.frombuffer(bytearray(again.payload), dtype=torch.float32).view(2, HIDDEN_SIZE)
        assert_close(first, torch.frombuffer(bytearray(result.payload), dtype=torch.float32))
        assert_close(first, second)


async def test_a_page_that_leaks_is_found_by_the_server_and_fails_the_test(tmp_path: Path) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")

    async def leak() -> None:
        async with Swarm(tmp_path, model, ["0:5"]) as swarm:
            (server,) = swarm.servers
            runner: Any = server.engine.runner

            async def is_found() -> bool:
                return (
                    await sample(server.metrics_port, "corolla_hop_invariant_violations_total", invariant="pages") > 0
                )

            await asyncio.sleep(1.5)
            assert not await is_found()
            runner.store.pool.allocate(1)
            await until(is_found)

    with pytest.raises(AssertionError, match="for 1 pages, the pool counts another number of holders"):
        await leak()


async def test_block_server_answers_a_step_for_another_clients_session_on_the_senders_stream(swarm: Swarm) -> None:
    async with calling(swarm), calling(swarm, b"d" * 16) as other:
        other.send(a_step())
        assert (await other.answer()).reason == "MALFORMED_MESSAGE"


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


async def test_a_session_that_comes_back_for_other_blocks_begins_with_their_cached_pages(swarm: Swarm) -> None:
    text = pb.ExpectedText(num_tokens=70, page_hashes=b"c" * 16 + b"d" * 16)
    states = torch.randn(70, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    some: dict[str, Any] = {"blocks": common_pb2.BlockSpan(start=0, end=3)}
    one, two = (bytes([number]) * 16 for number in range(2))
    async with calling(swarm) as caller:
        caller.send(an_open(session_id=one, text=text, max_tokens=128, **some))
        await caller.answer()
        caller.send(a_step(70, session_id=one, payload=bytes(to_payload(states)), **some))
        expected = (await caller.result()).payload
        caller.send(an_open(session_id=two), a_step(session_id=two))
        await caller.answer()
        await caller.result()
        caller.send(an_open(session_id=two, epoch=2, text=text, max_tokens=128, resume=True, **some))
        assert (await caller.answer()).num_cached_tokens == 64
        rest = bytes(to_payload(states[64:].contiguous()))
        caller.send(a_step(6, position=64, session_id=two, epoch=2, step_id=2, payload=rest, **some))
        got = (await caller.result()).payload
        assert_close(*(torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (got, expected)))


async def test_a_step_that_comes_again_is_neither_computed_nor_answered(swarm: Swarm) -> None:
    two = [a_step(4), a_step(1, position=4, step_id=2)]
    refused = a_step(1, position=9, step_id=3)
    other_numbers = bytes(to_payload(torch.zeros(4, HIDDEN_SIZE)))
    async with calling(swarm) as caller:
        caller.send(an_open(), *two)
        assert [type(await caller.answer()) for _ in range(2)] == [pb.Opened, pb.Result]
        payload = bytes((await caller.result()).payload)
        caller.send(refused, a_step(4, payload=other_numbers), *two, refused, a_step(1, position=4, step_id=4))
        assert (await caller.answer()).reason == "POSITION_GAP"
        got: Any = await caller.result()
        assert (got.control.step_id, bytes(got.payload)) == (4, payload)
        caller.send(an_open(epoch=2, resume=True), a_step(1, position=5, epoch=2, step_id=5))
        assert (await caller.answer()).num_cached_tokens == 5
        assert (await caller.answer()).step_id == 5


@pytest.mark.parametrize(
    "data",
    [b"garbage!!!!!", join([encode(pb.Close())]), join([encode(pb.Welcome())])],
    ids=["garbage", "no hello", "not a caller's frame"],
)
async def test_a_stream_that_does_not_begin_with_hello_is_ended(swarm: Swarm, data: bytes) -> None:
    caller = await Caller.connect(swarm.servers[0].address)
    caller.write(data)
    assert await caller.ending() == "MALFORMED_MESSAGE"


async def test_block_server_ends_a_silent_stream(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "HELLO_TIMEOUT_S", 0.2)
    assert await (await Caller.connect(swarm.servers[0].address)).ending() == "DEADLINE_EXCEEDED"


async def test_other_weights_are_refused(swarm: Swarm) -> None:
    caller = await Caller.connect(swarm.servers[0].address)
    caller.send(pb.Hello(client_id=b"c" * 16, fingerprint="another"))
    assert await caller.ending() == "FINGERPRINT_MISMATCH"


async def test_garbage_in_a_stream_ends_it_and_frees_its_sessions(swarm: Swarm) -> None:
    async with calling(swarm) as caller:
        caller.send(an_open())
        await caller.answer()
        caller.write(b"garbage!!!!!")
        assert await caller.ending() == "MALFORMED_MESSAGE"
        await swarm.until_empty()


async def test_sessions_of_an_old_stream_are_freed_although_the_newer_stream_ended_first(swarm: Swarm) -> None:
    """A server that was frozen finds both streams of a client, and the ends of both, in this order."""
    async with calling(swarm) as older:
        async with calling(swarm):
            pass
        older.send(an_open())
        await older.answer()


@pytest.mark.parametrize("is_late", [False, True])
async def test_sessions_of_an_old_stream_are_freed_with_it_although_the_client_has_a_newer_one(
    swarm: Swarm, is_late: bool
) -> None:
    """Where packets are lost, the server sees the stream's end late, and frames that the client had sent on it."""
    async with calling(swarm) as newer, streaming(swarm) as older:
        if is_late:
            newer, older = older, newer
            newer.send(pb.Close(session_id=SESSION, epoch=1))
        newer.send(an_open(session_id=b"n" * 16))
        await newer.answer()
        older.send(an_open())
        await older.answer()
        older.hang_up()

        async def is_freed() -> bool:
            return (await swarm.statuses())[0].num_sessions == 1

        await until(is_freed)
        newer.send(a_step(session_id=b"n" * 16))
        await newer.result()


async def test_a_late_stream_that_ends_leaves_the_answers_of_the_other_one(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client gives a connection up that does not come about; the server may see it when it has the next one."""
    has_ended, remove = asyncio.Event(), PeerTable.remove

    def noted_remove(peers: PeerTable, peer: Peer) -> None:
        remove(peers, peer)
        has_ended.set()

    monkeypatch.setattr(PeerTable, "remove", noted_remove)
    async with calling(swarm) as caller, asyncio.timeout(30):
        caller.send(an_open())
        await caller.answer()
        async with streaming(swarm):
            pass
        await has_ended.wait()
        caller.send(a_step())
        await caller.result()


async def test_all_answers_of_a_client_service_may_come_at_once_with_a_grammar_that_is_new(swarm: Swarm) -> None:
    grammar = pb.Grammar(text=formats.grammar_of(formats.regex("[ab]{1,50}", "regex")).text)
    sampler = pb.Sampler(grammar=grammar)
    async with calling(swarm) as caller:
        for number in range(1, 301):
            session_id = number.to_bytes(16, "big")
            caller.send(an_open(request_id=number, session_id=session_id, max_tokens=1, sampler=sampler))
        answers = [await caller.answer() for _ in range(300)]
        reasons = [answer.reason for answer in answers if not isinstance(answer, pb.Opened)]
        assert reasons == []
