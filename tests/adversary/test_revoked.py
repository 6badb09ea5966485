"""Whose certificate was revoked, has ended, or is of an authority that went is out, and soon out of what stands."""

import asyncio
import datetime
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import grpc
import pytest

from corolla.trust.authority import Authority
from corolla.trust.workload import Role
from corolla.v1 import router_pb2, router_pb2_grpc
from corolla.wire.network import Network
from corolla.wire.stream import Receiver, Stream
from tests.checkpoints import make_tiny_checkpoint
from tests.identities import Identities
from tests.integration.swarm import Swarm

OUT_S: Final = 10.0
"""Within which whoever is not believed any more is out."""


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[Swarm]:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    async with Swarm(tmp_path, model, ["0:2", "2:5"], is_encrypted=True) as swarm:
        yield swarm


class Standing:
    """A stream to a block server and a watch of the router's placement, by the certificate of a folder."""

    def __init__(self, swarm: Swarm, folder: Path) -> None:
        network = Network.of(folder)
        self._channel = network.open_channel(swarm.router_address)
        stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._watch = stub.WatchPlacement(router_pb2.WatchPlacementRequest(model="tiny"))
        self.stream = open_stream(network, swarm)

    async def until_open(self) -> None:
        assert await self._watch.read()
        await asyncio.sleep(0.5)
        assert not self.stream.ended.done()

    async def until_out(self) -> float:
        """Seconds until both have ended."""
        began_s = time.monotonic()
        async with asyncio.timeout(2 * OUT_S):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await self._read_on()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await asyncio.shield(self.stream.ended)
        await self._channel.close()
        return time.monotonic() - began_s

    async def _read_on(self) -> None:
        while True:
            await self._watch.read()


def take_nothing(stream: Stream) -> Receiver:
    return lambda frame: None


def open_stream(network: Network, swarm: Swarm) -> Stream:
    return network.connect(swarm.servers[0].address, take_nothing)


async def refused_with(swarm: Swarm, folder: Path) -> grpc.StatusCode:
    """How a call ends that begins now."""
    async with Network.of(folder).open_channel(swarm.router_address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetPlacement(router_pb2.GetPlacementRequest(model="tiny"), timeout=5)
    return refused.value.code()


async def test_a_revoked_certificate_is_out_and_everybody_else_goes_on(swarm: Swarm) -> None:
    identities = swarm.identities
    assert identities is not None
    folder = identities.folder_of(Role.CLIENT, "rogue")
    standing = Standing(swarm, folder)
    await standing.until_open()
    async with swarm.connect() as client:
        expected = (await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)).token_ids
        identities.revoke(folder)
        assert await standing.until_out() < OUT_S
        assert (await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)).token_ids == expected
    assert await refused_with(swarm, folder) is grpc.StatusCode.UNAUTHENTICATED
    again = open_stream(Network.of(folder), swarm)
    await asyncio.wait_for(asyncio.shield(again.ended), 5)


@pytest.mark.full
async def test_a_block_server_with_a_revoked_certificate_gets_nothing_more(swarm: Swarm) -> None:
    identities = swarm.identities
    assert identities is not None
    spare = await swarm.add_server("0:2")
    revoked = swarm.servers[0]
    assert revoked.settings.tls_dir is not None
    good = identities.folder_of(Role.CLIENT, "good")
    async with swarm.connect() as client:
        expected = (await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)).token_ids
        identities.revoke(revoked.settings.tls_dir)
        await asyncio.sleep(OUT_S)
        assert (await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)).token_ids == expected
    to_revoked, to_spare = (Network.of(good).connect(each.address, take_nothing) for each in (revoked, spare))
    await asyncio.wait_for(asyncio.shield(to_revoked.ended), 5)
    assert not to_spare.ended.done()
    to_spare.close()


async def test_a_certificate_that_ends_is_out(swarm: Swarm) -> None:
    identities = swarm.identities
    assert identities is not None
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=5)
    standing = Standing(swarm, identities.folder_of(Role.CLIENT, "short", until=end))
    await standing.until_open()
    assert await standing.until_out() < 5 + OUT_S


@pytest.mark.full
async def test_who_was_signed_for_by_an_authority_that_went_is_out(swarm: Swarm, tmp_path: Path) -> None:
    identities = swarm.identities
    assert identities is not None
    old, new = identities.authority, Authority()
    rogue = Identities(tmp_path / "rogue", old)
    folder = rogue.folder_of(Role.CLIENT, "rogue")
    rogue.believe(old, new)
    identities.believe(old, new)
    await asyncio.sleep(5)
    identities.replace(new)
    await asyncio.sleep(5)
    standing = Standing(swarm, folder)
    await standing.until_open()
    async with swarm.connect() as client:
        expected = (await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)).token_ids
        identities.believe(new)
        assert await standing.until_out() < OUT_S
        # Those who have new certificates only have to connect again.
        assert (await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)).token_ids == expected
