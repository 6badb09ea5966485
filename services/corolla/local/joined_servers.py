"""Runs the block servers of a machine that joined a stack, and starts them again when they die."""

import signal
import urllib.request
from pathlib import Path
from typing import Final

from corolla.chassis.errors import StartupError
from corolla.local import model_fetch, processes, readiness
from corolla.local.fork_server import Exit, ForkServer
from corolla.local.log_files import LogFile, with_log
from corolla.local.model_fetch import ModelFacts
from corolla.local.options import DEFAULT_SERVER_PORT, LOOPBACK, StackOptions, server_devices
from corolla.local.ports import Ports
from corolla.local.processes import ManagedProcess
from corolla.local.supervisor import Report, StackEvent, Supervisor
from corolla.trust.loopback import VARIABLE
from corolla.wire.network import Network

_TIMEOUT_S: Final = 1.0
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks this machine itself, whatever proxy the environment names."""


class JoinedServers:
    """One block server for each device, as children. They end when this process ends or is killed.

    Args:
        tls_dir: the folder with this machine's certificate.
        router: the router's `host:port`.
        report: is called with each event.

    Attributes:
        processes: the block servers, once `plan` has returned.

    Raises:
        StartupError: the log folder cannot be made.
    """

    processes: tuple[ManagedProcess, ...] = ()

    def __init__(self, options: StackOptions, tls_dir: Path, router: str, report: Report) -> None:
        self._options = options
        self._report = report
        self._ports = Ports()
        self._supervisor: Supervisor | None = None
        try:
            options.log_folder.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise StartupError(f"cannot make the log folder {options.log_folder}: {failure.strerror}") from None
        self._router, self._tls_dir, self._model = router, tls_dir, ""
        self._environment = self._environment_of(options)
        self._fork_server = ForkServer(self._environment, options.log_folder / "fork-server.log")

    def model_facts(self, kind: str) -> ModelFacts:
        """Finds the model and the devices of a kind, without reading weights. Raises StartupError if there is none."""
        options = self._options
        log = LogFile(options.log_folder / "model.log")
        log.path.unlink(missing_ok=True)
        self._fork_server.warm(processes.MODULES_OF_FETCH)
        arguments = [options.model, kind, "", "", options.dtype_name, options.quantization]
        self._fork_server.start(model_fetch.NAME, model_fetch.__name__, arguments, self._environment, log.path)
        facts = model_fetch.facts_of(
            self._fork_server, log, lambda: None, lambda text: self._report(StackEvent("problem", "model", text))
        )
        if facts is None:
            raise StartupError(with_log("the model could not be opened", log))
        return facts

    def plan(
        self, options: StackOptions, facts: ModelFacts, blocks: str, capacity_blocks: int, port: int | None
    ) -> None:
        """Chooses a device and ports for each block server.

        Args:
            options: the options with the device that was found.
            blocks: the span of each server, or "auto".
            port: the port of the first one's data plane; None: the usual one if it is free, otherwise any free one.

        Raises:
            StartupError: the port is taken.
        """
        self._options, self._environment = options, self._environment_of(options)
        self._model = facts.name
        host = options.private_host
        given = self._ports.choose(port, DEFAULT_SERVER_PORT, "block server", host)
        num_servers = max(1, len(facts.devices)) if options.devices_are_counted else 1
        devices = server_devices(options, num_servers, max(1, len(facts.devices)))
        self.processes = tuple(
            processes.block_server_process(
                options, number, blocks, capacity_blocks, self._ports, device=device,
                port=given if number == 1 else None,
            )
            for number, device in enumerate(devices, start=1)
        )  # fmt: skip

    @property
    def addresses(self) -> list[str]:
        """The addresses by which others reach the servers."""
        return [processes.placed_address(self._options, each) for each in self.processes]

    def start(self) -> None:
        """Starts the block servers, which then register, load their spans and serve."""
        if self._options.is_on_cpu:
            self._fork_server.warm(processes.MODULES_OF_BLOCK_SERVERS)
        for process, address in zip(self.processes, self.addresses, strict=True):
            process.log.path.unlink(missing_ok=True)
            self.launch(process)
            text = f"starting at {address}; logs are in {self._options.log_folder}"
            self._report(StackEvent("step", process.name, text))
        self._supervisor = Supervisor(self, self._report, restarts=True, are_serving=False)
        self._supervisor.start()

    def stop(self) -> None:
        """Has the servers hand their sessions over and leave, and ends them."""
        if self._supervisor is not None:
            self._supervisor.stop()
        names = [process.name for process in self.processes]
        for name in names:
            self._fork_server.signal(name, signal.SIGCONT)
            self._fork_server.signal(name, signal.SIGTERM)
        for name in self._fork_server.wait_gone(names, self._options.grace_s):
            self._fork_server.signal(name, signal.SIGKILL)
        self._fork_server.close()
        self._ports.close()

    def _environment_of(self, options: StackOptions) -> dict[str, str]:
        return {
            **processes.child_environment(options, self._router, redis_url=""), VARIABLE: str(self._tls_dir),
        }  # fmt: skip

    # --- what the supervisor asks for --------------------------------------------------------------------------------

    def launch(self, process: ManagedProcess) -> None:
        self._fork_server.start(
            process.name, process.module, process.arguments, self._environment, process.log.path,
            title=process.title, is_forked=process.is_forked,
        )  # fmt: skip

    def is_serving(self, name: str) -> bool:
        port = next(process.metrics_port for process in self.processes if process.name == name)
        return answers_healthy(port)

    def take_exits(self) -> list[Exit]:
        return self._fork_server.take_exits()

    def note_exit(self, process: ManagedProcess) -> None:
        address = processes.placed_address(self._options, process)
        readiness.remove_dead_server(self._router, Network.from_folder(self._tls_dir), self._model, address)

    def look(self, report: Report) -> None: ...


def answers_healthy(metrics_port: int) -> bool:
    """A service of this machine says that it serves, by HTTP: its certificate names no address for gRPC to check."""
    try:
        with _OPENER.open(f"http://{LOOPBACK}:{metrics_port}/health", timeout=_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
