"""What each process of a local stack is started with."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from corolla.chassis.processors import OPENMP_WAITING, available_cores
from corolla.local.log_files import LogFile
from corolla.local.options import StackOptions
from corolla.local.ports import Ports
from corolla.trust.workload import Role

LOOPBACK = "127.0.0.1"
_OF_ONE_PROCESS = frozenset({"COROLLA_PORT", "COROLLA_HTTP_PORT", "COROLLA_HOST", "COROLLA_TLS_DIR"})
SERVICE_MODULE = "corolla.cli.app"


@dataclass(frozen=True)
class ManagedProcess:
    """One process of the stack.

    Attributes:
        name: "redis", "router", "client" or "server-1" and so on.
        module: whose `main(arguments)` it runs.
        address: host:port where it serves.
        control_address: of a block server: host:port of its gRPC; of the others that is `address`.
        blocks: of a block server: what it was ordered to hold.
        metrics_port: where it serves its metrics, on the loopback address; 0 for Redis, which has none.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    address: str
    log: LogFile
    blocks: str = ""
    metrics_port: int = 0
    control_address: str = ""

    @property
    def title(self) -> str:
        """What `ps` shows: role, span and port, as `corolla block-server 0:15 :50052`."""
        role = "block-server" if self.is_block_server else self.name
        return " ".join(["corolla", role, *filter(None, [self.blocks]), f":{self.address.rpartition(':')[2]}"])

    @property
    def rpc_address(self) -> str:
        """Where its health is asked for."""
        return self.control_address or self.address

    @property
    def role(self) -> Role | None:
        """Which its certificate names; None for Redis, which has none."""
        if self.is_block_server:
            return Role.BLOCK
        return next((role for role in (Role.CLIENT, Role.ROUTER) if self.name.startswith(role.value)), None)

    @property
    def is_block_server(self) -> bool:
        return bool(self.blocks)


def redis_process(folder: Path, address: str, configuration: Path) -> ManagedProcess:
    log = LogFile(folder / "redis.log")
    return ManagedProcess("redis", "corolla.local.redis_server", (str(configuration),), address, log)


def router_process(folder: Path, port: int, metrics_port: int) -> ManagedProcess:
    # The address of Redis may hold a password, so it goes by the environment.
    arguments = ("router", "--port", str(port), "--host", LOOPBACK, "--metrics-port", str(metrics_port))
    log = LogFile(folder / "router.log")
    return ManagedProcess("router", SERVICE_MODULE, arguments, f"{LOOPBACK}:{port}", log, metrics_port=metrics_port)


def block_server_process(
    options: StackOptions, number: int, blocks: str, capacity_blocks: int, ports: Ports, router: str
) -> ManagedProcess:
    port, control_port, metrics_port = ports.free(), ports.free(), ports.free()
    name = f"server-{number}"
    arguments = ["block-server", "--model", options.model, "--router", router, "--blocks", blocks]
    arguments += ["--port", str(port), "--control-port", str(control_port)]
    arguments += ["--host", LOOPBACK, "--advertised-host", LOOPBACK]
    arguments += ["--metrics-port", str(metrics_port)]
    arguments += ["--dtype", options.dtype, "--quantization", options.quantization]
    arguments += ["--threads", str(options.num_threads)]
    if blocks == "auto":
        arguments += ["--capacity-blocks", str(capacity_blocks)]
    log = LogFile(options.log_folder / f"{name}.log")
    return ManagedProcess(
        name, SERVICE_MODULE, tuple(arguments), f"{LOOPBACK}:{port}", log, blocks, metrics_port,
        f"{LOOPBACK}:{control_port}",
    )  # fmt: skip


def client_process(options: StackOptions, port: int, http_port: int, metrics_port: int, router: str) -> ManagedProcess:
    arguments = ["client", "--model", options.model, "--router", router, "--port", str(port), "--host", options.host]
    arguments += ["--http-port", str(http_port), "--metrics-port", str(metrics_port)]
    arguments += ["--dtype", options.dtype, "--quantization", options.quantization]
    # Whoever listens on every interface is reached on the loopback one from here.
    host = LOOPBACK if options.host in ("0.0.0.0", "") else options.host  # noqa: S104
    log = LogFile(options.log_folder / "client.log")
    return ManagedProcess("client", SERVICE_MODULE, tuple(arguments), f"{host}:{port}", log, metrics_port=metrics_port)


def child_environment(options: StackOptions, redis_url: str) -> dict[str, str]:
    """This process's environment, with what helps several processes that share few cores."""
    threads = str(options.num_threads)
    fixed: Mapping[str, str] = {
        # OpenMP and BLAS read these once, when torch and numpy are imported.
        **OPENMP_WAITING,
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONUNBUFFERED": "1",
        "COROLLA_REDIS_URL": redis_url,
        "COROLLA_KUBERNETES": "off",
        "COROLLA_METRICS_HOST": LOOPBACK,
        "COROLLA_METRICS_PORT": "0",
        "COROLLA_GRACE_S": str(options.grace_s / 2),
    }
    offline = {"HF_HUB_OFFLINE": "1"} if options.model == "demo" or Path(options.model).expanduser().exists() else {}
    # The command line says these to each process; a variable of the surroundings is not meant for all of them.
    own = {key: value for key, value in os.environ.items() if key not in _OF_ONE_PROCESS}
    # The page shows loads as they change. Servers share the processors: with more microbatches than there are
    # processors for, each would only be smaller. Variables of the surroundings go before these.
    num_at_once = max(1, available_cores() // max(1, options.num_threads))
    shared = {"COROLLA_LOAD_PUSH_INTERVAL_S": "1", "COROLLA_MAX_MICROBATCHES": str(num_at_once)}
    return {**shared, **own, **fixed, **offline, **options.environment}
