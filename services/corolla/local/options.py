"""The options of a local stack."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from corolla.chassis.errors import SettingsError
from corolla.chassis.processors import is_cpu
from corolla.chassis.weight_formats import default_dtype

DEFAULT_ROUTER_PORT = 50050
DEFAULT_CLIENT_PORT = 50051
DEFAULT_HTTP_PORT = 8080
DEFAULT_ISSUER_PORT = 50054
DEFAULT_SERVER_PORT = 50052
FURTHER_SERVERS_PORT = 50060
"""Where the data planes of further block servers of a shared stack begin, so that firewalls can name their ports."""
LOOPBACK = "127.0.0.1"
DEFAULT_SERVERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """The processes of a local stack, and how they run.

    Attributes:
        model: a checkpoint folder, GGUF file, hub id or "demo".
        num_servers: the number of block servers; unused where `blocks` lists spans. None: two on a CPU, else one for
            each device.
        blocks: spans such as "0:10,10:30", one server for each; "auto": the router chooses; empty: even parts, or
            "auto" in a shared stack.
        port: the port of the client service; None: the usual port if it is free, otherwise any free port; 0: any free
            port.
        http_port: the port of the client service's HTTP, likewise.
        router_port: the port of the router, likewise.
        redis_url: the address of a running Redis; None: the stack starts a Redis of its own.
        host: the address on which the client service listens; all other processes use the loopback address.
        dtype: the dtype of weights, cache and wire; None: float32 on a CPU, and bfloat16 on other devices.
        device: the torch device of the block servers; `cuda` without a number stands for all devices of the machine,
            which the servers share evenly.
        quantization: the quantization of the block servers' weights: "none", "int8", "int4" or "packed".
        num_threads: the number of torch threads of each process.
        log_folder: the folder in which each process gets its log file.
        environment: more variables for all processes, such as `COROLLA_LEASE_MS`.
        shared_host: the address by which other machines reach this one, where router, issuer and block servers listen
            on all addresses; empty: the stack is of this machine only.
        issuer_port: the port of the issuer of a shared stack, likewise.
        state_folder: the folder where a shared stack keeps its authority and Redis; only the user may read it.
        shares_gated: whether machines that join may get a model from this one that the hub does not give to everybody.
        is_secure: whether processes show each other certificates, and Redis asks for a password.
        restarts: whether a process that dies is started again.
        start_timeout_s: how many seconds the start may take after the model has been found.
        grace_s: how many seconds a process gets to end by itself.
    """

    model: str = "demo"
    num_servers: int | None = None
    blocks: str = ""
    port: int | None = 0
    http_port: int | None = 0
    router_port: int | None = 0
    redis_url: str | None = None
    host: str = "127.0.0.1"
    dtype: str | None = None
    device: str = "cpu"
    quantization: str = "none"
    num_threads: int = 1
    log_folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    shared_host: str = ""
    issuer_port: int | None = 0
    state_folder: Path | None = None
    shares_gated: bool = False
    is_secure: bool = True
    restarts: bool = True
    start_timeout_s: float = 180.0
    grace_s: float = 5.0

    @property
    def is_on_cpu(self) -> bool:
        return is_cpu(self.device)

    @property
    def dtype_name(self) -> str:
        """The full name of the dtype."""
        return self.dtype or default_dtype(self.device)

    @property
    def private_host(self) -> str:
        """The address on which the processes listen that only other processes of the stack call."""
        # Certificates guard them. A machine without IPv6 may not listen on `::`, which stands for both families.
        everywhere = "::" if ":" in self.shared_host else "0.0.0.0"  # noqa: S104
        return everywhere if self.shared_host else LOOPBACK

    @property
    def devices_are_counted(self) -> bool:
        """The stack has to know how many devices of the kind there are."""
        return not self.is_on_cpu and ":" not in self.device


def server_devices(options: StackOptions, num_servers: int, num_devices: int) -> list[str]:
    """Returns the torch device of each block server: they take the devices in turn.

    Args:
        num_devices: how many devices of the kind `options.device` the machine has.
    """
    if not options.devices_are_counted:
        return [options.device] * num_servers
    return [f"{options.device}:{index % num_devices}" for index in range(num_servers)]


def server_blocks(options: StackOptions, num_blocks: int, head_blocks: float = 0.0, num_devices: int = 1) -> list[str]:
    """Returns the `blocks` setting of each block server: `start:end`, or `auto`.

    Even parts are equal in work; the last server's work includes the head.

    Args:
        head_blocks: how many blocks cost as much work as the head.
        num_devices: how many devices of the kind `options.device` the machine has.

    Raises:
        SettingsError: the spans are not valid or leave blocks out, or there are more servers than blocks.
    """
    num_servers = options.num_servers
    if num_servers is None:
        num_servers = DEFAULT_SERVERS if options.is_on_cpu else min(num_devices, num_blocks)
    if options.blocks == "auto" or (options.shared_host and not options.blocks):
        return ["auto"] * num_servers
    if options.blocks:
        return _given_spans(options.blocks, num_blocks, must_cover=not options.shared_host)
    if not 1 <= num_servers <= num_blocks:
        raise SettingsError(
            f"{num_servers} servers cannot share {num_blocks} blocks; choose from 1 to {num_blocks} servers"
        )
    part = (num_blocks + head_blocks) / num_servers
    bounds = [0]
    for num_following in reversed(range(1, num_servers)):
        # Each server gets at least one block.
        bounds.append(min(max(round(part * len(bounds)), bounds[-1] + 1), num_blocks - num_following))
    return [f"{start}:{end}" for start, end in itertools.pairwise([*bounds, num_blocks])]


def _given_spans(blocks: str, num_blocks: int, *, must_cover: bool) -> list[str]:
    spans = blocks.replace(" ", "").split(",")
    covered: set[int] = set()
    for span in spans:
        start, _, end = span.partition(":")
        if not (start.isdecimal() and end.isdecimal() and int(start) < int(end) <= num_blocks):
            raise SettingsError(
                f"--blocks: {span!r} is not a span of this model; write start:end with 0 <= start < end <= {num_blocks}"
            )
        covered.update(range(int(start), int(end)))
    missing = sorted(set(range(num_blocks)) - covered)
    if missing and must_cover:
        raise SettingsError(f"--blocks: no server would hold block {missing[0]} of 0 to {num_blocks - 1}")
    return spans
