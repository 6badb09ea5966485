"""Real processes refuse each role what its row of their table does not give."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from corolla.chassis.errors import CorollaError, HopSessionLost, MalformedMessage, RoleDenied
from corolla.chassis.status import from_reason, from_rpc_error
from corolla.local.ports import Ports
from corolla.trust.authorisation import AUDITED, METHODS
from corolla.trust.workload import Role
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2, router_pb2
from corolla.v1.router_pb2_grpc import RouterServiceStub
from corolla.wire.network import Network
from corolla.wire.stream import Stream, connect
from tests.adversary import identity_matrix
from tests.adversary.identity_matrix import ASKERS, SOON_S, Asker, Places
from tests.checkpoints import make_tiny_checkpoint
from tests.identities import TRUST_DOMAIN
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

FINGERPRINTS: list[str] = []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    folder: Path = tmp_path_factory.mktemp("roles")
    model = make_tiny_checkpoint("llama", folder / "tiny")
    admin_port = {"admin_port": Ports().free()}
    async with Swarm(folder, model, ["0:5"], server=admin_port, is_encrypted=True) as swarm:
        FINGERPRINTS[:] = [status.fingerprint for status in await swarm.statuses()]
        yield swarm


def network_of(swarm: Swarm, role: Role, name: str = "rogue") -> Network:
    return Network.from_folder(swarm.identities.folder_of(role, name))


def held_by(swarm: Swarm) -> dict[bytes, tuple[object, ...]]:
    """Facts about the sessions that the block server holds, by their ids."""
    return {
        each.request.session_id: (each, each.state, each.version, each.request.epoch, each.cache.num_tokens)
        for each in swarm.servers[0].sessions
    }


class Caller:
    """A connection to the swarm's only block server, and what came on it."""

    def __init__(
        self, swarm: Swarm, role: Role, name: str = "rogue", client_id: bytes | None = None, stream_id: bytes = b""
    ) -> None:
        self.frames: asyncio.Queue[Message] = asyncio.Queue()
        network = network_of(swarm, role, name)
        self.capabilities = network.capabilities(FINGERPRINTS[0])
        self.stream: Stream = connect(
            swarm.servers[0].address,
            lambda _: lambda frame: self.frames.put_nowait(frame.control),
            trust=network.servers,
        )
        if client_id is None:
            client_id = b"" if role is Role.BLOCK else secrets.token_bytes(16)
        self.stream.send(pb.Hello(client_id=client_id, fingerprint=FINGERPRINTS[0], stream_id=stream_id))

    async def fate(self, within_s: float = 10) -> CorollaError | None:
        """Why the other end ended the stream; None where it did not."""
        try:
            return (await asyncio.wait_for(asyncio.shield(self.stream.ended), within_s)).error
        except TimeoutError:
            return None

    async def answer(self, kind: type[Message]) -> Any:
        while not isinstance(frame := await asyncio.wait_for(self.frames.get(), 10), (kind, pb.Fault)):
            pass
        return frame

    async def open(self, session_id: bytes, tenant: str, epoch: int = 1) -> Any:
        opening = pb.Open(
            request_id=1, session_id=session_id, epoch=epoch, tenant=tenant, max_tokens=16, lease_ms=60_000,
            blocks=common_pb2.BlockSpan(start=0, end=5),
        )  # fmt: skip
        assert self.capabilities is not None
        self.capabilities.sign(opening)
        self.stream.send(opening)
        return await self.answer(pb.Opened)


async def test_what_is_audited_is_a_method() -> None:
    assert METHODS.keys() >= AUDITED


@pytest.fixture(scope="module")
def askers(swarm: Swarm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what each asker shows."""
    folder = tmp_path_factory.mktemp("askers")
    identity_matrix.issue(folder, swarm.identities.authority, TRUST_DOMAIN)
    return folder


@pytest.mark.parametrize("asker", ASKERS, ids=lambda asker: asker.name)
async def test_methods_and_frames_are_taken_as_the_table_says(swarm: Swarm, askers: Path, asker: Asker) -> None:
    server = swarm.servers[0]
    ports = {"BlockService": server.control_port, "AdminService": server.settings.admin_port}
    services = {"RouterService": swarm.router_address, **{name: f"127.0.0.1:{port}" for name, port in ports.items()}}
    places = Places(services, server.address, FINGERPRINTS[0])
    assert await identity_matrix.outcomes(places, asker, askers) == asker.expected


async def test_nobody_takes_the_place_of_a_block_server_that_lives(swarm: Swarm) -> None:
    (placed,) = (await swarm.placement()).servers
    async with network_of(swarm, Role.BLOCK).open_channel(swarm.router_address) as channel:
        stub = RouterServiceStub(channel)
        at_its_address = router_pb2.ServerDescription()
        at_its_address.CopyFrom(placed.server)
        at_its_address.server_id = secrets.token_hex(16)
        elsewhere = router_pb2.ServerDescription()
        elsewhere.CopyFrom(placed.server)
        elsewhere.server_id, elsewhere.address = secrets.token_hex(16), "192.0.2.1:50052"
        beat = router_pb2.HeartbeatRequest(
            model="tiny", server_id=placed.server.server_id, state=router_pb2.SERVER_STATE_DRAINING,
        )  # fmt: skip
        leave = router_pb2.DeregisterServerRequest(model="tiny", server_id=placed.server.server_id)
        for call in (
            stub.RegisterServer(router_pb2.RegisterServerRequest(server=at_its_address)),
            stub.RegisterServer(router_pb2.RegisterServerRequest(server=elsewhere)),
            stub.Heartbeat(beat),
            stub.DeregisterServer(leave),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert from_rpc_error(refused.value).reason == "ADDRESS_NOT_YOURS"
    (now,) = (await swarm.placement()).servers
    assert (now.server, now.state) == (placed.server, placed.state)


async def test_no_block_server_calls_another_one_slow(swarm: Swarm) -> None:
    (placed,) = (await swarm.placement()).servers
    word = router_pb2.ReportServerRequest(model="tiny", server_id=placed.server.server_id, slow=True)
    async with network_of(swarm, Role.BLOCK).open_channel(swarm.router_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await RouterServiceStub(channel).ReportServer(word)
        assert isinstance(from_rpc_error(refused.value), RoleDenied)
    (now,) = (await swarm.placement()).servers
    assert not now.doubted


async def test_a_library_opens_sessions_of_its_own_tenant_only(swarm: Swarm) -> None:
    caller = Caller(swarm, Role.LIBRARY, "acme")
    refused = await caller.open(secrets.token_bytes(16), "victim")
    assert isinstance(from_reason(refused.reason, refused.message, {}), RoleDenied)
    assert isinstance(await caller.open(secrets.token_bytes(16), "acme"), pb.Opened)
    caller.stream.close()


async def test_what_one_opened_another_neither_opens_nor_ends(swarm: Swarm) -> None:
    session_id = secrets.token_bytes(16)
    owner, rogue = Caller(swarm, Role.CLIENT, "1"), Caller(swarm, Role.LIBRARY, "acme")
    assert isinstance(await owner.open(session_id, "acme"), pb.Opened)
    refused = await rogue.open(session_id, "acme", epoch=9)
    assert refused.reason == HopSessionLost.reason
    held = held_by(swarm)[session_id]
    rogue.stream.send(pb.Truncate(session_id=session_id, epoch=1, position=0, idle=True))
    rogue.stream.send(pb.Close(session_id=session_id, epoch=9))
    # An answer: the frames before it have been handled.
    assert isinstance(await rogue.open(secrets.token_bytes(16), "acme"), pb.Opened)
    assert held_by(swarm)[session_id] == held
    # Another client service goes on with it, as after the end of the first.
    assert isinstance(await Caller(swarm, Role.CLIENT, "2").open(session_id, "acme", epoch=2), pb.Opened)
    owner.stream.send(pb.Close(session_id=session_id, epoch=2))
    await until(lambda: session_id not in held_by(swarm))
    for caller in (owner, rogue):
        caller.stream.close()


async def test_nobody_takes_the_client_id_of_another(swarm: Swarm) -> None:
    client_id = secrets.token_bytes(16)
    client = Caller(swarm, Role.CLIENT, "1", client_id)
    await client.answer(pb.Welcome)
    rogue = Caller(swarm, Role.LIBRARY, "acme", client_id)
    assert isinstance(await rogue.fate(), RoleDenied)
    assert await client.fate(SOON_S) is None
    client.stream.close()


async def test_nobody_goes_on_with_the_stream_of_another(swarm: Swarm) -> None:
    client_id, stream_id = secrets.token_bytes(16), secrets.token_bytes(16)
    client = Caller(swarm, Role.CLIENT, "1", client_id, stream_id)
    await client.answer(pb.Welcome)
    others = [(Role.CLIENT, "1", None), (Role.CLIENT, "2", None), (Role.LIBRARY, "acme", None), (Role.BLOCK, "1", b"")]
    for role, name, other_id in others:
        assert isinstance(await Caller(swarm, role, name, other_id, stream_id).fate(), RoleDenied)
    assert isinstance(await Caller(swarm, Role.CLIENT, "1", client_id, b"short").fate(), MalformedMessage)
    # Callers of an earlier version say goodbye like this.
    client.stream.send(pb.GoAway())
    session_id = secrets.token_bytes(16)
    assert isinstance(await client.open(session_id, "acme"), pb.Opened)
    again = Caller(swarm, Role.CLIENT, "1", client_id, stream_id)
    await again.answer(pb.Welcome)
    client.stream.send(pb.GoAway(is_last=True))
    assert await client.answer(pb.GoAway) == pb.GoAway(is_last=True)
    client.stream.close()
    await client.fate()
    # The session has not ended with the connection that it was opened on.
    assert (await again.open(session_id, "acme")).reason == "STALE_EPOCH"
    # The stream has no third connection to go on with, so this frame makes no sense.
    again.stream.send(pb.GoAway(is_last=True))
    assert isinstance(await again.fate(), MalformedMessage)


async def test_no_block_server_speaks_as_a_client_and_no_client_as_a_block_server(swarm: Swarm) -> None:
    assert isinstance(await Caller(swarm, Role.BLOCK, "1", secrets.token_bytes(16)).fate(), RoleDenied)
    assert isinstance(await Caller(swarm, Role.CLIENT, "1", b"").fate(), RoleDenied)


async def test_the_swarm_answers_all_the_while(swarm: Swarm) -> None:
    async with swarm.connect() as client:
        assert len((await client.generate([1, 2, 3], max_tokens=4)).token_ids) == 4


async def test_who_asks_for_a_placement_learns_of_adapters_what_is_for_them(swarm: Swarm) -> None:
    def adapter(name: str, *tenants: str) -> router_pb2.RegisteredAdapter:
        version = common_pb2.AdapterVersion(name=name, digest="0" * 64)
        return router_pb2.RegisteredAdapter(version=version, source="/files", revision="main", tenants=tenants)

    async def seen(role: Role, name: str = "rogue") -> router_pb2.Placement:
        async with network_of(swarm, role, name).open_channel(swarm.router_address) as channel:
            stub = RouterServiceStub(channel)
            placement = await stub.GetPlacement(router_pb2.GetPlacementRequest(model="tiny"))
            if role in (Role.CLIENT, Role.LIBRARY):
                async for pushed in stub.WatchPlacement(router_pb2.WatchPlacementRequest(model="tiny")):
                    assert pushed.adapters == placement.adapters
                    assert pushed.removed_adapters == placement.removed_adapters
                    break
            return placement

    registered = [adapter("all"), adapter("one", "acme"), adapter("two", "acme", "other")]
    async with network_of(swarm, Role.OPERATOR).open_channel(swarm.router_address) as channel:
        stub = RouterServiceStub(channel)
        for each in (*registered, adapter("gone", "acme")):
            await stub.AddAdapter(router_pb2.AddAdapterRequest(model="tiny", adapter=each))
        await stub.RemoveAdapter(router_pb2.RemoveAdapterRequest(model="tiny", name="gone"))
    for role in (Role.OPERATOR, Role.BLOCK):
        assert list((await seen(role)).adapters) == registered
    client = await seen(Role.CLIENT)
    assert [(each.version.name, each.source, each.revision, list(each.tenants)) for each in client.adapters] == [
        ("all", "", "", []), ("one", "", "", ["acme"]), ("two", "", "", ["acme", "other"]),
    ]  # fmt: skip
    assert [each.name for each in client.removed_adapters] == ["gone"]
    for tenant, names in (("acme", ["all", "one", "two"]), ("other", ["all", "two"]), ("mallory", ["all"])):
        library = await seen(Role.LIBRARY, tenant)
        assert [each.version.name for each in library.adapters] == names
        assert not library.removed_adapters
        assert not any(each.source or each.revision or each.tenants for each in library.adapters)
