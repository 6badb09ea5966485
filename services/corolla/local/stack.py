"""Runs a whole stack as processes on this machine: Redis, router, block servers and client service."""

import datetime
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Self

import grpc

from corolla.chassis.addresses import host_port
from corolla.chassis.errors import CorollaError, StartupError
from corolla.local import model_fetch, processes, readiness
from corolla.local.fork_server import Exit, ForkServer
from corolla.local.identities import StackIdentities
from corolla.local.log_files import LogFile, with_log
from corolla.local.options import (
    DEFAULT_CLIENT_PORT,
    DEFAULT_HTTP_PORT,
    DEFAULT_ISSUER_PORT,
    DEFAULT_ROUTER_PORT,
    LOOPBACK,
    StackOptions,
    server_blocks,
    server_devices,
)
from corolla.local.ports import Ports
from corolla.local.processes import ManagedProcess
from corolla.local.redis_server import write_configuration
from corolla.local.supervisor import Report, StackEvent, Supervisor, ignore
from corolla.trust.loopback import VARIABLE
from corolla.trust.workload import Role
from corolla.v1 import router_pb2
from corolla.wire.network import Network

_POLL_S = 0.05
_RENEWAL_RETRY_S = 60.0
_STOP_ORDER = (("client",), ("server",), ("issuer", "router"), ("redis",))


class Stack:
    """Starts, watches and stops the processes of a local stack. All of them end when this process ends or is killed.

        with Stack(StackOptions(log_folder=folder, num_servers=3)) as stack:
            Client(stack.client_address).generate("hello")

    Attributes:
        client_address: the `host:port` of the client service.
        http_address: the `host:port` of the client service's HTTP.
        router_address: the `host:port` of the router.
        join_address: the `host:port` at which other machines join a shared stack; empty otherwise.
        redis_url: the address of the Redis that the stack uses.
        model_name: the name that the services give the model; known once `start` has returned.
        start_s: the seconds that each stage of `start` took.
    """

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.client_address = ""
        self.http_address = ""
        self.router_address = ""
        self.join_address = ""
        self.redis_url = options.redis_url or ""
        self.model_name = ""
        self.start_s: dict[str, float] = {}
        self._report: Report = ignore
        self._processes: dict[str, ManagedProcess] = {}
        self._probes: dict[str, readiness.Probe] = {}
        self._fork_server: ForkServer | None = None
        self._supervisor: Supervisor | None = None
        self._renewal_at = 0.0
        self._is_waiting = False
        self._environment: dict[str, str] = {}
        self._identities: StackIdentities | None = None
        self._block_weights = 0.0
        self._issuer: ManagedProcess | None = None
        self._ports = Ports()
        self._stopping = threading.Event()

    @property
    def page_url(self) -> str:
        """The address of the page that the client service shows."""
        return f"http://{self.http_address}/"

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        return tuple(self._processes.values())

    @property
    def metrics_urls(self) -> tuple[tuple[ManagedProcess, str], ...]:
        """Each process that has metrics, and where they are."""
        metered = (each for each in self.processes if each.metrics_port)
        return tuple((each, f"http://{LOOPBACK}:{each.metrics_port}/metrics") for each in metered)

    @property
    def servers(self) -> tuple[ManagedProcess, ...]:
        """The block servers."""
        return tuple(process for process in self.processes if process.is_block_server)

    @property
    def operator(self) -> Network:
        """The network with the operator's certificate, for calls that only operators may make."""
        return self._identities.operator if self._identities is not None else Network()

    def pid(self, name: str) -> int | None:
        """The id of the process "redis", "router", "client", "server-1" and so on; None while the process is dead."""
        return self._fork_server.pid(name) if self._fork_server else None

    def look(self, report: Report) -> None:
        """Replaces certificates that are due, and says when machines that joined have covered every block."""
        if time.monotonic() >= self._renewal_at:
            try:
                self.renew_certificates()
            except CorollaError as failure:
                # A full disk, for example, has half of the certificates' life to become free.
                self._renewal_at = time.monotonic() + _RENEWAL_RETRY_S
                report(StackEvent("problem", "stack", f"certificates cannot be replaced: {failure.message}"))
        if self._is_waiting and self.is_covered():
            self._is_waiting = False
            report(StackEvent("ready", "stack", "every block has a server"))

    def renew_certificates(self) -> None:
        """Replaces certificates that are due, also in the probes. Does nothing otherwise."""
        if self._identities is not None and self._identities.renew(datetime.datetime.now(datetime.UTC)):
            for process in self.processes:
                if (probe := self._probes.get(process.name)) is not None:
                    probe.open(self._credentials_for(process))

    def start(self, report: Report = ignore) -> None:
        """Starts the stack. Returns once every process serves and every block has a server.

        Raises:
            StartupError: the start failed; the message ends with the last lines of the log of a process that died.
        """
        self._report = report
        started = time.perf_counter()
        try:
            self._choose_addresses()
            self._start_control_plane()
            num_blocks, head_blocks, num_devices = self._prepare_model()
            prepared = time.perf_counter()
            self._start_data_plane(num_blocks, head_blocks, num_devices)
            if self.join_address:
                self._wait_until(partial(self.is_serving, "issuer"), "the issuer serves")
            self._wait_for_servers()
        except BaseException:
            self.stop()
            raise
        ended = time.perf_counter()
        imports_s = self._fork_server.warm_s if self._fork_server else 0.0
        self.start_s = {"model": prepared - started, "processes": ended - prepared, "imports": imports_s}
        missing = self._missing()
        self._is_waiting = missing is not None
        self._supervisor = Supervisor(self, self._report, restarts=self.options.restarts, are_serving=True)
        self._supervisor.start()
        if missing is None:
            report(StackEvent("ready", "stack", f"ready after {ended - started:.1f} s"))
        else:
            report(StackEvent("step", "stack", f"{missing}; waiting for machines that join"))

    def placement(self) -> router_pb2.Placement | None:
        """The placement that the router knows; None if the router does not answer."""
        probe = self._probes.get("router")
        return probe.placement(self.model_name) if probe else None

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a process, to imitate a fault. `StackOptions.restarts` says whether it is started again."""
        if name not in self._processes:
            raise StartupError(f"there is no process {name!r}; there are {', '.join(self._processes)}")
        if self._fork_server is not None:
            self._fork_server.signal(name, number)

    def launch(self, process: ManagedProcess, environment: Mapping[str, str] | None = None) -> None:
        """Starts a process, or starts it again. A new process is added to the stack, or replaces the one of its name.

        Args:
            environment: more variables, only for this start.
        """
        if self._processes.get(process.name) != process:
            self._plan([process])
        variables = {**self._environment, **self._identity(process), **(environment or {})}
        if self._fork_server is not None and not self._stopping.is_set():
            what = (process.name, process.module, process.arguments)
            self._fork_server.start(
                *what, variables, process.log.path, title=process.title, is_forked=process.is_forked
            )

    def is_serving(self, name: str) -> bool:
        """The process answers that it is ready."""
        probe = self._probes.get(name)
        return probe.is_serving() if probe else readiness.redis_answers(self.redis_url)

    def take_exits(self) -> list[Exit]:
        """Returns the ends of the processes that have ended since the last call."""
        return self._fork_server.take_exits() if self._fork_server else []

    def note_exit(self, process: ManagedProcess) -> None:
        """Tells the router that a block server has died; see `Supervised`."""
        if process.is_block_server:
            folder = self._identity(process).get(VARIABLE)
            network = Network.from_folder(Path(folder) if folder is not None else None)
            address = processes.placed_address(self.options, process)
            readiness.remove_dead_server(self.router_address, network, self.model_name, address)

    def stop(self) -> None:
        """Ends all processes: the client service first, then the servers that it uses. May be called twice."""
        self._stopping.set()
        if self._supervisor is not None:
            self._supervisor.stop()
        # Probes close before the services end: gRPC prints a service's GOAWAY on the console of a connected process.
        for probe in self._probes.values():
            probe.close()
        self._probes.clear()
        if self._fork_server is not None:
            for kinds in _STOP_ORDER:
                self._stop_kind(self._fork_server, [name for name in self._processes if name.startswith(kinds)])
            self._fork_server.close()
            self._fork_server = None
        if self._identities is not None:
            self._identities.remove()
        self._ports.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        self.stop()

    def _choose_addresses(self) -> None:
        options, ports = self.options, self._ports
        router_port = ports.choose(options.router_port, DEFAULT_ROUTER_PORT, "router", options.private_host)
        client_port = ports.choose(options.port, DEFAULT_CLIENT_PORT, "client service", options.host)
        http_port = ports.choose(options.http_port, DEFAULT_HTTP_PORT, "client service's HTTP", options.host)
        self.router_address = f"{LOOPBACK}:{router_port}"
        try:
            options.log_folder.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise StartupError(
                f"cannot make the log folder {options.log_folder}: {failure.strerror}; choose another one"
            ) from None
        planned = []
        private = options.log_folder
        if options.is_secure:
            self._identities = StackIdentities(self.router_address, options.shared_host, options.state_folder)
            private = self._identities.folder
        if not self.redis_url:
            configuration = private / "redis.conf"
            redis_port = 0 if options.is_secure else ports.free()
            folder, is_kept = options.log_folder, options.state_folder is not None
            if options.state_folder is not None:
                folder = options.state_folder / "redis"
                folder.mkdir(mode=0o700, exist_ok=True)
            self.redis_url = write_configuration(configuration, folder, redis_port, is_kept=is_kept)
            address = f"{LOOPBACK}:{redis_port}" if redis_port else str(private)
            planned.append(processes.redis_process(options.log_folder, address, configuration))
        self._router = processes.router_process(options, router_port, ports.free())
        planned.append(self._router)
        if options.state_folder is not None:
            port = ports.choose(options.issuer_port, DEFAULT_ISSUER_PORT, "issuer", options.private_host)
            self.join_address = host_port(options.shared_host, port)
            issuer = processes.issuer_process(options, options.state_folder, port, router_port, ports.free())
            self._issuer = issuer
            planned.append(issuer)
        client = processes.client_process(options, client_port, http_port, ports.free())
        self.client_address = client.address
        self.http_address = f"{client.address.rpartition(':')[0]}:{http_port}"
        self._client = client
        self._plan(planned)

    def _start_control_plane(self) -> None:
        options = self.options
        self._environment = processes.child_environment(options, self.router_address, self.redis_url)
        log = options.log_folder / "fork-server.log"
        log.unlink(missing_ok=True)
        self._fork_server = ForkServer(self._environment, log)
        if options.redis_url:
            self._check_given_redis(options.redis_url)
        for process in self.processes:
            if process is not self._router and process is not self._issuer:
                self.launch(process)
        self._fork_server.warm(processes.MODULES_OF_FETCH)

    def _check_given_redis(self, url: str) -> None:
        try:
            answers = readiness.redis_answers(url)
        except ValueError as failure:
            raise StartupError(f"--redis-url is {failure}") from None
        if not answers:
            raise StartupError("Redis does not answer at the given address; start it, or leave --redis-url out")

    def _prepare_model(self) -> tuple[int, float, int]:
        """Finds or fetches the model, and starts the router, which takes only block servers of this model.

        Returns:
            The model's number of blocks, how many blocks cost as much work as the head, and the number of devices.
        """
        if self._fork_server is None:
            raise StartupError("the stack was stopped")
        log = LogFile(self.options.log_folder / "model.log")
        log.path.unlink(missing_ok=True)
        folder = self.options.state_folder
        files = "" if folder is None else ", and preparing its files for machines that join"
        self._report(StackEvent("step", "model", f"opening the model {self.options.model}{files}"))
        kind = self.options.device if self.options.devices_are_counted else ""
        manifests = "" if folder is None else str(folder / "models")
        arguments = [self.options.model, kind, manifests, "gated" if self.options.shares_gated else ""]
        self._fork_server.start(model_fetch.NAME, model_fetch.__name__, arguments, self._environment, log.path)
        self._fork_server.warm(processes.MODULES_OF_ROUTER_AND_CLIENT)
        facts = model_fetch.facts_of(self._fork_server, log, self._check_alive)
        if facts is None:
            raise StartupError(with_log("the model could not be opened", log))
        self.model_name = facts.name
        self._block_weights = facts.block_weights
        self._expect(facts.name, facts.num_blocks)
        if facts.manifest:
            self._environment["COROLLA_MANIFEST"] = facts.manifest
        self.launch(self._router)
        if self._issuer is not None:
            self.launch(self._issuer)
        if self.options.is_on_cpu:
            modeling = f"transformers.models.{facts.model_type}.modeling_{facts.model_type}"
            self._fork_server.warm([modeling, *processes.MODULES_OF_BLOCK_SERVERS])
        return facts.num_blocks, facts.head_blocks, len(facts.devices)

    def _expect(self, model: str, num_blocks: int) -> None:
        """Lets the router refuse other models, unless the environment says which models it admits.

        The setting cannot express a name with a comma or an equals sign; then the router admits all models.
        """
        if not {",", "="} & set(model):
            self._environment.setdefault("COROLLA_MODELS", f"{model}={num_blocks}")

    def _start_data_plane(self, num_blocks: int, head_blocks: float, num_devices: int) -> None:
        options = self.options
        spans = server_blocks(options, num_blocks, head_blocks, num_devices)
        devices = server_devices(options, len(spans), num_devices)
        capacity_blocks = min(num_blocks, math.ceil((num_blocks + head_blocks) / len(spans)))
        servers = [
            processes.block_server_process(
                options,
                number,
                blocks,
                capacity_blocks,
                self._ports,
                device=device,
                shares_device=not options.is_on_cpu and devices.count(device) > 1,
            )
            for number, (blocks, device) in enumerate(zip(spans, devices, strict=True), start=1)
        ]
        self._plan([*servers, self._client])
        # The block servers register with the router as soon as they run, so it has to serve first.
        self._wait_until(lambda: self.is_serving("router"), "the router serves")
        for process in (*servers, self._client):
            self.launch(process)
            self._report(StackEvent("step", process.name, f"starting at {process.address}"))
        for process in (*servers, self._client):
            self._wait_until(partial(self.is_serving, process.name), f"{process.name} serves")
            self._report(StackEvent("step", process.name, "serves"))

    def _plan(self, planned: Iterable[ManagedProcess]) -> None:
        for process in planned:
            process.log.path.unlink(missing_ok=True)
            self._processes[process.name] = process
            if (earlier := self._probes.pop(process.name, None)) is not None:
                earlier.close()
            if process.name != "redis":
                self._probes[process.name] = readiness.Probe(process.rpc_address, self._credentials_for(process))

    def certificates(self, role: Role, name: str) -> Path:
        """A folder with a certificate for one more process. Raises RuntimeError if the stack has no certificates."""
        if self._identities is None:
            raise RuntimeError("the stack has no certificates")
        return self._identities.folder_of(role, name)

    def _identity(self, process: ManagedProcess) -> dict[str, str]:
        if self._identities is None or process.role is None:
            return {}
        return {VARIABLE: str(self._identities.folder_of(process.role, process.name))}

    def _credentials_for(self, process: ManagedProcess) -> grpc.ChannelCredentials | None:
        """The credentials with which the stack asks a process for its health; None: it asks without TLS."""
        credentials = self.operator.credentials
        return credentials.for_channels() if credentials is not None and process.role is not Role.CLIENT else None

    def is_covered(self) -> bool:
        """Every block has a server."""
        placement = self.placement()
        return placement is not None and bool(placement.servers) and not placement.uncovered

    def _wait_for_servers(self) -> None:
        """Waits until every block has a server, or the servers of this machine, if others may join, have a place."""
        if self.options.shared_host:
            self._wait_until(lambda: self._missing() is None or self._have_places(), "all servers have their blocks")
            if self._missing() is not None:
                return
        self._wait_until(self.is_covered, "every block has a server")
        self._wait_until(lambda: readiness.knows_a_chain(self.client_address), "the client service knows a chain")

    def _have_places(self) -> bool:
        placement = self.placement()
        ready = router_pb2.SERVER_STATE_READY
        return placement is not None and sum(each.state == ready for each in placement.servers) >= len(self.servers)

    def _missing(self) -> str | None:
        """The blocks without a server, in words; None if each has one."""
        placement = self.placement()
        if placement is None or not placement.servers:
            return "no block has a server yet"
        if not placement.uncovered:
            return None
        num_blocks = sum(each.end - each.start for each in placement.uncovered)
        spans = ", ".join(f"{each.start}:{each.end}" for each in placement.uncovered)
        gib = num_blocks * self._block_weights * (4 if self.options.dtype_name == "float32" else 2) / 2**30
        return f"blocks {spans} have no server yet, {gib:.2f} GiB of weights in {self.options.dtype_name}"

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        give_up = time.monotonic() + self.options.start_timeout_s
        while not condition():
            self._check_alive()
            if time.monotonic() > give_up:
                raise StartupError(
                    f"the stack did not start within {self.options.start_timeout_s:.0f} s: still waiting until {what}; "
                    f"see {self.options.log_folder}"
                )
            time.sleep(_POLL_S)

    def _check_alive(self) -> None:
        """Raises StartupError if a process has died."""
        for ended in self.take_exits():
            process = self._processes.get(ended.name)
            if process is not None:
                raise StartupError(with_log(f"{ended.name} {ended.how} while starting", process.log))
            if ended.name != model_fetch.NAME or ended.status < 0:
                raise StartupError(f"{ended.name} {ended.how}; see {self.options.log_folder}")

    def _stop_kind(self, fork_server: ForkServer, names: list[str]) -> None:
        for name in names:
            # A process that was stopped by a signal does not act on SIGTERM before it continues.
            fork_server.signal(name, signal.SIGCONT)
            fork_server.signal(name, signal.SIGTERM)
        for name in fork_server.wait_gone(names, self.options.grace_s):
            self._report(StackEvent("problem", name, f"did not end within {self.options.grace_s:.0f} s; killed"))
            fork_server.signal(name, signal.SIGKILL)
        fork_server.wait_gone(names, self.options.grace_s)
