"""Frames that name an address of the attacker's: block servers and client services connect to placed servers only."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from corolla.block_server import service as block_server
from corolla.chain.placement import PlacementWatch
from corolla.client import service
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2, router_pb2
from corolla.wire.frames import Frame
from corolla.wire.stream import connect
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm, tiny_swarm
from tests.integration.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOON_S = 0.5
FIRST, LAST = common_pb2.BlockSpan(start=0, end=3), common_pb2.BlockSpan(start=3, end=5)
HIDDEN = {"dtype": pb.TENSOR_TYPE_FLOAT32, "hidden_size": 64}


swarm = tiny_swarm(["0:3", "3:5", "3:5"], server={"grace_s": 60.0})


class Trap:
    """A listener of the test's own, and how many have connected to it."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.server: asyncio.Server

    @property
    def address(self) -> str:
        return self.addresses(0)

    def addresses(self, number: int) -> str:
        """One of many."""
        return f"127.0.{number // 250}.{number % 250 + 1}:{self.server.sockets[0].getsockname()[1]}"

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        writer.close()

    @classmethod
    @asynccontextmanager
    async def laid(cls) -> AsyncIterator["Trap"]:
        trap = cls()
        trap.server = await asyncio.start_server(trap.on_connection, "0.0.0.0", 0)
        async with trap.server:
            yield trap
            await asyncio.sleep(SOON_S)
            assert trap.num_connections == 0


class Rogue:
    """A stream to a block server as a client service has it."""

    def __init__(self, address: str, fingerprint: str) -> None:
        self.client_id = secrets.token_bytes(16)
        self._frames: asyncio.Queue[Message] = asyncio.Queue()
        self._stream = connect(address, lambda _: lambda frame: self._frames.put_nowait(frame.control))
        self.send(pb.Hello(client_id=self.client_id, fingerprint=fingerprint))

    def send(self, control: Message, payload: bytes = b"") -> None:
        self._stream.send(control, payload)

    async def answer(self, kind: type[Message]) -> Any:
        async with asyncio.timeout(10):
            while not isinstance(frame := await self._frames.get(), (kind, pb.Fault)):
                pass
        return frame

    def step(self, session_id: bytes, **facts: Any) -> pb.Step:
        row = pb.StepRow(session_id=session_id, epoch=1, num_tokens=1, num_result_tokens=1)
        return pb.Step(client_id=self.client_id, rows=[row], **facts)

    def close(self) -> None:
        self._stream.close()


@asynccontextmanager
async def session_on(swarm: Swarm, server: int, blocks: common_pb2.BlockSpan, **facts: Any) -> AsyncIterator[Any]:
    """A rogue with an open session on a block server."""
    rogue, session_id = Rogue(swarm.servers[server].address, (await swarm.statuses())[0].fingerprint), b"s" * 16
    rogue.send(
        pb.Open(
            request_id=1, session_id=session_id, epoch=1, tenant="t", max_tokens=16, lease_ms=60_000, blocks=blocks,
            transient=True, keep_activations=True, **facts,
        )
    )  # fmt: skip
    assert isinstance(await rogue.answer(pb.Opened), pb.Opened)
    yield rogue, session_id
    rogue.close()
    await swarm.until_empty()


async def test_a_route_to_a_strangers_address_is_not_taken(swarm: Swarm) -> None:
    async with Trap.laid() as trap, session_on(swarm, 0, FIRST) as (rogue, session_id):
        route = [common_pb2.Hop(server_id="x", address=trap.address, span=LAST)]
        step = rogue.step(session_id, step_id=7, blocks=FIRST, route=route)
        step.rows[0].token_ids.append(1)
        rogue.send(step)
        fault = await rogue.answer(pb.Result)
        assert (fault.reason, fault.step_id, fault.address) == ("ROUTE_UNKNOWN", 7, trap.address)
        again = rogue.step(session_id, step_id=8, blocks=FIRST, route=route)
        again.rows[0].num_result_tokens = 0
        rogue.send(pb.Resend(step=again))
        fault = await rogue.answer(pb.Result)
        assert (fault.reason, fault.step_id) == ("ROUTE_UNKNOWN", 8)


async def test_what_goes_round_does_not_go_to_a_strangers_address(swarm: Swarm) -> None:
    sampler = pb.Sampler(num_tokens_left=8)
    async with Trap.laid() as trap, session_on(swarm, 1, LAST, sampler=sampler) as (rogue, session_id):
        ring = pb.Ring(first_address=trap.address, credit_end=10, max_step_tokens=8)
        step = rogue.step(session_id, blocks=LAST, samples=True, ring=ring, **HIDDEN)
        rogue.send(step, bytes(4 * HIDDEN["hidden_size"]))
        answers = {type(each): each for each in [await rogue.answer(pb.Result), await rogue.answer(pb.Result)]}
        assert len(answers[pb.Result].sampled) == 1
        assert answers[pb.Fault].reason == "ROUTE_UNKNOWN"


async def test_very_many_addresses_cost_the_router_little(swarm: Swarm) -> None:
    """They wait for one answer together, and the next step to a server that is placed goes its way."""
    async with Trap.laid() as trap, session_on(swarm, 0, FIRST) as (rogue, session_id):
        first = rogue.step(session_id, step_id=1, blocks=FIRST, route=[common_pb2.Hop(address=trap.address, span=LAST)])
        first.rows[0].token_ids.append(1)
        rogue.send(first)
        assert (await rogue.answer(pb.Result)).reason == "ROUTE_UNKNOWN"
        before = await num_asked(swarm)
        for number in range(2000):
            route = [common_pb2.Hop(address=trap.addresses(number), span=LAST)]
            again = rogue.step(session_id, step_id=number + 2, blocks=FIRST, route=route)
            again.rows[0].num_result_tokens = 0
            rogue.send(pb.Resend(step=again))
        assert {(await rogue.answer(pb.Result)).reason for _ in range(2000)} == {"ROUTE_UNKNOWN"}
        assert await num_asked(swarm) - before < 60
    async with swarm.connect() as client:
        assert len((await client.generate([1, 2, 3], max_tokens=4)).token_ids) == 4


async def num_asked(swarm: Swarm) -> float:
    """How often the router was asked for its placement."""
    return await sample(swarm.router.metrics_port, "corolla_rpc_seconds_count", method="GetPlacement")


async def test_a_session_does_not_move_to_a_strangers_address(swarm: Swarm) -> None:
    """A block server that drains lies about who has the session: its client replays it at a server that is placed."""
    async with Trap.laid() as trap, swarm.connect() as client:
        expected = (await client.generate([1, 2, 3], max_tokens=200, ignore_eos=True)).token_ids
        lies = 0

        def lie(address: str, frame: Frame) -> Frame:
            nonlocal lies
            if isinstance(frame.control, pb.Moved) and frame.control.HasField("hop"):
                lies += 1
                frame.control.hop.address = trap.address
            return frame

        wires = swarm.wires_of(swarm.clients[0])
        wires.on_received = lie
        token_ids: list[int] = []
        stopping: asyncio.Task[None] | None = None
        async for chunk in client.stream([1, 2, 3], max_tokens=200, ignore_eos=True):
            token_ids += chunk.token_ids
            if stopping is None and len(token_ids) > 10:
                (leaving,) = [each for each in swarm.servers[1:] if each.sessions]
                stopping = asyncio.create_task(leaving.stop())
        wires.on_received = lambda address, frame: frame
        assert stopping is not None
        await stopping
        swarm.servers.remove(leaving)
        assert token_ids == list(expected)
        assert lies > 0


async def test_while_no_router_answers_a_client_service_says_who_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers go before a block server has asked again who is placed: it connects to whom the plan names."""
    placements: list[PlacementWatch] = []

    class Kept(PlacementWatch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            placements.append(self)

    monkeypatch.setattr(service, "PlacementWatch", Kept)
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    async with Swarm(tmp_path, model, ["0:3", "3:5"], router={"lease_ms": 120_000}) as swarm, swarm.connect() as client:
        expected = (await client.generate([1, 2, 3], max_tokens=8)).token_ids
        # Callers prefer this one, whatever the machine does while its steps are measured.
        monkeypatch.setattr(block_server, "measure_decode_step", lambda runner: 1e-6)
        joined = await swarm.add_server("3:5")
        (placement,) = placements

        async def is_placed() -> bool:
            ready = router_pb2.SERVER_STATE_READY
            return (joined.server_id, ready) in [(each.server.server_id, each.state) for each in placement.servers]

        # The session goes there once the client service knows of the server: block servers ask once a second.
        await until(is_placed)
        await swarm.router.stop()
        async with asyncio.timeout(60):
            while not await sample(joined.metrics_port, "corolla_hop_tokens_total"):
                answers = await asyncio.gather(*(client.generate([1, 2, 3], max_tokens=8) for _ in range(4)))
                assert [each.token_ids for each in answers] == [expected] * 4
        port = swarm.clients[0].metrics_port
        assert await sample(port, "corolla_session_recoveries_total") == 0
        assert await sample(port, "corolla_quarantines_total") == 0
