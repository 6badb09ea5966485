"""Builds the arguments and environment of each process of a local stack."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from corolla.chassis.addresses import host_port
from corolla.chassis.host_memory import available_bytes
from corolla.chassis.processors import OPENMP_WAITING, available_cores, is_cpu
from corolla.local.log_files import LogFile
from corolla.local.options import DEFAULT_SERVER_PORT, DEFAULT_SERVERS, FURTHER_SERVERS_PORT, LOOPBACK, StackOptions
from corolla.local.ports import Ports
from corolla.trust.workload import Role

_OF_ONE_PROCESS = frozenset({"COROLLA_PORT", "COROLLA_HTTP_PORT", "COROLLA_HOST", "COROLLA_TLS_DIR", "COROLLA_ISSUER"})
SERVICE_MODULE = "corolla.cli.app"
_SHARED_KV_CACHE_MIB = 1024
# The modules that children import. While one child works, the fork server imports the modules of the next children, so
# that these children have them from the start.
MODULES_OF_FETCH = ("corolla.models.checkpoint",)
MODULES_OF_ROUTER_AND_CLIENT = ("corolla.router.service", "corolla.client.service")
MODULES_OF_BLOCK_SERVERS = ("corolla.block_server.service",)


@dataclass(frozen=True)
class ManagedProcess:
    """One process of the stack.

    Attributes:
        name: "redis", "router", "client" or "server-1" and so on.
        module: the module whose `main(arguments)` the process runs.
        address: the `host:port` at which the process serves.
        control_address: a block server's `host:port` for gRPC; empty for other processes, whose gRPC is at `address`.
        blocks: a block server's `blocks` setting; empty for other processes.
        device: a block server's torch device; empty for other processes.
        metrics_port: the port of the metrics, on the loopback address; 0 for Redis, which has no such port.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    address: str
    log: LogFile
    blocks: str = ""
    metrics_port: int = 0
    control_address: str = ""
    device: str = ""

    @property
    def is_forked(self) -> bool:
        """True if the fork server may start the process, which then has the fork server's imports.

        A process that computes on a GPU must not: its driver works only in the process that has initialised it, and
        some libraries initialise it when they are imported.
        """
        return not self.is_block_server or is_cpu(self.device)

    @property
    def title(self) -> str:
        """The command line that `ps` shows: role, span and port, such as `corolla block-server 0:15 :50052`."""
        role = "block-server" if self.is_block_server else self.name
        return " ".join(["corolla", role, *filter(None, [self.blocks]), f":{self.address.rpartition(':')[2]}"])

    @property
    def rpc_address(self) -> str:
        """The address of the process's gRPC health service."""
        return self.control_address or self.address

    @property
    def role(self) -> Role | None:
        """The role in the certificate that the stack signs for the process; None for Redis and the issuer."""
        if self.is_block_server:
            return Role.BLOCK
        roles = (Role.CLIENT, Role.ROUTER)
        return next((role for role in roles if self.name.startswith(role.value)), None)

    @property
    def is_block_server(self) -> bool:
        return bool(self.blocks)


def redis_process(folder: Path, address: str, configuration: Path) -> ManagedProcess:
    log = LogFile(folder / "redis.log")
    return ManagedProcess("redis", "corolla.local.redis_server", (str(configuration),), address, log)


def router_process(options: StackOptions, port: int, metrics_port: int) -> ManagedProcess:
    # The address of Redis may contain a password, so it is passed in the environment, not as an argument.
    arguments = ("router", "--port", str(port), "--host", options.private_host, "--metrics-port", str(metrics_port))
    log = LogFile(options.log_folder / "router.log")
    return ManagedProcess("router", SERVICE_MODULE, arguments, f"{LOOPBACK}:{port}", log, metrics_port=metrics_port)


def issuer_process(
    options: StackOptions, state_folder: Path, port: int, router_port: int, metrics_port: int
) -> ManagedProcess:
    """The issuer, which tells machines that join about the router and the model."""
    folder = Path(options.model).expanduser()
    arguments = [
        "issuer",
        "--authority-dir",
        str(state_folder),
        "--router",
        host_port(options.shared_host, router_port),
    ]
    arguments += ["--host", options.private_host, "--port", str(port), "--metrics-port", str(metrics_port)]
    arguments += ["--model", str(folder.resolve()) if folder.exists() else options.model]
    arguments += ["--dtype", options.dtype_name, "--quantization", options.quantization]
    log = LogFile(options.log_folder / "issuer.log")
    return ManagedProcess(
        "issuer", SERVICE_MODULE, tuple(arguments), f"{LOOPBACK}:{port}", log, metrics_port=metrics_port
    )


def block_server_process(
    options: StackOptions,
    number: int,
    blocks: str,
    capacity_blocks: int,
    ports: Ports,
    *,
    device: str = "cpu",
    shares_device: bool = False,
    port: int | None = None,
) -> ManagedProcess:
    """A block server.

    Args:
        port: the port of its data plane, which `ports` has handed out; None: a usual one in a shared stack if that is
            free, otherwise any free one.
        device: its torch device.
        shares_device: whether other block servers compute on the same GPU. Then it must not take all of the memory.
    """
    host = options.private_host
    control_port, metrics_port = ports.free(host=host), ports.free()
    if port is None:
        usual = DEFAULT_SERVER_PORT if number == 1 else FURTHER_SERVERS_PORT + number - 2
        port = ports.free(usual if options.shared_host else None, host)
    name = f"server-{number}"
    arguments = ["block-server", "--model", options.model, "--blocks", blocks, "--host", host]
    arguments += ["--port", str(port), "--control-port", str(control_port), "--metrics-port", str(metrics_port)]
    arguments += ["--dtype", options.dtype_name, "--quantization", options.quantization, "--device", device]
    arguments += ["--threads", str(options.num_threads)]
    if shares_device and not {"COROLLA_KV_CACHE_MIB"} & {*os.environ, *options.environment}:
        arguments += ["--kv-cache-mib", str(_SHARED_KV_CACHE_MIB)]
    if blocks == "auto" and capacity_blocks:
        arguments += ["--capacity-blocks", str(capacity_blocks)]
    log = LogFile(options.log_folder / f"{name}.log")
    return ManagedProcess(
        name, SERVICE_MODULE, tuple(arguments), f"{LOOPBACK}:{port}", log, blocks, metrics_port,
        f"{LOOPBACK}:{control_port}", device,
    )  # fmt: skip


def placed_address(options: StackOptions, process: ManagedProcess) -> str:
    """Returns the `host:port` by which the placement names a block server."""
    return host_port(options.shared_host or LOOPBACK, int(process.address.rpartition(":")[2]))


def client_process(options: StackOptions, port: int, http_port: int, metrics_port: int) -> ManagedProcess:
    arguments = ["client", "--model", options.model, "--port", str(port), "--host", options.host]
    arguments += ["--http-port", str(http_port), "--metrics-port", str(metrics_port)]
    arguments += ["--dtype", options.dtype_name, "--quantization", options.quantization]
    # The stack reaches a service that listens on every interface at the loopback address.
    host = LOOPBACK if options.host in ("0.0.0.0", "") else options.host  # noqa: S104
    log = LogFile(options.log_folder / "client.log")
    return ManagedProcess(
        "client", SERVICE_MODULE, tuple(arguments), host_port(host, port), log, metrics_port=metrics_port
    )


def child_environment(options: StackOptions, router: str, redis_url: str) -> dict[str, str]:
    """Returns the environment of the children: this process's own, the stack's settings, and limits on threads."""
    threads = str(options.num_threads)
    fixed: Mapping[str, str] = {
        # OpenMP and BLAS read these only when torch and numpy are imported.
        **OPENMP_WAITING,
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONUNBUFFERED": "1",
        "COROLLA_ROUTER": router,
        "COROLLA_REDIS_URL": redis_url,
        "COROLLA_ADVERTISED_HOST": options.shared_host or LOOPBACK,
        "COROLLA_KUBERNETES": "off",
        "COROLLA_METRICS_HOST": LOOPBACK,
        "COROLLA_METRICS_PORT": "0",
        "COROLLA_GRACE_S": str(options.grace_s / 2),
    }
    offline = {"HF_HUB_OFFLINE": "1"} if options.model == "demo" or Path(options.model).expanduser().exists() else {}
    # The variables `_OF_ONE_PROCESS` have another value in each process, so the children do not inherit them.
    own = {key: value for key, value in os.environ.items() if key not in _OF_ONE_PROCESS}
    # The page shows loads as they change, so the router pushes them often. Servers share the cores: if there were more
    # microbatches than run at once, they would only be smaller. Variables of the environment override these two.
    num_at_once = max(1, available_cores() // max(1, options.num_threads))
    shared = {"COROLLA_LOAD_PUSH_INTERVAL_S": "1", "COROLLA_MAX_MICROBATCHES": str(num_at_once)}
    if options.shared_host and options.is_on_cpu and (mib := weights_mib(options)):
        shared["COROLLA_WEIGHTS_MIB"] = str(mib)
    return {**shared, **own, **fixed, **offline, **options.environment}


def weights_mib(options: StackOptions) -> int:
    """The memory for the weights of each block server, where other machines may hold what does not fit; 0: not known.

    A quarter of what is available stays for imports, steps and other programs. Keys and values come out of the rest.
    """
    available = available_bytes()
    if available is None:
        return 0
    num_servers = options.num_servers or DEFAULT_SERVERS
    return max(1, (available * 3 // 4 >> 20) // num_servers - _SHARED_KV_CACHE_MIB)
