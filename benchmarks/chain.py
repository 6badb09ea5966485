"""A running stack as benchmarks see it: answers with their timings, and processor time."""

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc
import psutil

from benchmarks.timing import Timing
from corolla.chassis.loop_thread import LoopThread
from corolla.local.options import StackOptions
from corolla.local.ports import Ports
from corolla.local.processes import ManagedProcess, block_server_process
from corolla.local.stack import Stack
from corolla.local.supervisor import StackEvent
from corolla.sdk.async_client import AsyncClient
from corolla.trust.workload import Role
from corolla.v1 import blocks_pb2, blocks_pb2_grpc, router_pb2

_STATUS_TIMEOUT_S: Final = 10.0


class Chain:
    """Router, block servers and client service as processes on this machine.

    Args:
        model: checkpoint folder, GGUF file, hub id or demo.
        num_servers: hops, with even parts of the model.
        num_threads: torch threads of each process.
        environment: settings of all processes.
        restarts: whether a process that dies is started again.
        is_secure: whether all connections are encrypted by mutual TLS. What Corolla is measured against does not.
        logs: the folder for the log files of all processes; None: they are not kept.
        patience_s: how many seconds `run` may take; None: as long as it likes.

    Attributes:
        ready_s: how many seconds each block server took at its last start, from its process to its readiness.
    """

    def __init__(
        self,
        model: Path | str,
        num_servers: int = 2,
        *,
        num_threads: int = 1,
        dtype: str = "float32",
        quantization: str = "none",
        blocks: str = "",
        environment: Mapping[str, str] | None = None,
        restarts: bool = True,
        is_secure: bool = False,
        logs: Path | None = None,
        patience_s: float | None = None,
    ) -> None:
        self._patience_s = patience_s
        self.ready_s: dict[str, float] = {}
        self._launched_s: dict[str, float] = {}
        self._exits = ExitStack()
        logs = logs or Path(self._exits.enter_context(tempfile.TemporaryDirectory()))
        self._stack = Stack(
            StackOptions(
                is_secure=is_secure,
                model=str(model), num_servers=num_servers, blocks=blocks, dtype=dtype, quantization=quantization,
                num_threads=num_threads, log_folder=logs, environment=environment or {}, restarts=restarts,
                device=(environment or {}).get("COROLLA_DEVICE", "cpu"),
            )
        )  # fmt: skip
        self._thread: LoopThread
        self._client: AsyncClient | None = None

    def __enter__(self) -> Self:
        try:
            self._stack.start(self._note)
        except BaseException:
            self._exits.close()
            raise
        self._exits.callback(self._stack.stop)
        # In a thread of its own: pings must be answered while this process computes, or the connection is given up.
        self._thread = LoopThread("client")
        self._exits.callback(lambda: self._thread.stop(self._close))
        self._client = self.run(self._connect())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.close()

    @property
    def client_address(self) -> str:
        """`host:port` of the client service."""
        return self._stack.client_address

    @property
    def http_url(self) -> str:
        """Where the client service answers over HTTP, without the version."""
        return f"http://{self._stack.http_address}"

    @property
    def client(self) -> AsyncClient:
        if self._client is None:
            raise RuntimeError("the chain has not been started")
        return self._client

    def run(self, work: Any) -> Any:
        """Waits for a coroutine that uses `client`. TimeoutError after `patience_s` seconds."""
        return self._thread.call(asyncio.wait_for(work, self._patience_s))

    def answer(self, prompt_ids: Sequence[int], num_tokens: int) -> Timing:
        timing: Timing = self.run(self.timed(prompt_ids, num_tokens))
        return timing

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int, **options: Any) -> list[Timing]:
        """All at once. The options are those of `generate`."""

        async def ask() -> list[Timing]:
            return list(await asyncio.gather(*(self.timed(prompt, num_tokens, **options) for prompt in prompts)))

        timings: list[Timing] = self.run(ask())
        return timings

    async def timed(
        self, prompt_ids: Sequence[int], num_tokens: int, stamps: list[float] | None = None, **options: Any
    ) -> Timing:
        """One answer of exactly so many tokens.

        Args:
            stamps: gets the time of each token as soon as it comes.
        """
        started_s = time.perf_counter()
        stamps = [] if stamps is None else stamps
        token_ids: list[int] = []
        num_recoveries = 0
        async for chunk in self.client.stream(list(prompt_ids), max_tokens=num_tokens, ignore_eos=True, **options):
            stamps += [time.perf_counter()] * len(chunk.token_ids)
            token_ids += chunk.token_ids
            if chunk.usage is not None:
                num_recoveries = chunk.usage.recoveries
        return Timing(started_s, tuple(stamps), tuple(token_ids), num_recoveries)

    def cpu_s(self) -> float:
        """Processor time of all processes so far."""
        return sum(self.cpu_by_process().values())

    def cpu_by_process(self) -> dict[str, float]:
        """Seconds of processor time so far, to the microsecond: the usual counters tick in hundredths."""
        # Linux's number for the processor clock of another process, as clock_getcpuclockid(3) makes it.
        return {name: time.clock_gettime((~process.pid << 3) | 2) for name, process in self._processes().items()}

    @property
    def servers(self) -> tuple[ManagedProcess, ...]:
        """The block servers, dead ones included."""
        return self._stack.servers

    @property
    def placed(self) -> Sequence[router_pb2.ServerDescription]:
        """The block servers as the router describes them."""
        if (placement := self._stack.placement()) is None:
            raise RuntimeError("the router has sent no placement")
        return [each.server for each in placement.servers]

    def certificates(self, role: Role, name: str) -> Path:
        """A folder with a certificate of the stack, which has to be secure, for one more process."""
        return self._stack.certificates(role, name)

    def is_alive(self, server: ManagedProcess) -> bool:
        return self._stack.pid(server.name) is not None

    def stages_s(self, server: ManagedProcess) -> dict[str, float]:
        """The seconds of each stage of a block server's last start, as its log has them in JSON."""
        lines = (line for line in reversed(server.log.last_lines(1000)) if '"stages_s"' in line)
        found: dict[str, float] = json.loads(next(lines, "{}")).get("stages_s", {})
        return found

    def is_placed(self, server: ManagedProcess) -> bool:
        """Whether the router knows a block server as ready, and does not suspect it."""
        placement = self._stack.placement()
        return any(
            each.server.address == server.address and each.state == router_pb2.SERVER_STATE_READY and not each.suspected
            for each in (placement.servers if placement else ())
        )

    def kill(self, server: ManagedProcess, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a block server."""
        self._stack.kill(server.name, number)

    def launch(self, server: ManagedProcess) -> None:
        """Starts a block server that has ended."""
        self._launched_s[server.name] = time.perf_counter()
        self._stack.launch(server)

    def add_replica(self, server: ManagedProcess) -> ManagedProcess:
        """Starts one more server of a server's blocks, on its device, and waits until it is ready."""
        ports = Ports()
        self._exits.callback(ports.close)
        number = len(self.servers) + 1
        replica = block_server_process(self._stack.options, number, server.blocks, 0, ports, device=server.device)
        self.launch(replica)
        self.until_ready(replica)
        return replica

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
        """Waits until a condition holds. TimeoutError says what did not happen."""
        give_up_s = time.perf_counter() + timeout_s
        while not condition():
            if time.perf_counter() > give_up_s:
                raise TimeoutError(f"{what} did not happen within {timeout_s:.0f} s")
            time.sleep(0.01)

    def until_ready(self, server: ManagedProcess) -> None:
        """Waits until a block server that was launched serves, and the router knows it as ready."""
        self.until(lambda: self._stack.is_serving(server.name), f"the start of {server.name}")
        self.ready_s[server.name] = time.perf_counter() - self._launched_s[server.name]
        self.until(lambda: self.is_placed(server), f"the placement of {server.name}")

    def status(self, server: ManagedProcess) -> blocks_pb2.BlockServerStatus:
        with grpc.insecure_channel(server.rpc_address) as channel:
            stub = blocks_pb2_grpc.BlockServiceStub(channel)
            return stub.GetStatus(blocks_pb2.GetBlockServerStatusRequest(), timeout=_STATUS_TIMEOUT_S)

    def server_statuses(self) -> list[blocks_pb2.BlockServerStatus]:
        return [self.status(server) for server in self.servers]

    def _note(self, event: StackEvent) -> None:
        now_s = time.perf_counter()
        if event.kind == "step" and event.source.startswith("server-"):
            if event.text.startswith("starting"):
                self._launched_s[event.source] = now_s
            else:
                self.ready_s[event.source] = now_s - self._launched_s[event.source]

    def _processes(self) -> dict[str, psutil.Process]:
        pids = {process.name: self._stack.pid(process.name) for process in self._stack.processes}
        return {name: psutil.Process(pid) for name, pid in pids.items() if pid is not None}

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _connect(self) -> AsyncClient:
        return AsyncClient(self.client_address)
