"""A stack of real processes in which things can be broken and restored."""

import asyncio
import contextlib
import queue
import random
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc

from corolla.local.log_files import LogFile
from corolla.local.options import StackOptions
from corolla.local.ports import Ports
from corolla.local.processes import ManagedProcess, client_process
from corolla.local.readiness import knows_a_chain
from corolla.local.stack import Stack
from corolla.local.supervisor import StackEvent
from corolla.sdk.async_client import AsyncClient
from corolla.v1 import blocks_pb2, blocks_pb2_grpc, router_pb2
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.waiting import until

NUM_BLOCKS = 6
TINY_SPANS = "0:3,0:3,3:6,3:6"
_SECOND_CLIENT = "client-2"
_RECOVERY_TIMEOUT_S = 60.0
# In turn, of a server that is slowed down.
_STOPPED_S = 0.05
_RUNNING_S = 0.002
_WORDS = (
    "the", "thin", "man", "in", "inner", "tent", "then", "an", "anthem", "on", "either", "hand", "another", "other",
)  # fmt: skip


class RunningStack:
    """Each span of the model twice, and one client service; rows may add another.

    Attributes:
        outage_s: how long that stays away which is to come back.
        context: how many tokens the prompts of some rows have; 0: a few words.
    """

    def __init__(
        self,
        local: Stack,
        client: AsyncClient,
        ends: "queue.SimpleQueue[StackEvent]",
        outage_s: float,
        context: int = 0,
    ) -> None:
        self.local = local
        self.outage_s = outage_s
        self.context = context
        self.client = client
        self._ends = ends
        self.spans = sorted({server.blocks for server in self.servers}, key=lambda span: int(span.partition(":")[0]))
        self._service = self.process("client")

    @property
    def servers(self) -> tuple[ManagedProcess, ...]:
        return self.local.servers

    @property
    def service(self) -> ManagedProcess:
        """The client service."""
        return self._service

    def process(self, name: str) -> ManagedProcess:
        return next(process for process in self.local.processes if process.name == name)

    async def add_service(self) -> ManagedProcess:
        """The second client service, ready. The first call starts it."""
        if running := [process for process in self.local.processes if process.name == _SECOND_CLIENT]:
            return running[0]
        ports, options = Ports(), self.local.options
        process = client_process(options, ports.free(), ports.free(), ports.free())
        process = replace(process, name=_SECOND_CLIENT, log=LogFile(options.log_folder / f"{_SECOND_CLIENT}.log"))
        self.local.launch(process)
        await self.until_serving(process)
        return process

    async def until_serving(self, process: ManagedProcess) -> None:
        """Until the process is ready; a client service also knows a chain."""

        async def serves() -> bool:
            if not await asyncio.to_thread(self.local.is_serving, process.name):
                return False
            return not process.name.startswith("client") or await asyncio.to_thread(knows_a_chain, process.address)

        await until(serves, _RECOVERY_TIMEOUT_S)

    async def until_started(self, process: ManagedProcess) -> None:
        await until(lambda: self.local.pid(process.name) is not None, _RECOVERY_TIMEOUT_S)

    async def until_gone(self, process: ManagedProcess) -> None:
        await until(lambda: self.local.pid(process.name) is None, _RECOVERY_TIMEOUT_S)

    async def status(self, server: ManagedProcess) -> blocks_pb2.BlockServerStatus:
        async with self.local.operator.open_channel(server.rpc_address) as channel:
            stub = blocks_pb2_grpc.BlockServiceStub(channel)
            return await stub.GetStatus(blocks_pb2.GetBlockServerStatusRequest(), timeout=5, wait_for_ready=True)

    async def busiest(self, span: str) -> ManagedProcess:
        """The server with most sessions in mid-answer among those of a span."""
        replicas = [server for server in self.servers if server.blocks == span]
        statuses = await asyncio.gather(*map(self.status, replicas))
        return max(zip(statuses, replicas, strict=True), key=lambda pair: pair[0].num_running_sessions)[1]

    def kill(self, server: ManagedProcess, number: int = signal.SIGKILL) -> None:
        self.local.kill(server.name, number)

    @contextmanager
    def slowed(self, server: ManagedProcess) -> Iterator[None]:
        """Lets a server run a little at a time. It is stopped at the end, to be killed or to go on."""
        is_over = threading.Event()

        def slow_down() -> None:
            while True:
                self.kill(server, signal.SIGSTOP)
                if is_over.wait(_STOPPED_S):
                    return
                self.kill(server, signal.SIGCONT)
                is_over.wait(_RUNNING_S)

        # A thread of its own: the loop that listens to answers may be behind.
        slowing = threading.Thread(target=slow_down)
        slowing.start()
        try:
            yield
        finally:
            is_over.set()
            slowing.join()

    async def end(self, server: ManagedProcess, number: int = signal.SIGTERM) -> tuple[str, float]:
        """Asks a server to end. Returns how it did, in words, and after how many seconds."""
        self.forget_ends()
        started_s = time.monotonic()
        self.kill(server, number)
        return await self.next_end(), time.monotonic() - started_s

    def forget_ends(self) -> None:
        """Makes `next_end` ignore processes that have ended so far."""
        while not self._ends.empty():
            self._ends.get()

    async def next_end(self) -> str:
        """How the next process ends, in words."""
        event = await asyncio.to_thread(self._ends.get, True, _RECOVERY_TIMEOUT_S)
        return event.text.partition(") ")[2]

    async def metric(self, name: str, **labels: str) -> float:
        """A counter or gauge of the client service."""
        return await sample(self._service.metrics_port, name, **labels)

    async def restart(self, *servers: ManagedProcess, is_idle: bool = True) -> None:
        """Starts servers again that have ended, and waits until all is as it was.

        Args:
            is_idle: whether that includes that no server holds a session.
        """
        await asyncio.gather(*map(self.until_gone, servers))
        for server in servers:
            self.local.launch(server)
        await self.until_whole(is_idle=is_idle)

    async def until_whole(self, *, is_idle: bool = True) -> None:
        """Until the router knows every server as ready and suspects none, and no server holds a session."""
        give_up_s = time.monotonic() + _RECOVERY_TIMEOUT_S
        while not (await asyncio.to_thread(self._is_placed) and (not is_idle or await self.is_empty())):
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"the stack did not recover: {await self._state()}")
            await asyncio.sleep(0.1)

    async def _state(self) -> str:
        placement = await asyncio.to_thread(self.local.placement)
        placed = placement.servers if placement else ()
        parts = [f"{each.server.address} state {each.state} suspected {each.suspected}" for each in placed]
        for server in self.servers:
            with contextlib.suppress(grpc.aio.AioRpcError):
                status = await self.status(server)
                num_used = status.num_pages - status.num_free_pages
                parts.append(f"{server.address} holds {status.num_sessions} sessions and {num_used} pages")
        return "; ".join(parts)

    async def is_empty(self) -> bool:
        """Whether all servers answer, and none holds a session or a page."""
        try:
            statuses = await asyncio.gather(*map(self.status, self.servers))
        except grpc.aio.AioRpcError:
            return False
        return all(each.num_sessions == 0 and each.num_free_pages == each.num_pages for each in statuses)

    def _is_placed(self) -> bool:
        placement = self.local.placement()
        if placement is None:
            return False
        ready = {
            each.server.address
            for each in placement.servers
            if each.state == router_pb2.SERVER_STATE_READY and not each.suspected
        }
        return ready == {server.address for server in self.servers}


@asynccontextmanager
async def start_stack(
    model: str,
    spans: str,
    environment: Mapping[str, str] | None = None,
    *,
    outage_s: float = 60.0,
    context: int = 0,
    is_secure: bool = True,
    is_shared: bool = False,
) -> AsyncIterator[RunningStack]:
    """A stack that is ready; "tiny" is a random model of six blocks. Other machines may join it if `is_shared`."""
    with tempfile.TemporaryDirectory(prefix="corolla-faults-") as name:
        folder = Path(name)
        if model == "tiny":
            changes = {"max_position_embeddings": 8192}
            model = str(make_tiny_checkpoint("llama", folder / "tiny", num_blocks=NUM_BLOCKS, config_changes=changes))
        options = StackOptions(
            model=model, blocks=spans, log_folder=folder / "logs", restarts=False,
            is_secure=is_secure,
            shared_host="127.0.0.1" if is_shared else "", state_folder=folder / "state" if is_shared else None,
            # A stack in a terminal ends at once; what is proved here are the times of a cluster.
            environment={"COROLLA_GRACE_S": "25", **(environment or {})},
        )  # fmt: skip
        ends: queue.SimpleQueue[StackEvent] = queue.SimpleQueue()
        local = Stack(options)
        await asyncio.to_thread(local.start, lambda event: ends.put(event) if event.kind == "problem" else None)
        try:
            async with AsyncClient(local.client_address) as client:
                stack = RunningStack(local, client, ends, outage_s, context)
                await stack.until_whole()
                yield stack
        finally:
            await asyncio.to_thread(local.stop)


def shuffled_words(rng: random.Random, num_words: int) -> str:
    """A text that no other request has."""
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))
