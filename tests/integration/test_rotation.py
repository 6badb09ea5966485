"""Certificates and their authority are replaced while answers run: nobody notices; the old ones are worth nothing."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import grpc
import pytest
import pytest_asyncio

from corolla.trust.authority import Authority
from corolla.trust.workload import Role
from corolla.v1 import router_pb2, router_pb2_grpc
from corolla.wire.network import Network
from tests.checkpoints import make_tiny_checkpoint
from tests.identities import Identities
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

log = logging.getLogger(__name__)

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS: Final = 6
TAKEN_S: Final = 5.0
"""Every process has taken a change by then."""
NUM_TOKENS: Final = 24


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    folder: Path = tmp_path_factory.mktemp("rotation")
    model = make_tiny_checkpoint("llama", folder / "tiny")
    async with Swarm(folder, model, ["0:2", "2:5"], num_clients=2, is_encrypted=True) as swarm:
        yield swarm


class Callers:
    """They ask for one answer after the other, and know what it has to be.

    Attributes:
        longest_s: between one token and the next.
    """

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._is_over = False
        self.num_answers = 0
        self.longest_s = 0.0

    async def run(self, number: int) -> None:
        expected: tuple[int, ...] | None = None
        while not self._is_over:
            async with self._swarm.connect(number % 2) as client:
                token_ids: list[int] = []
                heard_s = time.monotonic()
                async for chunk in client.stream([1, 2, 3 + number], max_tokens=NUM_TOKENS, ignore_eos=True):
                    self.longest_s = max(self.longest_s, time.monotonic() - heard_s)
                    heard_s = time.monotonic()
                    token_ids += chunk.token_ids
            expected = expected or tuple(token_ids)
            assert tuple(token_ids) == expected
            assert len(token_ids) == NUM_TOKENS
            self.num_answers += 1

    def end(self) -> None:
        self._is_over = True


async def is_known(swarm: Swarm, folder: Path) -> bool:
    """Whether the router lets somebody in who has the certificate of a folder."""
    network = Network.of(folder)
    async with network.open_channel(swarm.router_address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        try:
            await stub.GetPlacement(router_pb2.GetPlacementRequest(model="tiny"), timeout=5)
        except grpc.aio.AioRpcError as failure:
            return failure.code() is not grpc.StatusCode.UNAVAILABLE
    return True


async def test_answers_go_on_while_all_certificates_are_replaced(swarm: Swarm) -> None:
    identities = swarm.identities
    assert identities is not None
    callers = Callers(swarm)
    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_STREAMS):
            tasks.create_task(callers.run(number))
        old, new = identities.authority, Authority()
        identities.believe(old, new)
        await asyncio.sleep(TAKEN_S)
        identities.replace(new)
        await asyncio.sleep(TAKEN_S)
        identities.believe(new)
        await asyncio.sleep(TAKEN_S)
        # Streams that stand need no handshake: those to this server do, and soon go nowhere else.
        for span, number in (("0:2", 0), ("2:5", 1)):
            await swarm.add_server(span)
            await asyncio.sleep(1)
            await swarm.die(swarm.servers[number])
        num_answers = callers.num_answers

        async def is_served() -> bool:
            return callers.num_answers >= num_answers + 2 * NUM_STREAMS

        await until(is_served, 60)
        callers.end()
    log.info("%d answers, at most %.2f s between two tokens", callers.num_answers, callers.longest_s)


async def test_whom_only_the_old_authority_signed_for_is_a_stranger_soon(swarm: Swarm, tmp_path: Path) -> None:
    identities = swarm.identities
    assert identities is not None
    old, new = identities.authority, Authority()
    rogue = Identities(tmp_path, old)
    folder = rogue.folder_of(Role.CLIENT, "rogue")
    assert await is_known(swarm, folder)
    identities.believe(old, new)
    await asyncio.sleep(TAKEN_S)
    identities.replace(new)
    await asyncio.sleep(TAKEN_S)
    rogue.believe(old, new)
    assert await is_known(swarm, folder)
    identities.believe(new)

    async def is_stranger() -> bool:
        return not await is_known(swarm, folder)

    await until(is_stranger, 10)
