"""Hops on which a session cannot be opened: they are left out, and nothing of it stays there."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corolla.block_server import service
from corolla.block_server.peers import Peer
from corolla.block_server.service import BlockServer
from corolla.block_server.servicer import BlockServicer
from corolla.block_server.speed import Speed, measure_speed
from corolla.chassis.errors import HopUnavailable, NoChain
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer, Frame
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm

PROMPT = "the thin man"
OPTIONS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
# Longer than a machine may pause while a server that is well opens a session.
OPEN_TIMEOUT = {"open_timeout_s": 4.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("opening") / "tiny")


@contextmanager
def stuck(server: BlockServer) -> Iterator[None]:
    """Its thread that computes does not come back, as of a device that hangs; its event loop answers."""
    engine, released = server._engine, threading.Event()
    assert engine is not None
    copying = asyncio.ensure_future(engine.copies.make(released.wait))
    try:
        yield
    finally:
        released.set()
        copying.cancel()


def openings(swarm: Swarm) -> list[str]:
    """Grows by the address of each hop on which the client service opens a session from now on."""
    plane, asked = swarm.clients[0]._plane, list[str]()
    assert plane is not None
    ask = plane.open

    async def note_and_ask(address: str, request: pb.Open, payload: Buffer = b"") -> tuple[pb.Opened, int]:
        asked.append(address)
        return await ask(address, request, payload)

    plane.open = note_and_ask  # type: ignore[method-assign]
    return asked


def equally_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What block servers measure of themselves at their start says nothing of the moment in which they did it."""

    def measure(*block: Any) -> Speed:
        return replace(measure_speed(*block), decode_tokens_per_second=1000.0, prefill_tokens_per_second=1000.0)

    monkeypatch.setattr(service, "measure_speed", measure)
    monkeypatch.setattr(service, "measure_decode_step", lambda runner: 0.003)


async def test_a_server_that_lives_and_opens_nothing_is_avoided(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All else being equal, the planner would rather stay in one zone.
    equally_fast(monkeypatch)
    settings: dict[str, Any] = {"server": {"zone": "here"}, "client": OPEN_TIMEOUT}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], **settings) as swarm:
        await swarm.add_server("2:5", zone="there")
        preferred = swarm.servers[1]
        async with swarm.connect() as client:
            expected = (await client.generate(PROMPT, **OPTIONS)).token_ids
            with stuck(preferred):
                asked = openings(swarm)
                assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected
                assert preferred.address in asked
                asked.clear()
                assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected
                assert preferred.address not in asked, "the second answer waited for it, too"
        # What it opens too late is closed again.
        await swarm.until_empty()


async def test_a_server_that_failed_lately_is_the_last_resort(tmp_path: Path, model: Path) -> None:
    server = {"prefix_cache": False}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], server=server) as swarm, swarm.connect() as client:
        async with client.session() as session:
            await session.generate(PROMPT, **OPTIONS)
            avoid(swarm, swarm.servers[1])
            expected = (await client.generate(PROMPT, **OPTIONS)).token_ids
            # A conversation finds there what it left.
            assert (await session.generate(PROMPT, **OPTIONS)).usage.cached_tokens > 0
        await swarm.router.stop()
        assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected


async def test_who_has_another_chain_leaves_a_server_out_that_failed_lately(tmp_path: Path, model: Path) -> None:
    async with Swarm(tmp_path, model, ["0:2", "2:5", "2:5"]) as swarm, swarm.connect() as client:
        failed = swarm.servers[1]
        avoid(swarm, failed)
        for _ in range(8):
            await client.generate(PROMPT, **OPTIONS)
        assert await sample(failed.metrics_port, "corolla_hop_tokens_total") == 0


async def test_a_server_that_failed_this_very_request_is_not_asked_again(tmp_path: Path, model: Path) -> None:
    async with Swarm(tmp_path, model, ["0:2", "2:5"], client=OPEN_TIMEOUT) as swarm:
        async with swarm.connect() as client:
            with stuck(swarm.servers[1]):
                asked = openings(swarm)
                with pytest.raises(NoChain):
                    await client.generate(PROMPT, **OPTIONS)
                assert asked.count(swarm.servers[1].address) == 1
            # It is well again, and nobody need wait until that is known.
            await client.generate(PROMPT, **OPTIONS)
        await swarm.until_empty()


async def test_a_connection_that_broke_is_made_again_where_there_is_no_other_server(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = break_openings(monkeypatch, 1)
    # The server does not notice, and holds the session when it is opened once more.
    monkeypatch.setattr(BlockServicer, "_forget", lambda self, client_id: None)
    async with Swarm(tmp_path, model, ["0:2", "2:5"]) as swarm, swarm.connect() as client:
        first = await client.generate(PROMPT, **OPTIONS)
        assert len(opened) == 2
        assert first.token_ids == (await client.generate(PROMPT, **OPTIONS)).token_ids
        await swarm.until_empty()


async def test_a_connection_that_breaks_twice_is_a_server_that_is_gone(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = break_openings(monkeypatch, 2)
    async with Swarm(tmp_path, model, ["0:2", "2:5"]) as swarm, swarm.connect() as client:
        with pytest.raises(NoChain):
            await client.generate(PROMPT, **OPTIONS)
        assert len(opened) == 2
        await swarm.until_empty()


def break_openings(monkeypatch: pytest.MonkeyPatch, num_breaks: int) -> list[bytes]:
    """The first openings on the last hop come through, but not their answers. Gives the sessions opened there."""
    opened: list[bytes] = []
    handle = BlockServicer._open

    def open_and_break(self: BlockServicer, frame: Frame, peer: Peer) -> None:
        control: Any = frame.control
        if control.blocks.start == 0:
            handle(self, frame, peer)
            return
        opened.append(control.session_id)
        is_breaking = len(opened) <= num_breaks
        if is_breaking:
            peer.outbox.close()
        handle(self, frame, peer)
        if is_breaking:
            raise HopUnavailable("the connection broke")

    monkeypatch.setattr(BlockServicer, "_open", open_and_break)
    return opened


def avoid(swarm: Swarm, server: BlockServer) -> None:
    """The client service has just seen it fail."""
    routes = swarm.clients[0]._routes
    assert routes is not None
    routes.avoid(server.server_id)


@pytest.mark.parametrize("is_router_there", [True, False], ids=["by the router", "by the client service"])
async def test_a_burst_is_shared_by_replicas_before_they_tell_of_it(
    tmp_path: Path, model: Path, is_router_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    equally_fast(monkeypatch)
    # No heartbeat comes meanwhile, and what one text leaves behind helps no other.
    settings: dict[str, Any] = {
        "router": {"lease_ms": 600_000, "heartbeat_interval_ms": 200_000},
        "server": {"prefix_cache": False},
    }
    async with Swarm(tmp_path, model, ["0:2", "2:5", "2:5"], **settings) as swarm, swarm.connect() as client:
        if not is_router_there:
            await swarm.router.stop()
        await asyncio.gather(*(client.generate(PROMPT, **OPTIONS) for _ in range(64)))
        tokens = [await sample(server.metrics_port, "corolla_hop_tokens_total") for server in swarm.servers]
        assert tokens[1] + tokens[2] == tokens[0]
        assert 0.25 < tokens[1] / tokens[0] < 0.75
