"""Runs the block server of a machine that joined a stack, and starts it again when it dies."""

import signal
import time
import urllib.request
from pathlib import Path
from typing import Final

from corolla.chassis.backoff import Backoff
from corolla.chassis.errors import StartupError
from corolla.local import processes
from corolla.local.fork_server import ForkServer
from corolla.local.options import DEFAULT_SERVER_PORT, LOOPBACK, StackOptions
from corolla.local.ports import Ports
from corolla.local.processes import ManagedProcess
from corolla.local.stack import Report, StackEvent
from corolla.trust.loopback import VARIABLE

_NAME: Final = "server-1"
_TIMEOUT_S: Final = 1.0
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks this machine itself, whatever proxy the environment names."""


class JoinedServer:
    """One block server as a child. It ends when this process ends or is killed.

    Args:
        blocks: its span, or "auto".
        router: the router's `host:port`.
        report: is called with each event.

    Attributes:
        process: the block server's process.
    """

    process: ManagedProcess

    def __init__(self, options: StackOptions, blocks: str, router: str, report: Report) -> None:
        self._options = options
        self._blocks = blocks
        self._router = router
        self._report = report
        self._ports = Ports()
        self._fork_server: ForkServer | None = None
        self._backoff = Backoff()
        self._started_at = 0.0
        self._due_at: float | None = None
        self._serves = False

    def start(self, tls_dir: Path, capacity_blocks: int, port: int | None) -> None:
        """Starts the block server, which then registers, loads its span and serves.

        Args:
            tls_dir: the folder with this machine's certificate.
            port: the port of the data plane; None: the usual one if it is free, otherwise any free one.

        Raises:
            StartupError: the port is taken, or the log folder cannot be made.
        """
        options = self._options
        host = options.private_host
        given = self._ports.choose(port, DEFAULT_SERVER_PORT, "block server", host)
        self.process = processes.block_server_process(
            options, 1, self._blocks, capacity_blocks, self._ports, device=options.device, port=given
        )
        try:
            options.log_folder.mkdir(parents=True, exist_ok=True)
            self.process.log.path.unlink(missing_ok=True)
        except OSError as failure:
            raise StartupError(f"cannot make the log folder {options.log_folder}: {failure.strerror}") from None
        environment = processes.child_environment(options, self._router, redis_url="")
        self._environment = {**environment, VARIABLE: str(tls_dir)}
        self._fork_server = ForkServer(self._environment, options.log_folder / "fork-server.log")
        self._launch()
        text = f"starting at {options.shared_host}:{given}; logs are in {options.log_folder}"
        self._report(StackEvent("step", _NAME, text))

    def watch(self) -> None:
        """Reports what has happened since the last call, and starts a server again that has died."""
        for ended in self._fork_server.take_exits() if self._fork_server is not None else ():
            now = time.monotonic()
            delay_s = self._backoff.delay_s(now - self._started_at)
            self._due_at, self._serves = now + delay_s, False
            self._report(StackEvent("problem", _NAME, f"{ended.how}; starting it again in {delay_s:.1f} s"))
        if self._due_at is not None and time.monotonic() >= self._due_at:
            self._launch()
        if not self._serves and self._due_at is None and self._is_serving():
            self._serves = True
            self._report(StackEvent("ready", _NAME, "serves"))

    def stop(self) -> None:
        """Has the server hand its sessions over and leave, and ends it."""
        if self._fork_server is not None:
            self._fork_server.signal(_NAME, signal.SIGCONT)
            self._fork_server.signal(_NAME, signal.SIGTERM)
            for name in self._fork_server.wait_gone([_NAME], self._options.grace_s):
                self._fork_server.signal(name, signal.SIGKILL)
            self._fork_server.close()
            self._fork_server = None
        self._ports.close()

    def _launch(self) -> None:
        self._due_at, self._started_at = None, time.monotonic()
        process = self.process
        if self._fork_server is not None:
            self._fork_server.start(
                process.name, process.module, process.arguments, self._environment, process.log.path,
                title=process.title, is_forked=process.is_forked,
            )  # fmt: skip

    def _is_serving(self) -> bool:
        # The server's certificate names no address, so gRPC could not ask it.
        url = f"http://{LOOPBACK}:{self.process.metrics_port}/health"
        try:
            with _OPENER.open(url, timeout=_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
