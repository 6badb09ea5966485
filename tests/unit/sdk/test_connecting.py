"""Connections that take their time to come about: the service is far away, or its machine is busy."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from corolla import AsyncClient, Client
from tests.generation_server import GenerationServer

# A service on the other side of the world answers the greeting after half a second, a busy one after several.
GREETING_S = 1.5


@contextlib.contextmanager
def slow_listener(address: str) -> Iterator[str]:
    """An address at which connections are taken at once, and carried on to `address` only after a while."""
    host, _, port = address.rpartition(":")

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError), source, sink:
            while data := source.recv(1 << 16):
                sink.sendall(data)

    def lead_on(near: socket.socket) -> None:
        time.sleep(GREETING_S)
        far = socket.create_connection((host, int(port)))
        for ends in ((near, far), (far, near)):
            threading.Thread(target=carry, args=ends, daemon=True).start()

    def take_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=lead_on, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=take_all, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_service_may_take_its_time_to_greet(server: GenerationServer) -> None:
    with slow_listener(server.address) as address, Client(address) as client:
        assert client.generate("one two").text == "one two"


async def test_a_service_may_take_its_time_to_greet_the_asyncio_client(server: GenerationServer) -> None:
    with slow_listener(server.address) as address:
        async with AsyncClient(address) as client:
            assert (await client.generate("one two")).text == "one two"
