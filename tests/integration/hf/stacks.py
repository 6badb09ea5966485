"""Whole stacks in another process, and the sessions and pages left in them."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from corolla.v1 import blocks_pb2, blocks_pb2_grpc
from tests.architecture.sources import ROOT


@dataclass(frozen=True)
class Stack:
    """A running stack."""

    router: str
    servers: list[str]
    clients: list[str]

    def statuses(self) -> list[blocks_pb2.BlockServerStatus]:
        """The sessions and pages of each block server."""
        statuses = []
        for address in self.servers:
            with grpc.insecure_channel(address) as channel:
                stub = blocks_pb2_grpc.BlockServiceStub(channel)
                statuses.append(stub.GetStatus(blocks_pb2.GetBlockServerStatusRequest()))
        return statuses

    def until_empty(self, timeout_s: float = 30) -> None:
        """Until no block server holds a session or a page."""
        deadline = time.monotonic() + timeout_s
        while any(each.num_sessions or each.num_free_pages != each.num_pages for each in self.statuses()):
            if time.monotonic() > deadline:
                raise TimeoutError("block servers still hold sessions")
            time.sleep(0.02)


class Stacks:
    """Starts stacks, all in one process, and ends them together."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.integration.hf.stack_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=30)

    def start(self, model: Path, spans: Sequence[str], *, kv_cache_mib: int = 16, num_clients: int = 0) -> Stack:
        request = {"model": str(model), "spans": list(spans), "kv_cache_mib": kv_cache_mib, "num_clients": num_clients}
        return Stack(**self._ask(request))

    def end(self) -> None:
        """Ends all stacks that were started so far."""
        self._ask({})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer
