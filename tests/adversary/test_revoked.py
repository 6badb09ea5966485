"""Whose certificate was revoked, has ended, or is of an authority that went is out, and soon out of what stands."""

import asyncio
import datetime
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
"""Services drop a peer whose certificate is no longer valid within these seconds."""
LIFETIME_S: Final = 15.0
"""Seconds for which a short certificate holds: long enough to connect with it."""
HANGS_S: Final = 30.0
_TICK_S: Final = 0.1


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[Swarm]:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    async with Swarm(tmp_path, model, ["0:2", "2:5"], is_encrypted=True) as swarm:
        yield swarm


async def live(seconds: float) -> None:
    """Sleeps for so long, as the services of this process live through it: a pause of the machine is one tick."""
    for _ in range(round(seconds / _TICK_S)):
        await asyncio.sleep(_TICK_S)


class LongCalls:
    """A stream to a block server and a watch of the router's placement, by the certificate of a folder."""

    def __init__(self, swarm: Swarm, folder: Path) -> None:
        network = Network.from_folder(folder)
        self._channel = network.open_channel(swarm.router_address)
        stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._watch = stub.WatchPlacement(router_pb2.WatchPlacementRequest(model="tiny"))
        self.stream = open_stream(network, swarm)

    async def until_open(self) -> None:
        assert await self._watch.read()
        await asyncio.sleep(0.5)
        assert not self.stream.ended.done()

    async def until_out(self, within_s: float = OUT_S) -> None:
        """Until both have ended, which they must have by then."""
        ending, waiting = asyncio.create_task(self._end()), asyncio.create_task(live(within_s))
        await asyncio.wait({ending, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert ending.done(), f"they run for longer than {within_s:g} seconds"
        await ending
        await self._channel.close()

    async def _end(self) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self._read_on()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await asyncio.shield(self.stream.ended)

    async def _read_on(self) -> None:
        while True:
            await self._watch.read()


def take_nothing(stream: Stream) -> Receiver:
    return lambda frame: None


def open_stream(network: Network, swarm: Swarm) -> Stream:
    return network.connect(swarm.servers[0].address, take_nothing)


async def refused_with(swarm: Swarm, folder: Path) -> grpc.StatusCode:
    """How a call ends that begins now."""
    async with Network.from_folder(folder).open_channel(swarm.router_address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetPlacement(router_pb2.GetPlacementRequest(model="tiny"), timeout=HANGS_S)
    return refused.value.code()


async def test_a_revoked_certificate_is_out_and_everybody_else_goes_on(swarm: Swarm) -> None:
    identities = swarm.identities
    folder = identities.folder_of(Role.CLIENT, "rogue")
    calls = LongCalls(swarm, folder)
    await calls.until_open()
    async with swarm.connect() as client:
        expected = (await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)).token_ids
        identities.revoke(folder)
        await calls.until_out()
        assert (await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)).token_ids == expected
    assert await refused_with(swarm, folder) is grpc.StatusCode.UNAUTHENTICATED
    again = open_stream(Network.from_folder(folder), swarm)
    await asyncio.wait_for(asyncio.shield(again.ended), HANGS_S)


@pytest.mark.full
async def test_a_block_server_with_a_revoked_certificate_gets_nothing_more(swarm: Swarm) -> None:
    identities = swarm.identities
    spare = await swarm.add_server("0:2")
    revoked = swarm.servers[0]
    assert revoked.settings.tls_dir is not None
    good = identities.folder_of(Role.CLIENT, "good")
    async with swarm.connect() as client:
        expected = (await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)).token_ids
        identities.revoke(revoked.settings.tls_dir)
        await live(OUT_S)
        assert (await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)).token_ids == expected
    to_revoked, to_spare = (Network.from_folder(good).connect(each.address, take_nothing) for each in (revoked, spare))
    await asyncio.wait_for(asyncio.shield(to_revoked.ended), HANGS_S)
    assert not to_spare.ended.done()
    to_spare.close()


@pytest.mark.full
async def test_a_certificate_that_ends_is_out(swarm: Swarm) -> None:
    identities = swarm.identities
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=LIFETIME_S)
    calls = LongCalls(swarm, identities.folder_of(Role.CLIENT, "short", until=end))
    await calls.until_open()
    await calls.until_out(LIFETIME_S + OUT_S)


@pytest.mark.full
async def test_who_was_signed_for_by_an_authority_that_went_is_out(swarm: Swarm, tmp_path: Path) -> None:
    identities = swarm.identities
    old, new = identities.authority, Authority()
    rogue = Identities(tmp_path / "rogue", old)
    folder = rogue.folder_of(Role.CLIENT, "rogue")
    rogue.trust(old, new)
    identities.trust(old, new)
    await asyncio.sleep(5)
    identities.replace(new)
    await asyncio.sleep(5)
    calls = LongCalls(swarm, folder)
    await calls.until_open()
    async with swarm.connect() as client:
        expected = (await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)).token_ids
        identities.trust(new)
        await calls.until_out()
        # Those who have new certificates only have to connect again.
        assert (await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)).token_ids == expected
