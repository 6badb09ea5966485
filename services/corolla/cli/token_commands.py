"""`corolla tokens`: makes, lists and revokes the tokens by which machines join a shared stack."""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corolla.cli.stack_commands import StateFolder

if TYPE_CHECKING:
    from corolla.issuer.register_file import RegisterFile

tokens = typer.Typer(
    name="tokens", help="Makes, lists and revokes tokens by which machines join a shared stack.", no_args_is_help=True
)

_WARNING = "corolla: a machine that joins as a client service may act in the name of any tenant\n"


@tokens.command()
def new(
    uses: Annotated[int, typer.Option(min=1, max=1024, help="How many machines may join by it.")] = 16,
    hours: Annotated[int, typer.Option(min=1, max=8760, help="Hours until it ends.")] = 24,
    library: Annotated[
        str | None,
        typer.Option(metavar="TENANT", help="For a library of this tenant, not a block server.", show_default=False),
    ] = None,
    client: Annotated[bool, typer.Option("--client", help="For a client service, not a block server.")] = False,
    state_folder: StateFolder = None,
) -> int:
    """Prints a new token. Its secret is stored nowhere."""
    from corolla.trust.workload import Role

    if client and library is not None:
        raise typer.BadParameter("--client and --library exclude each other")
    role = Role.CLIENT if client else Role.BLOCK if library is None else Role.LIBRARY
    if client:
        sys.stderr.write(_WARNING)
    token = _register(state_folder).new_token(role, library or "", uses, hours * 3600)
    sys.stdout.write(token.written + "\n")
    return 0


@tokens.command()
def pods(
    folder: Annotated[Path, typer.Argument(help="The folder, which becomes a Secret and is deleted then.")],
) -> int:
    """Makes an authority, and a token for each kind of pod, where the chart cannot make them: with Argo CD."""
    from corolla.issuer.role_tokens import RoleTokens

    RoleTokens.make(folder)
    sys.stdout.write(f"kubectl create secret generic RELEASE-identities --from-file={folder}\n")
    return 0


@tokens.command("list")
def list_tokens(state_folder: StateFolder = None) -> int:
    """Lists the tokens without their secrets, and the machines that joined by each."""
    register, now = _register(state_folder).register(), time.time()
    of_token: dict[str, list[str]] = {}
    for machine in register.machines:
        state = "revoked" if machine.revoked else "joined"
        ends = machine.certificates[-1][1] if machine.certificates else 0
        facts = f"    {machine.id}  {_role(machine.role.value, machine.name, machine.id)}  {state}"
        of_token.setdefault(machine.token, []).append(f"{facts}  certificate until {_date(ends)}\n")
    for token in register.tokens:
        state = "revoked" if token.revoked else "expired" if token.expires <= now else f"{token.uses} uses left"
        facts = f"{token.id}  {_role(token.role.value, token.tenant, '')}  {state}  until {_date(token.expires)}\n"
        sys.stdout.writelines([facts, *of_token.pop(token.id, [])])
    for token_id, machines in of_token.items():
        sys.stdout.writelines([f"{token_id}  (gone)\n", *machines])
    return 0


@tokens.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="ID", help="Id of a token or machine, from `corolla tokens list`.")],
    machines: Annotated[bool, typer.Option("--machines", help="Revoke all machines that joined by it, too.")] = False,
    state_folder: StateFolder = None,
) -> int:
    """Revokes a token, so that no further machine joins by it; or a machine, which is out within ten seconds."""
    with _register(state_folder).changing() as register:
        number = register.revoke(name, with_machines=machines)
    sys.stdout.write(f"revoked {name}" + (f"; machines that are out: {number}" if number else "") + "\n")
    return 0


def _register(state_folder: "StateFolder") -> "RegisterFile":
    """The register of a shared stack. Raises StartupError if there is none in the folder."""
    from corolla.chassis.errors import StartupError
    from corolla.cli.join import shared_folder
    from corolla.issuer.register_file import RegisterFile
    from corolla.trust.authority import AUTHORITY_KEY_FILE

    folder = shared_folder(state_folder)
    if not (folder / AUTHORITY_KEY_FILE).exists():
        raise StartupError(f"no stack was shared from {folder}; start one with `corolla up --share`")
    return RegisterFile(folder)


def _role(role: str, name: str, machine_id: str) -> str:
    return f"{role}:{name}" if role == "library" and name != machine_id else role


def _date(unix_s: int) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC"
