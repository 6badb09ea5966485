"""Ports that take connections with TLS for servers that know none: the packaged Redis is built without it."""

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Final

from corolla.chassis.loop_thread import LoopThread
from corolla.trust.authority import Authority
from corolla.trust.credentials import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE
from corolla.trust.workload import Role, Workload

_HOST: Final = "127.0.0.1"
_HANDSHAKE: Final = b"\x16"
"""The first byte of a connection with TLS."""


class TlsDoors:
    """Relays on the loopback address. Connections without TLS pass as well: Redis and its Sentinels use these.

    Args:
        folder: for the certificate that connections with TLS see.

    Attributes:
        num_encrypted: for each port, the connections with TLS that have come so far.
    """

    def __init__(self, folder: Path) -> None:
        Authority().issue(folder, Workload("corolla", Role.ROUTER, "redis"), [_HOST])
        self.authority_file = folder / AUTHORITY_FILE
        self.num_encrypted: dict[int, int] = {}
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
        self._thread = LoopThread("tls doors")
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, port: int, behind: int) -> None:
        """Leads connections to `port` on to the port `behind`."""
        listener = socket.create_server((_HOST, port))
        listener.setblocking(False)
        self.num_encrypted[port] = 0
        self._thread.call(self._start(listener, behind))

    def close(self) -> None:
        async def nothing() -> None:
            pass

        self._thread.stop(nothing)

    async def _start(self, listener: socket.socket, behind: int) -> None:
        self._keep(asyncio.create_task(self._accept(listener, behind)))

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, behind: int) -> None:
        with listener:
            while True:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                self._keep(asyncio.create_task(self._relay(connection, listener.getsockname()[1], behind)))

    async def _relay(self, connection: socket.socket, port: int, behind: int) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        connection.setblocking(True)
        first = await asyncio.to_thread(connection.recv, 1, socket.MSG_PEEK)
        connection.setblocking(False)
        context = self._context if first == _HANDSHAKE else None
        # One of the two ends may be gone.
        with contextlib.suppress(OSError):
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
            self.num_encrypted[port] += context is not None
            with contextlib.closing(asyncio.StreamWriter(transport, protocol, reader, loop)) as writer:
                from_redis, to_redis = await asyncio.open_connection(_HOST, behind)
                await asyncio.gather(_pump(reader, to_redis), _pump(from_redis, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
