"""`corolla join`: adds this machine to a stack that another machine shares."""

import getpass
import ipaddress
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from corolla.chassis.channels import TLS_1_3_ONLY
from corolla.chassis.errors import CorollaError, StartupError, Unauthenticated
from corolla.cli.interruption import EXIT_INTERRUPTED, Interrupted, interruptible
from corolla.cli.stack_console import StackConsole
from corolla.local.issuer_client import address_towards, parsed_address
from corolla.local.joined_server import JoinedServer
from corolla.local.log_files import state_folder
from corolla.local.membership import Membership, joined_folder
from corolla.local.options import StackOptions
from corolla.local.stack import StackEvent
from corolla.trust.join_token import MAX_TOKEN_CHARS, JoinToken
from corolla.trust.workload import Role
from corolla.v1 import issuer_pb2 as pb

TOKEN_FILE_VARIABLE: Final = "COROLLA_JOIN_TOKEN_FILE"
_FOLLOW_INTERVAL_S: Final = 2.0
_REFRESH_S: Final = 0.2
_GRACE_S: Final = 50.0
_SOMEWHERE: Final = "192.0.2.1"
"""An address that no machine has (RFC 5737); the way to it is the default route."""
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The options of `corolla join`, which the command explains."""

    address: str
    model: str | None
    blocks: str
    capacity_blocks: int
    port: int | None
    host: str | None
    device: str
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
    server: JoinedServer | None = None
    has_joined = False
    with interruptible():
        try:
            stack = _enrolled(membership, view)
            has_joined = True
            view.report(StackEvent("step", "join", f"joined as {stack.role}; certificates are in {membership.folder}"))
            if stack.role == Role.BLOCK.value:
                text = f"COROLLA_TLS_DIR={membership.folder} corolla status --router {stack.router} shows the stack"
                view.report(StackEvent("step", "join", text))
                server = JoinedServer(_server_options(options, stack), options.blocks, stack.router, view.report)
                server.start(membership.folder, options.capacity_blocks, options.port)
            else:
                text = f"programs here reach the router {stack.router} with COROLLA_TLS_DIR={membership.folder}"
                view.report(StackEvent("ready", "join", text))
            _follow(membership, server, view)
        except Interrupted:
            if not as_json:
                view.line("join", "leaving")
        finally:
            membership.close()
            if server is not None:
                server.stop()
    return 0 if has_joined else EXIT_INTERRUPTED


def shared_folder(given: Path | None) -> Path:
    """The state folder of the stack that this machine shares."""
    return given or state_folder() / "shared"


def shared_host(given: str | None) -> str:
    """The address by which other machines reach this one. Raises StartupError if it is not known."""
    try:
        found = address_towards(_SOMEWHERE) if given is None else given
    except OSError:
        raise StartupError("this machine has no route to others; name its address with --share-host") from None
    return checked_host(found, "--share-host")


def checked_host(host: str, option: str) -> str:
    """Returns a host's IPv4 address or name. Raises StartupError for anything else."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        if address.version == 4:
            return str(address)
        wrong = "an address of IPv6, by which stacks cannot be shared yet"
    except ValueError:
        if _HOST.fullmatch(host) and not host.replace(".", "").isdecimal():
            return host
        wrong = "no host's name or address"
    raise StartupError(f"{option}: {host!r} is {wrong}; name an address of IPv4, such as 192.168.1.10")


def _enrolled(membership: Membership, view: StackConsole) -> pb.EnrolResponse:
    """Gets this machine a certificate: by the one that it has, or by a token."""
    if membership.exists:
        try:
            return _patiently(membership, view)
        except (Unauthenticated, StartupError) as refusal:
            view.report(StackEvent("problem", "join", refusal.message))
    token = _token_of_file() or _asked_token()
    try:
        return membership.enrol(token)
    except CorollaError as failure:
        # The usual advice about keys and addresses of callers would mislead.
        raise StartupError(failure.message) from None


def _patiently(membership: Membership, view: StackConsole) -> pb.EnrolResponse:
    """Waits for the first machine, which may start later than this one."""
    is_waiting = False
    while True:
        try:
            return membership.enrol()
        except (Unauthenticated, StartupError):
            raise
        except CorollaError as failure:
            if not is_waiting:
                view.report(StackEvent("problem", "join", f"{failure.message}; waiting for it"))
            is_waiting = True
        time.sleep(_FOLLOW_INTERVAL_S)


def _follow(membership: Membership, server: JoinedServer | None, view: StackConsole) -> None:
    """Keeps certificate and revocations fresh for ever.

    Raises:
        StartupError: This machine was revoked, or another stack answers.
    """
    is_reached, due_s = True, 0.0
    while True:
        if server is not None:
            server.watch()
            view.log_lines([server.process])
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + _FOLLOW_INTERVAL_S
            try:
                membership.follow(time.time())
            except (Unauthenticated, StartupError) as refusal:
                raise StartupError(refusal.message) from None
            except CorollaError as failure:
                if is_reached:
                    text = f"{failure.message}; answers under way go on, and this machine tries again"
                    view.report(StackEvent("problem", "join", text))
                is_reached = False
            else:
                if not is_reached:
                    view.report(StackEvent("recovered", "join", "this machine follows the stack again"))
                is_reached = True
        time.sleep(_REFRESH_S)


def _token_of_file() -> JoinToken | None:
    path = os.environ.get(TOKEN_FILE_VARIABLE)
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return _parsed(file.read(MAX_TOKEN_CHARS + 64))
    except (OSError, UnicodeDecodeError):
        raise StartupError(f"{TOKEN_FILE_VARIABLE}={path} cannot be read; check its path and permissions") from None


def _asked_token() -> JoinToken:
    """Asks on the terminal, without showing what is typed, or reads a line of standard input."""
    if sys.stdin is None:  # closed
        return _parsed("")
    given = getpass.getpass("token: ") if sys.stdin.isatty() else sys.stdin.readline(MAX_TOKEN_CHARS + 64)
    return _parsed(given)


def _parsed(text: str) -> JoinToken:
    token = JoinToken.parse(text.strip())
    if not text.strip():
        raise StartupError(f"give the token on the terminal, on standard input, or by {TOKEN_FILE_VARIABLE}=PATH")
    if token is None:
        raise StartupError(
            "that is no join token, which begins with cj1.; `corolla up --share` and `corolla tokens new` print one"
        )
    return token


def _server_options(options: JoinOptions, stack: pb.EnrolResponse) -> StackOptions:
    """The options of the block server. Raises StartupError if the model is not on this machine."""
    model = options.model or stack.model
    is_folder_there = options.model is None and stack.model.startswith("/")
    if is_folder_there and not Path(model).exists():
        raise StartupError(
            f"the stack serves {model} of its first machine; copy that to this machine under the same name, and say "
            "where with --model"
        )
    host, _ = parsed_address(options.address)
    return StackOptions(
        model=model, shared_host=options.host or address_towards(host), dtype=stack.dtype or None,
        quantization=stack.quantization or "none", device=options.device, num_threads=options.num_threads,
        log_folder=options.log_folder, grace_s=_GRACE_S, num_servers=1,
    )  # fmt: skip
