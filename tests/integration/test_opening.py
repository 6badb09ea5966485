"""Hops on which a session cannot be opened: they are left out, and nothing of it stays there."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corolla.block_server import service, span_loader
from corolla.block_server.service import BlockServer
from corolla.chassis.errors import HopUnavailable, NoChain
from corolla.client.service import ClientBounds
from corolla.compute.speed import Speed, measure_speed
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Frame
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.integration.wires import Cut

PROMPT = "the thin man"
OPTIONS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
# Longer than a machine may pause while a server that is well opens a session.
OPEN_TIMEOUT = ClientBounds(open_timeout_s=4.0)
SHORT = ClientBounds(open_timeout_s=1.0)


@contextmanager
def stuck(server: BlockServer) -> Iterator[None]:
    """Its thread that computes does not come back, as of a device that hangs; its event loop answers."""
    released = threading.Event()
    copying = asyncio.ensure_future(server.engine.copy(released.wait))
    try:
        yield
    finally:
        released.set()
        copying.cancel()


def openings(swarm: Swarm) -> Counter[str]:
    """How often the client service is to open a session at each address, from now on."""
    openings = swarm.wires_of(swarm.clients[0]).openings
    openings.clear()
    return openings


def equally_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What block servers measure of themselves at their start says nothing of the moment in which they did it."""

    def measure(*block: Any) -> Speed:
        return replace(measure_speed(*block), decode_tokens_per_second=1000.0, prefill_tokens_per_second=1000.0)

    monkeypatch.setattr(span_loader, "measure_speed", measure)
    monkeypatch.setattr(service, "measure_decode_step", lambda runner: 0.003)


@pytest.mark.full
async def test_client_service_avoids_a_server_that_lives_and_opens_no_session(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All else being equal, the planner would rather stay in one zone.
    equally_fast(monkeypatch)
    settings: dict[str, Any] = {"server": {"zone": "here"}, "bounds": OPEN_TIMEOUT}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], **settings) as swarm:
        await swarm.add_server("2:5", zone="there")
        preferred = swarm.servers[1]
        async with swarm.connect() as client:
            expected = (await client.generate(PROMPT, **OPTIONS)).token_ids
            with stuck(preferred):
                asked = openings(swarm)
                assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected
                assert asked[preferred.address]
                asked.clear()
                assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected
                assert not asked[preferred.address], "the second answer waited for it, too"
        # What it opens too late is closed again.
        await swarm.until_empty()


async def test_a_recently_failed_server_is_the_last_resort(tmp_path: Path, model: Path) -> None:
    server = {"prefix_cache": False}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], server=server) as swarm, swarm.connect() as client:
        async with client.session() as session:
            await session.generate(PROMPT, **OPTIONS)
            expected = await see_fail(swarm, swarm.servers[1])
            assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected
            # A conversation finds there what it left.
            assert (await session.generate(PROMPT, **OPTIONS)).usage.cached_tokens > 0
        await swarm.router.stop()
        assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected


async def test_client_service_avoids_a_recently_failed_server_where_another_chain_exists(
    tmp_path: Path, model: Path
) -> None:
    async with Swarm(tmp_path, model, ["0:2", "2:5", "2:5"]) as swarm, swarm.connect() as client:
        failed = swarm.servers[1]
        await see_fail(swarm, failed)
        for _ in range(8):
            await client.generate(PROMPT, **OPTIONS)
        assert await sample(failed.metrics_port, "corolla_hop_tokens_total") == 0


async def test_a_request_waits_for_the_only_server_while_it_is_slow(tmp_path: Path, model: Path) -> None:
    async with Swarm(tmp_path, model, ["0:2", "2:5"], bounds=SHORT) as swarm:
        async with swarm.connect() as client:
            expected = (await client.generate(PROMPT, **OPTIONS)).token_ids
            slow, asked = swarm.servers[1], openings(swarm)
            with stuck(slow):
                answering = asyncio.create_task(client.generate(PROMPT, **OPTIONS))
                await until(lambda: asked[slow.address] > 1)
            assert (await answering).token_ids == expected
        await swarm.until_empty()


@pytest.mark.parametrize(
    "client, options", [({"recovery_patience_s": 0.5}, {}), ({}, {"time_limit_s": 0.5})], ids=["patience", "deadline"]
)
async def test_a_request_gives_up_on_a_slow_server_in_time(
    tmp_path: Path, model: Path, client: dict[str, Any], options: dict[str, Any]
) -> None:
    async with Swarm(tmp_path, model, ["0:2", "2:5"], client=client, bounds=SHORT) as swarm:
        async with swarm.connect() as connected:
            with stuck(swarm.servers[1]), pytest.raises((HopUnavailable, NoChain)):
                await asyncio.wait_for(connected.generate(PROMPT, **OPTIONS, **options), 20)
            # The server is well again, and no caller need wait until that is known.
            await connected.generate(PROMPT, **OPTIONS)
        await swarm.until_empty()


@pytest.mark.parametrize("num_breaks", [1, 2])
async def test_a_connection_that_broke_is_made_again_where_there_is_no_other_server(
    tmp_path: Path, model: Path, num_breaks: int
) -> None:
    async with Swarm(tmp_path, model, ["0:2", "2:5"]) as swarm, swarm.connect() as client:
        last = swarm.servers[1].address
        # The server does not notice, and holds the session when it is opened once more.
        num_left = lose_answers_of(swarm, last, num_breaks)
        first = await client.generate(PROMPT, **OPTIONS)
        assert num_left == [0]
        assert swarm.wires_of(swarm.clients[0]).openings[last] == num_breaks + 1
        assert first.token_ids == (await client.generate(PROMPT, **OPTIONS)).token_ids
        await swarm.until_empty()


def lose_answers_of(swarm: Swarm, address: str, num_losses: int) -> list[int]:
    """The next openings there come through, and the answers do not: the connection breaks, at the client's end alone.

    Returns:
        How many are left to be lost.
    """
    num_left = [num_losses]

    def lose(sender: str, frame: Frame) -> Frame:
        if sender == address and isinstance(frame.control, pb.Opened) and num_left[0]:
            num_left[0] -= 1
            raise Cut(is_noticed=False)
        return frame

    swarm.wires_of(swarm.clients[0]).on_received = lose
    return num_left


async def see_fail(swarm: Swarm, server: BlockServer) -> tuple[int, ...]:
    """The client service sees the server fail, in the midst of answers that it gives all the same. Their tokens."""
    num_left = lose_answers_of(swarm, server.address, 1)
    async with swarm.connect() as client:
        while num_left[0]:
            answer = await client.generate(PROMPT, **OPTIONS)
    assert await sample(swarm.clients[0].metrics_port, "corolla_quarantined_servers") == 1
    return answer.token_ids


@pytest.mark.parametrize("is_router_there", [True, False], ids=["by the router", "by the client service"])
async def test_replicas_share_a_burst_before_their_next_heartbeats(
    tmp_path: Path, model: Path, is_router_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    equally_fast(monkeypatch)
    # No heartbeat comes meanwhile, and what one text leaves behind helps no other.
    settings: dict[str, Any] = {
        "router": {"lease_ms": 600_000},
        "server": {"prefix_cache": False},
    }
    async with Swarm(tmp_path, model, ["0:2", "2:5", "2:5"], **settings) as swarm, swarm.connect() as client:
        if not is_router_there:
            await swarm.router.stop()
        await asyncio.gather(*(client.generate(PROMPT, **OPTIONS) for _ in range(64)))
        tokens = [await sample(server.metrics_port, "corolla_hop_tokens_total") for server in swarm.servers]
        assert tokens[1] + tokens[2] == tokens[0]
        assert 0.25 < tokens[1] / tokens[0] < 0.75
