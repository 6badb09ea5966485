"""A TCP relay that holds back every byte for a while: a distant link on one machine.

    python -m benchmarks.relay 127.0.0.2:50100=127.0.0.1:50100 ...

Each argument is a place to listen and where to pass on. A number on standard input is the delay from then on, in
milliseconds, in either direction; the relay says "ready" when it listens, and "set" after each change. It ends with its
standard input.
"""

import asyncio
import contextlib
import sys


class Relay:
    """One delay for all its links."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self._links: set[asyncio.Task[None]] = set()

    async def listen(self, listen_at: str, pass_to: str) -> None:
        host, _, port = listen_at.rpartition(":")

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onward_host, _, onward_port = pass_to.rpartition(":")
            try:
                onward = await asyncio.open_connection(onward_host, int(onward_port))
            except OSError:
                writer.close()
                return
            for source, target in ((reader, onward[1]), (onward[0], writer)):
                link = asyncio.create_task(self._pump(source, target))
                self._links.add(link)
                link.add_done_callback(self._links.discard)

        await asyncio.start_server(accept, host, int(port))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """What comes close together is also sent close together: bytes wait beside each other, not in a row."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due_s, data = await waiting.get()
                if (wait_s := due_s - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                if not data:
                    target.close()
                    return
                target.write(data)
                await target.drain()

        with contextlib.suppress(ConnectionError):
            async with asyncio.TaskGroup() as group:
                group.create_task(send())
                data = b"-"
                while data:
                    data = await source.read(1 << 16)
                    waiting.put_nowait((loop.time() + self.delay_s, data))


async def main(links: list[str]) -> None:
    relay = Relay()
    for link in links:
        listen_at, _, pass_to = link.partition("=")
        await relay.listen(listen_at, pass_to)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        relay.delay_s = float(line) / 1000
        print("set", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
