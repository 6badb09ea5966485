"""`corolla join`: adds this machine to a stack that another machine shares."""

import getpass
import ipaddress
import math
import os
import re
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from corolla.chassis.addresses import addresses_of
from corolla.chassis.channels import TLS_1_3_ONLY
from corolla.chassis.errors import CorollaError, ReleaseMismatch, StartupError, Unauthenticated
from corolla.chassis.host_memory import available_bytes
from corolla.chassis.processors import available_cores
from corolla.chassis.threads import begun_apart
from corolla.cli.enrolment import parsed_token, token_of_file
from corolla.cli.interruption import EXIT_INTERRUPTED, Interrupted, interruptible
from corolla.cli.stack_console import StackConsole
from corolla.local import readiness
from corolla.local.issuer_client import address_towards, parsed_address
from corolla.local.joined_servers import JoinedServers
from corolla.local.log_files import state_folder
from corolla.local.membership import Membership, joined_folder
from corolla.local.model_fetch import EITHER, ModelFacts
from corolla.local.options import StackOptions
from corolla.local.processes import weights_mib
from corolla.local.supervisor import StackEvent
from corolla.models.cache_folder import fetched_models_folder
from corolla.models.demo import DEMO_MODEL
from corolla.models.model_manifest import DIGEST_BYTES
from corolla.planning.fingerprints import what_differs
from corolla.trust.credentials import Credentials
from corolla.trust.join_token import MAX_TOKEN_CHARS, JoinToken
from corolla.trust.workload import Role
from corolla.v1 import issuer_pb2 as pb
from corolla.v1 import router_pb2

FOLLOW_INTERVAL_S: Final = 2.0
_REFRESH_S: Final = 0.2
_NOTICE_S: Final = 5.0
GRACE_S: Final = 50.0
_GIB: Final = 1 << 30
_SOMEWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses that no machine has (RFC 5737, RFC 3849); the way to them is the default route."""
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The options of `corolla join`, which the command explains. `device` None stands for what the machine has."""

    address: str
    model: str | None
    blocks: str
    capacity_blocks: int
    port: int | None
    spare_mib: int = 0
    host: str | None
    device: str | None
    num_threads: int
    log_folder: Path


def run_join(options: JoinOptions, *, verbose: bool, as_json: bool) -> int:
    """Joins a stack and serves until SIGINT, SIGTERM or SIGHUP.

    Returns:
        The exit status: 0; 130 if a signal came before this machine had joined.
    """
    # Nothing is asked for, and no use of a token spent, before the addresses can be right.
    checked_host(parsed_address(options.address)[0], "HOST:PORT")
    if options.host is not None:
        checked_host(options.host, "--host")
    os.environ.setdefault(*TLS_1_3_ONLY)
    view = StackConsole(verbose=verbose, as_json=as_json)
    membership = Membership(options.address, joined_folder(options.address))
    servers: JoinedServers | None = None
    has_joined = False
    leaving = threading.Event()
    with interruptible():
        try:
            stack = _enrolled(membership, view)
            has_joined = True
            view.report(StackEvent("step", "join", f"joined as {stack.role}; certificates are in {membership.folder}"))
            if stack.role == Role.BLOCK.value:
                text = f"COROLLA_TLS_DIR={membership.folder} corolla status --router {stack.router} shows the stack"
                view.report(StackEvent("step", "join", text))
                server_options = options_of_servers(options, stack)
                servers = JoinedServers(server_options, membership.folder, stack.router, view.report)
                _prepare(servers, server_options, options, stack, membership, view)
                servers.start()
            else:
                text = f"programs here reach the router {stack.router} with COROLLA_TLS_DIR={membership.folder}"
                view.report(StackEvent("ready", "join", text))
            following = begun_apart(partial(_follow, membership, view, leaving))
            while not following.done():
                if servers is not None:
                    view.log_lines(servers.processes)
                time.sleep(_REFRESH_S)
            following.result()
        except Interrupted:
            if not as_json:
                view.line("join", "leaving")
        finally:
            leaving.set()
            membership.close()
            if servers is not None:
                servers.stop()
    return 0 if has_joined else EXIT_INTERRUPTED


def shared_folder(given: Path | None) -> Path:
    """The state folder of the stack that this machine shares."""
    return given or state_folder() / "shared"


def shared_host(given: str | None) -> str:
    """The address by which other machines reach this one. Raises StartupError if it is not known."""
    if given is not None:
        return checked_host(given, "--share-host")
    for somewhere in _SOMEWHERE:
        try:
            return checked_host(address_towards(somewhere), "--share-host")
        except (OSError, StartupError):
            continue
    raise StartupError("this machine has no route to others; name its address with --share-host") from None


def checked_host(host: str, option: str) -> str:
    """Returns a host's name, or its address without brackets. Raises StartupError for anything else."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        if not (address.is_link_local or address.is_unspecified or address.is_multicast):
            return str(address)
        wrong = "an address that other machines cannot use"
    except ValueError:
        if _HOST.fullmatch(host) and not host.replace(".", "").isdecimal():
            return host
        wrong = "no host's name or address"
    raise StartupError(f"{option}: {host!r} is {wrong}; name one such as 192.168.1.10 or 2001:db8::10")


def _enrolled(membership: Membership, view: StackConsole) -> pb.EnrolResponse:
    """Gets this machine a certificate: by the one that it has, or by a token."""
    if membership.exists:
        try:
            return _patiently(membership, view)
        except ReleaseMismatch:
            raise
        except (Unauthenticated, StartupError) as refusal:
            view.report(StackEvent("problem", "join", refusal.message))
    token = token_of_file() or _asked_token()
    try:
        return begun_apart(partial(membership.enrol, token)).result()
    except CorollaError as failure:
        # The usual advice about keys and addresses of callers would mislead.
        raise StartupError(failure.message) from None


def _patiently(membership: Membership, view: StackConsole) -> pb.EnrolResponse:
    """Waits for the first machine, which may start later than this one."""
    is_waiting = False
    while True:
        try:
            return begun_apart(membership.enrol).result()
        except (Unauthenticated, StartupError):
            raise
        except CorollaError as failure:
            if not is_waiting:
                view.report(StackEvent("problem", "join", f"{failure.message}; waiting for it"))
            is_waiting = True
        time.sleep(FOLLOW_INTERVAL_S)


def _follow(membership: Membership, view: StackConsole, leaving: threading.Event) -> None:
    """Keeps certificate and revocations fresh until this machine leaves.

    Raises:
        StartupError: This machine was revoked, or another stack answers.
    """
    is_reached = True
    while not leaving.wait(FOLLOW_INTERVAL_S):
        try:
            membership.follow()
        except (Unauthenticated, StartupError) as refusal:
            raise StartupError(refusal.message) from None
        except CorollaError as failure:
            if is_reached and not leaving.is_set():
                text = f"{failure.message}; answers under way go on, and this machine tries again"
                view.report(StackEvent("problem", "join", text))
            is_reached = False
        else:
            if not is_reached:
                view.report(StackEvent("recovered", "join", "this machine follows the stack again"))
            is_reached = True


def _prepare(
    servers: JoinedServers, server_options: StackOptions, options: JoinOptions, stack: pb.EnrolResponse,
    membership: Membership, view: StackConsole,
) -> None:  # fmt: skip
    """Finds out what this machine can do, shows it, and refuses what cannot work before any weight is read.

    Raises:
        StartupError: The sentence says what to change.
    """
    # The model's files may come from servers that only the router knows.
    placement = _placement(stack, membership.folder, view)
    facts = servers.model_facts(options.device or EITHER)
    server_options = replace(server_options, device=facts.device)
    servers.plan(server_options, facts, options.blocks, options.capacity_blocks, options.port)
    capacity = checked_capacity(facts, server_options, options.blocks, options.capacity_blocks)
    check_weights(facts, placement)
    for address in servers.addresses:
        _, port = parsed_address(address)
        begun_apart(partial(membership.check_reach, server_options.shared_host, port)).result()
    view.facts("machine", machine_facts(facts, server_options, servers.addresses, capacity, placement))


def _placement(stack: pb.EnrolResponse, tls_dir: Path, view: StackConsole) -> router_pb2.Placement:
    """Waits for the router, which starts later than the issuer, and returns the placement."""
    probe = readiness.Probe(stack.router, Credentials(tls_dir).for_channels())
    give_notice = time.monotonic() + _NOTICE_S
    try:
        while (placement := probe.placement("")) is None:
            if time.monotonic() > give_notice:
                give_notice = math.inf
                text = f"no router answers at {stack.router}; waiting for it. Is this port of the first machine open?"
                view.report(StackEvent("problem", "join", text))
            time.sleep(_REFRESH_S)
    finally:
        probe.close()
    return placement


def check_weights(facts: ModelFacts, placement: router_pb2.Placement) -> None:
    """Checks that this machine's model is that of the stack's servers. Raises StartupError."""
    if placement.model not in ("", facts.name):
        raise StartupError(
            f"the stack serves {placement.model}, and this machine has {facts.name}; name the stack's model with "
            "--model"
        )
    if placement.num_model_blocks not in (0, facts.num_blocks):
        raise StartupError(
            f"the stack serves a {facts.name} of {placement.num_model_blocks} blocks, and that of this machine has "
            f"{facts.num_blocks}; name the stack's model with --model"
        )
    fingerprints = {each.server.fingerprint for each in placement.servers}
    if fingerprints and facts.fingerprint not in fingerprints:
        differs = what_differs(facts.fingerprint_parts, placement.servers)
        raise StartupError(f"{differs}; use the same model files and settings as the first machine")


def checked_capacity(facts: ModelFacts, options: StackOptions, blocks: str, capacity_blocks: int) -> int:
    """Returns the most blocks that each block server can hold; 0: its GPU decides.

    Raises:
        StartupError: Memory or disk are too small.
    """
    most = min(capacity_blocks or facts.num_blocks, facts.num_blocks)
    least = 1
    if blocks != "auto":
        start, _, end = blocks.partition(":")
        if not (start.isdecimal() and end.isdecimal() and int(start) < int(end) <= facts.num_blocks):
            raise StartupError(
                f"--blocks: {blocks!r} is not a span of this model; write start:end, up to {facts.num_blocks}"
            )
        most = least = int(end) - int(start)
    elif options.is_on_cpu and (mib := int(os.environ.get("COROLLA_WEIGHTS_MIB", 0)) or weights_mib(options)):
        most = min(most, (mib << 20) // facts.block_bytes)
    if most < 1:
        raise StartupError(
            f"this machine has {(available_bytes() or 0) / _GIB:.1f} GiB of memory available, and one block takes "
            f"{facts.block_bytes / _GIB:.2f} GiB next to keys and values: end other programs here, or set "
            "COROLLA_WEIGHTS_MIB"
        )
    share = least / facts.num_blocks
    if facts.disk_bytes < facts.missing_bytes * share:
        variable = "COROLLA_CACHE" if "COROLLA_MANIFEST" in options.environment else "HF_HOME"
        raise StartupError(
            f"{facts.disk} has {facts.disk_bytes / _GIB:.1f} GiB free, and the weights of {least} of "
            f"{facts.num_blocks} blocks take {facts.missing_bytes * share / _GIB:.1f} GiB; make room there, or name "
            f"another folder by {variable}"
        )
    return most if options.is_on_cpu or blocks != "auto" else 0


def machine_facts(
    facts: ModelFacts, options: StackOptions, addresses: list[str], capacity: int, placement: router_pb2.Placement
) -> dict[str, Any]:
    """What this machine will do, for people and for programs."""
    available = available_bytes()
    devices = [name for name, _ in facts.devices] or ["cpu"]
    uncovered = [f"{each.start}:{each.end}" for each in placement.uncovered]
    return {
        "devices": devices,
        "memory": "not known" if available is None else f"{available / _GIB:.1f} GiB available",
        "processors": f"{available_cores()}, of which each server uses {options.num_threads}",
        "addresses": addresses,
        "model": f"{facts.name}, {facts.num_blocks} blocks of {facts.block_bytes / _GIB:.3f} GiB "
        f"in {options.dtype_name}",
        "holds": f"up to {capacity} blocks" if capacity else "as many blocks as fit into the GPU",
        "fetches": f"at most {facts.missing_bytes / _GIB:.2f} GiB of weights to {facts.disk}"
        if facts.missing_bytes
        else "nothing; the weights are here",
        "stack": f"{len(placement.servers)} block servers; without one: {', '.join(uncovered) or 'no block'}",
    }


def _asked_token() -> JoinToken:
    """Asks on the terminal, without showing what is typed, or reads a line of standard input."""
    if sys.stdin is None:  # closed
        return parsed_token("")
    given = getpass.getpass("token: ") if sys.stdin.isatty() else sys.stdin.readline(MAX_TOKEN_CHARS + 64)
    return parsed_token(given)


def options_of_servers(options: JoinOptions, stack: pb.EnrolResponse) -> StackOptions:
    """The options of the block servers. Raises StartupError if neither this machine nor others have the model."""
    model, environment = options.model or stack.model, {"COROLLA_SPARE_MIB": str(options.spare_mib)}
    is_path, is_shared = stack.model.startswith("/"), len(stack.manifest) == DIGEST_BYTES
    is_here = options.model is not None or model == DEMO_MODEL or (is_path and Path(model).exists())
    if is_path and not is_here and not is_shared:
        raise StartupError(
            f"the stack serves {model} of its first machine, which does not share the files; copy them to this "
            "machine, and say where with --model"
        )
    if is_shared and not is_here:
        manifest = fetched_models_folder() / f"{stack.manifest.hex()}.json"
        environment["COROLLA_MANIFEST"] = str(manifest)
        model = str(manifest.with_suffix(""))
        try:
            Path(model).mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise StartupError(f"cannot make {model}: {failure.strerror}; set COROLLA_CACHE to a folder") from None
    return StackOptions(
        model=model, shared_host=_own_address(options), dtype=stack.dtype or None,
        quantization=stack.quantization or "none", device=options.device or "cpu", num_threads=options.num_threads,
        log_folder=options.log_folder, grace_s=GRACE_S, num_servers=1, environment=environment,
    )  # fmt: skip


def _own_address(options: JoinOptions) -> str:
    """The address that this machine registers, which routers compare with the one that calls come from."""
    if options.host is None:
        return address_towards(parsed_address(options.address)[0])
    try:
        return addresses_of(options.host)[0]
    except OSError:
        raise StartupError(f"--host: no machine has the name {options.host}; name an address of this machine") from None
