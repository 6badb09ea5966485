"""Accepts connections on a port, up to a number at a time."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

log = logging.getLogger(__name__)

_BACKLOG: Final = 2048
_MORE_ACCEPTS_PER_TURN: Final = 3
"""Each may begin a handshake, which costs about a millisecond, and answers wait for the turn to end."""
_REST_S: Final = 1.0
_WARNING_INTERVAL_S: Final = 60.0


@dataclass(eq=False, repr=False)
class Acceptor:
    """Accepts connections from its creation on. A connection above the limit is refused at once, and harms no other.

    Args:
        listening: A bound socket that does not block; its owner closes it after `stop`.
        max_connections: The most connections at a time, handshakes included.
        serve: Serves a connection from its handshake to its end; an OSError means that it broke.
        refuse: Closes a connection above the limit.

    Attributes:
        tasks: The tasks that serve connections now.
        accepting: The task that accepts connections.

    Raises:
        OSError: Another process listens on the port.
    """

    listening: socket.socket
    max_connections: int
    serve: Callable[[socket.socket], Coroutine[Any, Any, None]]
    refuse: Callable[[socket.socket], None] = socket.socket.close

    def __post_init__(self) -> None:
        # It listens from here on, because uvloop reports no error for a socket on which it cannot listen.
        self.listening.listen(_BACKLOG)
        self._next_warning_s = 0.0
        self.tasks: set[asyncio.Task[None]] = set()
        self.accepting = asyncio.get_running_loop().create_task(self._accept())

    def stop(self) -> None:
        """Accepts no more connections. Those that are open stay. After an earlier stop, the socket may be closed."""
        self.accepting.cancel()
        # The loop of asyncio would watch the socket's descriptor until its next turn. Once the socket is closed, that
        # number may belong to a new connection, which would break.
        if self.listening.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.listening)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._take(*await loop.sock_accept(self.listening))
                for _ in range(_MORE_ACCEPTS_PER_TURN):
                    self._take(*self.listening.accept())
            except BlockingIOError:
                pass
            except OSError as failure:
                # Most often the process has no file descriptor left.
                log.warning("cannot accept connections", extra={"reason": failure.strerror})
                await asyncio.sleep(_REST_S)
            await asyncio.sleep(0)

    def _take(self, caller: socket.socket, _address: object) -> None:
        caller.setblocking(False)
        if len(self.tasks) >= self.max_connections:
            self._warn()
            self.refuse(caller)
            return
        task = asyncio.get_running_loop().create_task(self._served(caller))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _served(self, caller: socket.socket) -> None:
        with suppress(OSError):  # a handshake that fails or takes too long is not an error of the service
            await self.serve(caller)

    def _warn(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + _WARNING_INTERVAL_S
            log.warning("refusing connections, because too many are open", extra={"connections": len(self.tasks)})
