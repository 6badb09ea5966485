"""A chain of processes on this machine whose links are as slow as one says."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from corolla import Client
from corolla.chassis.errors import CorollaError
from corolla.chassis.processors import OPENMP_WAITING
from corolla.local.ports import Ports
from tests.embedded_redis import EmbeddedRedis

_LOOPBACK = "127.0.0.1"
# Block servers say that they live here, where only the relay does; so every byte to and from them passes through it.
_DISTANT = "127.0.0.2"
_START_TIMEOUT_S = 120.0


class DistantChain:
    """Router, block servers and a client service.

    Args:
        folder: for logs.
        model: checkpoint folder, GGUF file, hub id or demo.
        spans: `"start:end"`, one block server for each.
        settings: of all its processes, as environment variables.
    """

    client: Client

    def __init__(self, folder: Path, model: str, spans: list[str], settings: Mapping[str, str]) -> None:
        self._folder = folder
        self._model = model
        self._spans = spans
        self._settings = settings
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        redis = EmbeddedRedis.start(self._folder)
        self._stack.callback(redis.stop)
        try:
            self._start(redis.url)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def set_delay(self, delay_ms: float) -> None:
        """Holds back what crosses a link for so long, from now on."""
        self._relay_input.write(f"{delay_ms}\n")
        self._relay_input.flush()
        self._relay_output.readline()

    def _start(self, redis_url: str) -> None:
        free = Ports()
        router, *ports = (free.free() for _ in range(1 + len(self._spans)))
        relay = self._run("relay", [sys.executable, "-m", "benchmarks.relay",
                                    *(f"{_DISTANT}:{port}={_LOOPBACK}:{port}" for port in ports)])  # fmt: skip
        self._relay_input: IO[str] = relay.stdin  # type: ignore[assignment]
        self._relay_output: IO[str] = relay.stdout  # type: ignore[assignment]
        self._relay_output.readline()
        self._serve("router", router, {"COROLLA_REDIS_URL": redis_url})
        at_router = {**self._settings, "COROLLA_ROUTER": f"{_LOOPBACK}:{router}", "COROLLA_MODEL": self._model}
        for number, (span, port) in enumerate(zip(self._spans, ports, strict=True)):
            settings = {"COROLLA_BLOCKS": span, "COROLLA_ADVERTISED_HOST": _DISTANT, **at_router,
                        "COROLLA_CONTROL_PORT": str(free.free())}  # fmt: skip
            self._serve("block-server", port, settings, log=f"server-{number}")
        port = free.free()
        self._serve("client", port, at_router)
        self.client = self._stack.enter_context(Client(f"{_LOOPBACK}:{port}"))
        _wait_until_ready(self.client)

    def _serve(self, command: str, port: int, settings: Mapping[str, str], *, log: str = "") -> None:
        arguments = [sys.executable, "-m", "corolla", command, "--port", str(port), "--host", _LOOPBACK]
        self._run(log or command, arguments, settings)

    def _run(
        self, name: str, arguments: list[str], settings: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        environment = {**os.environ, **OPENMP_WAITING, "OMP_NUM_THREADS": "1",
                       "COROLLA_METRICS_HOST": _LOOPBACK, "HF_HUB_OFFLINE": "1", **(settings or {})}  # fmt: skip
        log = self._stack.enter_context((self._folder / f"{name}.log").open("w"))
        process = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE if name == "relay" else log,
            stderr=log, text=True,
        )  # fmt: skip
        self._stack.callback(_end, process)
        return process


def _wait_until_ready(client: Client) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            if client.models()[0].ready:
                return
        except CorollaError:
            pass
        if time.monotonic() > deadline_s:
            raise TimeoutError("the chain did not become ready; see the logs")
        time.sleep(0.2)


def _end(process: "subprocess.Popen[Any]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
