"""Wires that can be cut: a relay in front of each server, which names its peers and can stop carrying bytes.

A cut wire is not closed: as on a network that loses all packets, both ends wait. Bytes sent meanwhile arrive when
the wire is restored, and must not count then.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Final

import psutil

from corolla.chassis.tasks import TaskGroup

_CHUNK_BYTES: Final = 1 << 16


class _Direction:
    """Carries bytes one way while it is whole."""

    def __init__(self) -> None:
        self.is_whole = asyncio.Event()
        self.is_whole.set()
        self.num_carried = 0


class Wires:
    """The connections that go to one server.

    Args:
        host: the address that others get for the server.
        target_host: where it is; the port is the same.

    Attributes:
        num_held: pieces that had to wait, since the last cut.
    """

    def __init__(self, host: str, target_host: str, port: int) -> None:
        self._host = host
        self._target_host = target_host
        self._port = port
        self.num_held = 0
        self._tasks = TaskGroup()
        self._server: asyncio.Server | None = None
        # The key is the process at the other end; "in" is towards the server.
        self._directions: dict[tuple[int, str], _Direction] = {}

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, self._host, self._port)

    def is_connected(self, pid: int) -> bool:
        """Whether the process has connected to the server."""
        return (pid, "in") in self._directions

    def num_carried(self, pid: int) -> int:
        """The pieces that the process has sent to the server so far."""
        direction = self._directions.get((pid, "in"))
        return 0 if direction is None else direction.num_carried

    def cut(self, pid: int, direction: str) -> None:
        """Nothing comes through any more, "in" towards the server, "out" from it, or "both".

        Raises:
            KeyError: the process is not connected.
        """
        self.num_held = 0
        for each in _DIRECTIONS[direction]:
            self._directions[pid, each].is_whole.clear()

    def restore(self) -> None:
        for direction in self._directions.values():
            direction.is_whole.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._tasks.close()

    def _direction(self, pid: int, name: str) -> _Direction:
        return self._directions.setdefault((pid, name), _Direction())

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid = await asyncio.to_thread(_owner, writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
        try:
            onward_reader, onward_writer = await asyncio.open_connection(self._target_host, self._port)
        except OSError:
            writer.close()
            return
        self._tasks.start(self._carry(reader, onward_writer, self._direction(pid, "in")), "wire in")
        self._tasks.start(self._carry(onward_reader, writer, self._direction(pid, "out")), "wire out")

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(_CHUNK_BYTES):
                    self.num_held += not direction.is_whole.is_set()
                    await direction.is_whole.wait()
                    direction.num_carried += 1
                    writer.write(data)
                    await writer.drain()
        finally:
            # An end, too, is something that has to come through.
            await direction.is_whole.wait()
            writer.close()


def _owner(local: tuple[str, int], remote: tuple[str, int]) -> int:
    """The process whose end of a connection has the local address; 0 when it is gone.

    Both addresses count: the kernel gives the same local port to connections with different remote ends, and those that
    have ended keep theirs for a while.
    """
    for connection in psutil.net_connections("tcp"):
        # An address of IPv4 may stand in the form of IPv6.
        ends = [(end.ip.rpartition(":")[2], end.port) for end in (connection.laddr, connection.raddr) if end]
        if ends == [local, remote]:
            return connection.pid or 0
    return 0


_DIRECTIONS: Final[Mapping[str, tuple[str, ...]]] = {"in": ("in",), "out": ("out",), "both": ("in", "out")}
