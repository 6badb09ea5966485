"""One end of a transfer of weights, for `benchmarks.peer_weights`: the product's, or a bare copy.

    python -m benchmarks.peer_weights_process serve MANIFEST FOLDER CERTIFICATES [computing]
    python -m benchmarks.peer_weights_process fetch MANIFEST FOLDER CERTIFICATES MIB FINGERPRINT ADDRESS...
    python -m benchmarks.peer_weights_process send FILE CERTIFICATES
    python -m benchmarks.peer_weights_process receive FILE CERTIFICATES ADDRESS

`serve` sends as a server that computes, if it is told so. `serve` and `send` print their port, `fetch` and `receive`
the bytes and the seconds of a transfer. A bare copy reads, encrypts, decrypts, hashes and writes pieces of 1 MiB one
after the other, in one thread at each end. `fetch` fetches the first MIB of each file, again and again while its
standard input is open.
"""

import asyncio
import hashlib
import os
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import uvloop

from corolla.block_server.part_fetcher import PartFetcher
from corolla.block_server.part_sender import PartSender
from corolla.block_server.peers import Peer
from corolla.chassis.tasks import TaskGroup
from corolla.models.model_manifest import PART_BYTES, ModelManifest
from corolla.models.shared_files import SharedFiles
from corolla.trust.credentials import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import router_pb2
from corolla.wire.frames import Frame
from corolla.wire.network import Network
from corolla.wire.stream import Receiver, Stream

_HERE: Final = "127.0.0.1"


async def _serve(files: SharedFiles, digest: bytes, certificates: Path, computing: str = "") -> None:
    network, sender = Network.from_folder(certificates), PartSender(files, digest, TaskGroup(), lambda: bool(computing))

    def accept(stream: Stream) -> Receiver:
        peer = Peer(b"", stream)

        def receive(frame: Frame) -> None:
            if isinstance(frame.control, pb.Fetch):
                sender.ask(frame.control, peer)
            else:
                stream.send(pb.Welcome())

        return receive

    listener = network.listen(_HERE, 0)
    await listener.start(accept, trust=network.callers)
    print(listener.port, flush=True)
    await asyncio.Event().wait()


async def _fetch(
    content: bytes, folder: Path, certificates: Path, num_mib: str, fingerprint: str, *addresses: str
) -> None:
    network, parsed = Network.from_folder(certificates), ModelManifest.parse(content)
    servers = [
        router_pb2.PlacedServer(
            server=router_pb2.ServerDescription(address=address, fingerprint=fingerprint),
            state=router_pb2.SERVER_STATE_READY,
        )
        for address in addresses
    ]

    async def find_peers() -> Sequence[router_pb2.PlacedServer]:
        return servers

    fetcher = PartFetcher(hashlib.sha256(content).digest(), find_peers, network.connect)

    def fetch_all() -> float:
        files = SharedFiles(parsed, content, folder, fetcher.get)
        files.fetch_heads()
        began_s = time.perf_counter()
        files.fetch(wanted)
        return time.perf_counter() - began_s

    wanted = [(folder / each.name, 0, min(each.num_bytes, int(num_mib) << 20)) for each in parsed.files]
    num_bytes = sum(length for _, _, length in wanted)
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    while True:
        seconds = await asyncio.to_thread(fetch_all)
        shutil.rmtree(folder)
        print(num_bytes, seconds, flush=True)
        if ended.done():
            return


def _send(file: str, certificates: str) -> None:
    context = _context(ssl.PROTOCOL_TLS_SERVER, Path(certificates))
    with socket.create_server((_HERE, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        caller, _ = listener.accept()
        with context.wrap_socket(caller, server_side=True) as encrypted, Path(file).open("rb", buffering=0) as source:
            piece = memoryview(bytearray(PART_BYTES))
            while num_bytes := source.readinto(piece):
                encrypted.sendall(piece[:num_bytes])


def _receive(file: str, certificates: str, address: str) -> None:
    context = _context(ssl.PROTOCOL_TLS_CLIENT, Path(certificates))
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain) as encrypted:
        piece, total, began_s = memoryview(bytearray(PART_BYTES)), 0, time.perf_counter()
        with Path(file).open("wb", buffering=0) as made:
            while num_bytes := _filled(encrypted, piece):
                hashlib.sha256(piece[:num_bytes]).digest()
                made.write(piece[:num_bytes])
                total += num_bytes
        print(total, time.perf_counter() - began_s, flush=True)
    os.unlink(file)


def _filled(encrypted: ssl.SSLSocket, piece: memoryview) -> int:
    num_bytes = 0
    while num_bytes < len(piece) and (more := encrypted.recv_into(piece[num_bytes:])):
        num_bytes += more
    return num_bytes


def _context(protocol: int, certificates: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.load_verify_locations(certificates / AUTHORITY_FILE)
    context.load_cert_chain(certificates / CERTIFICATE_FILE, certificates / KEY_FILE)
    return context


def main(what: str, *arguments: str) -> None:
    apart: dict[str, Callable[..., None]] = {"send": _send, "receive": _receive}
    if what in apart:
        apart[what](*arguments)
        return
    manifest, folder, certificates, *others = arguments
    content = Path(manifest).read_bytes()
    if what == "serve":
        files = SharedFiles(ModelManifest.parse(content), content, Path(folder))
        uvloop.run(_serve(files, hashlib.sha256(content).digest(), Path(certificates), *others))
    else:
        uvloop.run(_fetch(content, Path(folder), Path(certificates), *others))


if __name__ == "__main__":
    main(*sys.argv[1:])
