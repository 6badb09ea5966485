"""Asks real processes for every method between services, and sends every kind of frame, as each role and as strangers.

As a program it runs where only Corolla is installed, by `python - PLACES FOLDER < identity_matrix.py`: both are as
`Places` and `issue` make them, the first in JSON. It prints the outcomes of each asker as JSON.
"""

import asyncio
import json
import secrets
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, cast

import grpc
from google.protobuf.message import Message

from corolla.chassis.errors import CorollaError, DeadlineExceeded, RoleDenied, RouterUnavailable
from corolla.chassis.status import from_rpc_error
from corolla.trust.authorisation import FRAMES, METHODS
from corolla.trust.authority import Authority
from corolla.trust.credentials import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE
from corolla.trust.workload import Role, Workload
from corolla.v1 import admin_pb2, router_pb2
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Frame
from corolla.wire.stream import StreamEnd, connect, tolerate_silence

SOON_S: Final = 0.3
LATE_S: Final = 30.0

TAKEN: Final = "taken"
DENIED: Final = RoleDenied.reason
UNREACHED: Final = "no handshake"

ROGUE: Final = "rogue"
"""The name of each asker's workload."""

# The request of a drain makes no sense: an asker who may drain learns that, and the server stays.
_REQUESTS: Final = {"AdminService/Drain": b"\xff"}
_SERVICES: Final = [each for file in (router_pb2, pb, admin_pb2) for each in file.DESCRIPTOR.services_by_name.values()]


class _UnknownRole(Enum):
    PILOT = "pilot"


@dataclass(frozen=True, slots=True)
class Asker:
    """Somebody. `role` is what it may ask for, if that is anything; a folder of its name holds what it shows."""

    name: str
    role: Role | None = None
    has_handshake: bool = True

    @property
    def expected(self) -> dict[str, str]:
        """What the table says of each method and kind of frame."""
        rows = {**METHODS, **{_row(kind): roles for kind, roles in FRAMES.items()}}
        refusal = DENIED if self.has_handshake else UNREACHED
        return {name: TAKEN if self.role in roles else refusal for name, roles in rows.items()}


ASKERS: Final = (
    *(Asker(role.value, role) for role in Role),
    Asker("of-another-trust-domain"),
    Asker("of-an-unknown-role"),
    Asker("of-a-foreign-authority", has_handshake=False),
    Asker("without-a-certificate", has_handshake=False),
    Asker("in-the-clear", has_handshake=False),
)


@dataclass(frozen=True, slots=True)
class Places:
    """Where to ask.

    Attributes:
        services: host:port of each service by its name; those that are not named are not asked.
        streams: host:port of a block server's data plane.
        fingerprint: of what it computes.
    """

    services: Mapping[str, str]
    streams: str
    fingerprint: str

    @property
    def as_json(self) -> str:
        return json.dumps(asdict(self))


def issue(folder: Path, authority: Authority, trust_domain: str) -> None:
    """Writes the certificates that each asker shows; an asker without any, not even an authority's, has no folder."""
    for asker in ASKERS:
        own = folder / asker.name
        domain = "elsewhere" if asker.name == "of-another-trust-domain" else trust_domain
        role = cast(Role, _UnknownRole.PILOT) if asker.name == "of-an-unknown-role" else asker.role or Role.CLIENT
        signer = Authority() if asker.name == "of-a-foreign-authority" else authority
        if asker.name != "in-the-clear":
            signer.issue(own, Workload(domain, role, ROGUE), [])
            (own / AUTHORITY_FILE).write_bytes(authority.certificate_pem)
        if asker.name == "without-a-certificate":
            for name in (CERTIFICATE_FILE, KEY_FILE):
                (own / name).unlink()


async def outcomes(places: Places, asker: Asker, folder: Path) -> dict[str, str]:
    """What came of each method and of each kind of frame, all at a time; `folder` is the one of all askers."""
    own = folder / asker.name
    own_files = own if own.exists() else None
    found = await asyncio.gather(
        *(_ask_service(places, service, own_files) for service in _SERVICES if service.name in places.services),
        *(_send(places, kind, asker.role, own_files) for kind in FRAMES),
    )
    return {name: outcome for part in found for name, outcome in part.items()}


def _row(kind: type[Message]) -> str:
    return f"frame {kind.DESCRIPTOR.name}"


def _outcome(error: CorollaError | None) -> str:
    match error:
        case RoleDenied():
            return DENIED
        case RouterUnavailable() | DeadlineExceeded():
            return UNREACHED
        case _:
            return TAKEN


async def _ask_service(places: Places, service: Any, folder: Path | None) -> dict[str, str]:
    async with _tunnel(places.services[service.name], folder) as address, grpc.aio.insecure_channel(address) as channel:
        found = await asyncio.gather(*(_ask(channel, service, method) for method in service.methods))
    return dict(zip((f"{service.name}/{method.name}" for method in service.methods), found, strict=True))


@asynccontextmanager
async def _tunnel(address: str, folder: Path | None) -> AsyncIterator[str]:
    """Where what is said in the clear goes on to `address` over TLS. gRPC's own would ask for the name of a pod."""
    if folder is None:
        yield address
        return
    host, _, port = address.rpartition(":")
    context = _context(folder)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(host, int(port), ssl=context)
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        writer.close()

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    async with server:
        yield "{}:{}".format(*server.sockets[0].getsockname())


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    writer.close()


async def _ask(channel: grpc.aio.Channel, service: Any, method: Any) -> str:
    path, request = f"/{service.full_name}/{method.name}", _REQUESTS.get(f"{service.name}/{method.name}", b"")
    try:
        if method.server_streaming:
            watch: Any = channel.unary_stream(path)
            watching = watch(request, timeout=LATE_S)
            await watching.read()
            watching.cancel()
        else:
            call: Any = channel.unary_unary(path)
            await call(request, timeout=LATE_S)
    except grpc.RpcError as failure:
        return _outcome(from_rpc_error(failure))
    return TAKEN


class _Trust:
    """A `StreamTrust` that shows what no `Credentials` would take, and admits anybody."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.credentials = self
        self.certificate = b""
        self._context = context

    def for_connections(self) -> ssl.SSLContext:
        return self._context

    def peer_validity(self, _: object) -> Callable[[], bool]:
        return lambda: True

    def admits(self, _: object) -> bool:
        return True


async def _send(places: Places, kind: type[Message], role: Role | None, folder: Path | None) -> dict[str, str]:
    """Says hello as its role does, and sends an empty frame."""
    welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def receive(frame: Frame) -> None:
        if isinstance(frame.control, pb.Welcome) and not welcomed.done():
            welcomed.set_result(None)

    trust: Any = None
    if folder is not None:
        trust = _Trust(_context(folder))
    stream = connect(places.streams, lambda _: receive, trust=trust)
    client_id = b"" if role is Role.BLOCK else secrets.token_bytes(16)
    stream.send(pb.Hello(client_id=client_id, fingerprint=places.fingerprint))
    if kind is not pb.Hello:
        stream.send(kind())
    either: set[asyncio.Future[Any]] = {welcomed, stream.ended}
    await asyncio.wait(either, timeout=LATE_S, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait({stream.ended}, timeout=SOON_S)
    end: StreamEnd | None = stream.ended.result() if stream.ended.done() else None
    stream.close()
    if end is not None and end.error is not None:
        return {_row(kind): _outcome(end.error)}
    return {_row(kind): TAKEN if welcomed.done() else UNREACHED}


def _context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(folder / AUTHORITY_FILE)
    if (folder / CERTIFICATE_FILE).exists():
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
    return context


async def _all_outcomes(places: Places, folder: Path) -> dict[str, dict[str, str]]:
    return {asker.name: await outcomes(places, asker, folder) for asker in ASKERS}


if __name__ == "__main__":
    # A busy machine is late, too.
    tolerate_silence(LATE_S)
    given = Places(**json.loads(sys.argv[1]))
    json.dump(asyncio.run(_all_outcomes(given, Path(sys.argv[2]))), sys.stdout)
