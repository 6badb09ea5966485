"""What a local stack is to look like."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from corolla.chassis.errors import SettingsError

DEFAULT_ROUTER_PORT = 50050
DEFAULT_CLIENT_PORT = 50051
DEFAULT_HTTP_PORT = 8080


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """A local stack.

    Attributes:
        model: checkpoint folder, GGUF file, hub id or "demo".
        num_servers: block servers; without `blocks` they get even parts of the model.
        blocks: spans such as "0:10,10:30", one server for each; "auto" lets the router choose; empty is even parts.
        port: of the client service; None takes the usual one if it is free, 0 any free one.
        http_port: of the client service's HTTP, likewise.
        router_port: of the router, likewise.
        redis_url: of a running Redis; None starts an embedded one.
        host: address that the client service listens on; everything else stays on the loopback address.
        dtype: of weights, cache and wire.
        quantization: of the block servers' weights: "none", "int8", "int4" or "packed".
        num_threads: torch threads of each process.
        log_folder: where each process gets its log file.
        environment: more variables for all processes, such as `COROLLA_LEASE_MS`.
        is_secure: whether the processes show each other certificates, and Redis asks for a password.
        restarts: whether a process that dies is started again.
        start_timeout_s: seconds until all must be ready, once the model is there.
        grace_s: seconds that a process gets to end by itself.
    """

    model: str = "demo"
    num_servers: int = 2
    blocks: str = ""
    port: int | None = 0
    http_port: int | None = 0
    router_port: int | None = 0
    redis_url: str | None = None
    host: str = "127.0.0.1"
    dtype: str = "float32"
    quantization: str = "none"
    num_threads: int = 1
    log_folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    is_secure: bool = True
    restarts: bool = True
    start_timeout_s: float = 180.0
    grace_s: float = 5.0


def server_blocks(options: StackOptions, num_blocks: int, head_blocks: float = 0.0) -> list[str]:
    """What each block server is ordered to hold: `start:end`, or `auto`.

    Even parts have the same work; the last one has the head, too.

    Args:
        head_blocks: as many blocks are as much work as the head.

    Raises:
        SettingsError: the spans are not such, leave blocks out, or there are more servers than blocks.
    """
    if options.blocks == "auto":
        return ["auto"] * options.num_servers
    if options.blocks:
        return _given_spans(options.blocks, num_blocks)
    if not 1 <= options.num_servers <= num_blocks:
        raise SettingsError(
            f"{options.num_servers} servers cannot share {num_blocks} blocks; choose from 1 to {num_blocks} servers"
        )
    part = (num_blocks + head_blocks) / options.num_servers
    bounds = [0]
    for num_following in reversed(range(1, options.num_servers)):
        # Everybody gets a block.
        bounds.append(min(max(round(part * len(bounds)), bounds[-1] + 1), num_blocks - num_following))
    return [f"{start}:{end}" for start, end in itertools.pairwise([*bounds, num_blocks])]


def _given_spans(blocks: str, num_blocks: int) -> list[str]:
    spans = blocks.replace(" ", "").split(",")
    covered: set[int] = set()
    for span in spans:
        start, _, end = span.partition(":")
        if not (start.isdecimal() and end.isdecimal() and int(start) < int(end) <= num_blocks):
            raise SettingsError(
                f"--blocks: {span!r} is no span of this model; write start:end with 0 <= start < end <= {num_blocks}"
            )
        covered.update(range(int(start), int(end)))
    missing = sorted(set(range(num_blocks)) - covered)
    if missing:
        raise SettingsError(f"--blocks: nobody would hold block {missing[0]} of 0 to {num_blocks - 1}")
    return spans
