"""A running stack as benchmarks see it: answers with their timings, and processor time."""

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import psutil

from benchmarks.timing import Timing
from corolla.chassis.loop_thread import LoopThread
from corolla.local.options import StackOptions
from corolla.local.stack import Stack
from corolla.sdk.async_client import AsyncClient
from corolla.v1 import blocks_pb2, blocks_pb2_grpc


class Chain:
    """Router, block servers and client service as processes on this machine.

    Args:
        model: checkpoint folder, GGUF file, hub id or demo.
        num_servers: hops, with even parts of the model.
        num_threads: torch threads of each process.
        environment: settings of all processes.
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
    ) -> None:
        self._exits = ExitStack()
        logs = Path(self._exits.enter_context(tempfile.TemporaryDirectory()))
        self._stack = Stack(
            StackOptions(
                # What they are measured against shows no certificates.
                is_secure=False,
                model=str(model), num_servers=num_servers, blocks=blocks, dtype=dtype, quantization=quantization,
                num_threads=num_threads, log_folder=logs, environment=environment or {},
                device=(environment or {}).get("COROLLA_DEVICE", "cpu"),
            )
        )  # fmt: skip
        self._thread: LoopThread
        self._client: AsyncClient | None = None

    def __enter__(self) -> Self:
        self._exits.enter_context(self._stack)
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
    def client(self) -> AsyncClient:
        if self._client is None:
            raise RuntimeError("the chain has not been started")
        return self._client

    def run(self, work: Any) -> Any:
        """Waits for a coroutine that uses `client`."""
        return self._thread.call(work)

    def answer(self, prompt_ids: Sequence[int], num_tokens: int) -> Timing:
        timing: Timing = self.run(self.timed(prompt_ids, num_tokens))
        return timing

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Timing]:
        """All at once."""

        async def ask() -> list[Timing]:
            return list(await asyncio.gather(*(self.timed(prompt, num_tokens) for prompt in prompts)))

        timings: list[Timing] = self.run(ask())
        return timings

    async def timed(self, prompt_ids: Sequence[int], num_tokens: int) -> Timing:
        """One answer of exactly so many tokens."""
        started_s = time.perf_counter()
        stamps: list[float] = []
        stream = self.client.stream(list(prompt_ids), max_tokens=num_tokens, ignore_eos=True)
        async for chunk in stream:
            stamps += [time.perf_counter()] * len(chunk.token_ids)
        return Timing(started_s, tuple(stamps))

    def cpu_s(self) -> float:
        """Processor time of all processes so far."""
        return sum(self.cpu_by_process().values())

    def cpu_by_process(self) -> dict[str, float]:
        """Seconds of processor time so far, to the microsecond: the usual counters tick in hundredths."""
        # Linux's number for the processor clock of another process, as clock_getcpuclockid(3) makes it.
        return {name: time.clock_gettime((~process.pid << 3) | 2) for name, process in self._processes().items()}

    def server_statuses(self) -> list[blocks_pb2.BlockServerStatus]:
        statuses = []
        for process in self._stack.servers:
            with grpc.insecure_channel(process.rpc_address) as channel:
                stub = blocks_pb2_grpc.BlockServiceStub(channel)
                statuses.append(stub.GetStatus(blocks_pb2.GetBlockServerStatusRequest()))
        return statuses

    def _processes(self) -> dict[str, psutil.Process]:
        pids = {process.name: self._stack.pid(process.name) for process in self._stack.processes}
        return {name: psutil.Process(pid) for name, pid in pids.items() if pid is not None}

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _connect(self) -> AsyncClient:
        return AsyncClient(self.client_address)
