"""The frames of sessions, in any order, late and twice, against a model of a hop's promises; nothing is mocked but
the blocks, which are those of the toy model."""

import asyncio
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from google.protobuf.message import Message
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.engine import Engine
from corolla.block_server.frame_checks import Identity
from corolla.block_server.handover.receiver import HandoverReceiver
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.peers import PeerTable
from corolla.block_server.relay import Relay
from corolla.block_server.scheduler import Scheduler
from corolla.block_server.servicer import BlockServicer
from corolla.block_server.sessions import SessionTable
from corolla.block_server.step_admission import StepWork
from corolla.cache.store import SessionCache
from corolla.chassis.errors import CorollaError
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.frames import Buffer, Frame, encode
from corolla.wire.span import Span
from tests.frame_bytes import decode, join
from tests.simulation.loop import VirtualLoop
from tests.simulation.toy_model import PRIME, ToyModel, ToyRunner, unexpected_failure
from tests.unread_stream import UnreadStream

MODEL = ToyModel((None, None))
SPAN = Span(0, 2)
PAGE_TOKENS = 4
CLIENTS = (b"c" * 16, b"d" * 16)
SESSIONS = st.sampled_from([bytes([number]) * 16 for number in range(3)])
EPOCHS = st.integers(1, 5)


@dataclass
class Held:
    """The tokens of a session on the hop, by the model."""

    epoch: int
    tenant: str
    client: int
    max_tokens: int
    inputs: list[int] = field(default_factory=list)
    is_idle: bool = False


class Caller(UnreadStream):
    """A client's end of its stream, and what the hop sees of it."""

    def __init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._received: list[Frame] = []

    def take(self) -> list[Frame]:
        """The frames since the last call."""
        received, self._received = self._received, []
        return received

    def send(self, control: Message, payload: Buffer = b"") -> None:
        self._received += decode(join([encode(control, payload)]))

    def fail(self, error: CorollaError) -> None:
        raise AssertionError(f"the hop found fault with a stream: {error.reason}")


class Protocol(RuleBasedStateMachine):
    """One hop and two clients."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.held: dict[bytes, Held] = {}
        self.sent: list[tuple[int, Frame]] = []
        self.number = 0
        self.loop.run_until_complete(self.build())

    async def build(self) -> None:
        runner = ToyRunner(MODEL, SPAN, num_pages=400, page_tokens=PAGE_TOKENS, max_step_tokens=16)
        metrics = BlockServerMetrics(CollectorRegistry())
        scheduler: Scheduler[StepWork] = Scheduler(64, 64)
        outputs, peers = BoundaryActivations(1 << 20), PeerTable()
        self.sessions: SessionTable[SessionCache] = SessionTable(
            runner.store.pool, runner.new_cache, on_forget=outputs.forget
        )
        relay = partial(Relay, "toy", peers)
        engine = Engine(
            runner, scheduler, self.sessions, outputs, peers, relay, metrics, self.loop.time, fail=unexpected_failure
        )
        identity = Identity(
            server_id="s", span=SPAN, model="toy", fingerprint="toy", dtype_name="float32",
            dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=1, max_tokens_per_frame=16, prefix_page_tokens=0,
            num_model_blocks=MODEL.num_blocks, vocab_size=MODEL.vocab_size, context_length=4096,
        )  # fmt: skip
        receiver = HandoverReceiver(SPAN, self.sessions, engine, metrics, TaskGroup(), max_part_tokens=16)
        self.servicer = BlockServicer(
            identity, engine, self.sessions, outputs, peers, runner.store, receiver, TaskGroup()
        )
        self.running = [asyncio.ensure_future(engine.run())]
        self.callers = [Caller() for _ in CLIENTS]
        self.receivers = [self.servicer.accept(caller) for caller in self.callers]
        for receive, client in zip(self.receivers, CLIENTS, strict=True):
            receive(Frame(pb.Hello(client_id=client, fingerprint="toy"), b""))
        await asyncio.sleep(0.1)
        for caller in self.callers:
            (welcome,) = caller.take()
            assert isinstance(welcome.control, pb.Welcome)

    def teardown(self) -> None:
        assert not any(each.done() for each in self.running), "no engine ends by itself"
        for each in self.running:
            each.cancel()
        self.loop.run_until_complete(asyncio.wait(self.running))
        self.loop.close()

    def send(self, client: int, frame: Frame) -> list[Frame]:
        """Lets the hop handle a frame. Returns its answers to that client."""
        self.receivers[client](frame)
        self.loop.run_until_complete(asyncio.sleep(0.1))
        return self.callers[client].take()

    def say(
        self, client: int, control: pb.Open | pb.Step | pb.Truncate | pb.Close, payload: bytes = b""
    ) -> list[Frame]:
        frame = Frame(control, payload)
        self.sent.append((client, frame))
        return self.send(client, frame)

    @rule(session_id=SESSIONS, epoch=EPOCHS, client=st.integers(0, 1), tenant=st.sampled_from("tu"),
          resume=st.booleans(), max_tokens=st.integers(1, 24))  # fmt: skip
    def open(self, session_id: bytes, epoch: int, client: int, tenant: str, resume: bool, max_tokens: int) -> None:
        self.number += 1
        request = pb.Open(
            request_id=self.number, session_id=session_id, epoch=epoch, tenant=tenant, resume=resume,
            max_tokens=max_tokens, blocks=common_pb2.BlockSpan(start=0, end=2), lease_ms=3_600_000,
        )  # fmt: skip
        (answer,) = self.say(client, request)
        before = self.held.get(session_id)
        num_sessions = len(self.held) + (before is None)
        assert answer.control.load.num_sessions == num_sessions  # type: ignore[attr-defined]
        if before is not None and before.tenant != tenant:
            assert answer.control.reason == "HOP_SESSION_LOST"  # type: ignore[attr-defined]
            return
        if before is not None:
            is_taken_back = before.is_idle and before.client == client
            if epoch < before.epoch or (epoch == before.epoch and not is_taken_back):
                assert answer.control.reason == "STALE_EPOCH"  # type: ignore[attr-defined]
                return
        kept = before.inputs[:max_tokens] if before is not None and resume else []
        assert isinstance(answer.control, pb.Opened)
        assert (answer.control.epoch, answer.control.num_cached_tokens) == (epoch, len(kept))
        self.held[session_id] = Held(epoch, tenant, client, max_tokens, kept)

    @rule(session_id=SESSIONS, epoch=EPOCHS, client=st.integers(0, 1), position=st.integers(0, 12),
          states=st.lists(st.integers(0, PRIME - 1), min_size=1, max_size=5), source=st.none() | SESSIONS)  # fmt: skip
    def step(
        self, session_id: bytes, epoch: int, client: int, position: int, states: list[int], source: bytes | None
    ) -> None:
        self.take(session_id, epoch, client, position, states, source)

    @rule(session_id=SESSIONS, back=st.integers(0, 3), states=st.lists(st.integers(0, PRIME - 1), min_size=1,
          max_size=5), source=st.none() | SESSIONS)  # fmt: skip
    def step_that_fits(self, session_id: bytes, back: int, states: list[int], source: bytes | None) -> None:
        held = self.held.get(session_id)
        if held is not None:
            position = max(0, len(held.inputs) - back)
            self.take(session_id, held.epoch, held.client, position, states, source)

    def take(
        self, session_id: bytes, epoch: int, client: int, position: int, states: list[int], source: bytes | None
    ) -> None:
        self.number += 1
        row = pb.StepRow(
            session_id=session_id, epoch=epoch, position=position, num_tokens=len(states),
            num_result_tokens=len(states), source_session_id=source or b"",
        )  # fmt: skip
        step = pb.Step(
            step_id=self.number, client_id=CLIENTS[client], rows=[row], dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=1,
            blocks=common_pb2.BlockSpan(start=0, end=2),
        )  # fmt: skip
        (answer,) = self.say(client, step, np.array(states, dtype=np.float32).tobytes())
        held, origin = self.held.get(session_id), self.held.get(source or session_id)
        reason = answer.control.reason if isinstance(answer.control, pb.Fault) else ""
        is_lost = held is None or origin is None or {held.client, origin.client} != {client}
        if held is None or origin is None or is_lost or held.tenant != origin.tenant:
            assert reason == "HOP_SESSION_LOST"
        elif held.epoch != epoch or held.is_idle:
            assert reason == "STALE_EPOCH"
        elif position > len(origin.inputs):
            assert reason == "POSITION_GAP"
            assert answer.control.metadata["num_cached_tokens"] == str(len(origin.inputs))  # type: ignore[attr-defined]
        elif -(-(position + len(states)) // PAGE_TOKENS) > -(-held.max_tokens // PAGE_TOKENS):
            assert reason == "OUT_OF_PAGES"
        else:
            assert isinstance(answer.control, pb.Result)
            assert list(answer.control.rows) == [row]
            held.inputs = [*origin.inputs[:position], *states]
            expected = outputs_of(held.inputs)[position:]
            assert np.frombuffer(answer.payload, dtype=np.float32).tolist() == expected

    @rule(session_id=SESSIONS, epoch=EPOCHS, client=st.integers(0, 1), position=st.integers(0, 12), idle=st.booleans())
    def truncate(self, session_id: bytes, epoch: int, client: int, position: int, idle: bool) -> None:
        assert not self.say(client, pb.Truncate(session_id=session_id, epoch=epoch, position=position, idle=idle))
        held = self.held.get(session_id)
        if held is not None and held.epoch <= epoch:
            del held.inputs[position:]
            held.is_idle |= idle
            held.max_tokens = len(held.inputs)  # the other pages are given back

    @rule(session_id=SESSIONS, epoch=EPOCHS, client=st.integers(0, 1))
    def close(self, session_id: bytes, epoch: int, client: int) -> None:
        assert not self.say(client, pb.Close(session_id=session_id, epoch=epoch))
        if session_id in self.held and self.held[session_id].epoch <= epoch:
            del self.held[session_id]

    @rule(data=st.data())
    def say_an_old_open_again(self, data: st.DataObject) -> None:
        """A repeated frame changes no effect of its first arrival or of later frames."""
        opens = [(client, frame) for client, frame in self.sent if isinstance(frame.control, pb.Open)]
        if not opens:
            return
        client, frame = data.draw(st.sampled_from(opens))
        held = self.held.get(frame.control.session_id)  # type: ignore[attr-defined]
        if held is None or held.is_idle or frame.control.epoch > held.epoch:  # type: ignore[attr-defined]
            return
        (answer,) = self.send(client, frame)
        assert answer.control.reason in ("STALE_EPOCH", "HOP_SESSION_LOST")  # type: ignore[attr-defined]

    @invariant()
    def it_holds_what_it_should(self) -> None:
        assert {
            each.request.session_id: (each.request.epoch, each.cache.num_tokens, each.is_idle) for each in self.sessions
        } == {session_id: (held.epoch, len(held.inputs), held.is_idle) for session_id, held in self.held.items()}

    @invariant()
    def pages_add_up(self) -> None:
        pool = self.sessions.pool
        assert pool.num_used + pool.num_reserved + pool.num_available == pool.num_pages
        if not self.held:
            assert pool.num_available == pool.num_pages


def outputs_of(inputs: list[int]) -> list[int]:
    """Both blocks' output for a session's inputs."""
    states = list(inputs)
    for block in range(SPAN.start, SPAN.end):
        keys = np.array([MODEL.key(block, position, state) for position, state in enumerate(states)], dtype=np.int64)
        states = [MODEL.block(block, position, state, keys[: position + 1]) for position, state in enumerate(states)]
    return states


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
