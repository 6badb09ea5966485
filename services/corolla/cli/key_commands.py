"""`corolla keys`: makes, lists and revokes callers' keys in a file."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from corolla.client.api.keys import KeyTable

keys = typer.Typer(name="keys", help="Makes, lists and revokes callers' keys in a file.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The file that COROLLA_API_KEYS_FILE names.")]


@keys.command()
def new(
    file: File,
    tenant: Annotated[str, typer.Option(help="Tenant that owns the key.")],
    expires_days: Annotated[
        int | None, typer.Option(min=1, max=36_500, help="Days until it expires; without it, the key never expires.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only this model; may be given several times.")] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(help="Only calls of this kind: generate, chat, sessions or tokenize; may be given several times."),
    ] = None,
) -> int:
    """Prints a new key, and adds its hash to the file. The key is stored nowhere."""
    from corolla.chassis.errors import StartupError
    from corolla.client.api.keys import NewKey, Scope

    expires = None
    if expires_days is not None:
        expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=expires_days)
    try:
        made = NewKey(tenant, expires=expires, models=model or (), scopes=[Scope(each) for each in scope or ()])
    except ValueError as failure:
        raise StartupError(str(failure)) from None
    with _changing(file) as write:
        text, _ = _read(file) if file.exists() else ("", None)
        write(text + ("" if text.endswith("\n") or not text else "\n") + made.record.line + "\n")
    sys.stdout.write(made.key + "\n")
    return 0


@keys.command("list")
def list_keys(file: File) -> int:
    """Lists the keys of a file without their secrets, each with its limits in the lines below."""
    now = datetime.now(UTC)
    _, table = _read(file)
    for record in table.records:
        if record.is_simple:
            sys.stdout.write(f"{'(no id)':16}  {record.tenant}\n")
            continue
        facts = [record.id, record.tenant, f"since {record.created:%Y-%m-%d}"]
        if record.expires is not None:
            facts.append(f"{'expired' if record.expires <= now else 'until'} {record.expires:%Y-%m-%d}")
        sys.stdout.write("  ".join(facts) + "\n")
        # Each model has a line of its own below the key, since names of models are long.
        sys.stdout.writelines(f"    only model {name}\n" for name in sorted(record.models))
        if record.scopes:
            sys.stdout.write(f"    only for {', '.join(sorted(scope.value for scope in record.scopes))}\n")
    return 0


@keys.command()
def revoke(
    file: File, key_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, from `corolla keys list`.")]
) -> int:
    """Takes a key out of the file. Client services refuse it within five seconds of seeing the change."""
    from corolla.chassis.errors import StartupError
    from corolla.client.api.keys import without_key

    with _changing(file) as write:
        text, table = _read(file)
        records = {record.id: record for record in table.records if not record.is_simple}
        if key_id not in records:
            raise StartupError(f"{file} has no key {key_id}; `corolla keys list` shows the keys that it has")
        kept = without_key(text, key_id)
        if not any(line.strip() and not line.strip().startswith("#") for line in kept.splitlines()):
            # Client services reject a file without keys, so they would continue to accept this key from the old file.
            raise StartupError(f"{key_id} is the only key of {file}; add another one with `corolla keys new` first")
        write(kept)
    sys.stdout.write(f"revoked {key_id} of {records[key_id].tenant}\n")
    return 0


@contextmanager
def _changing(file: Path) -> Iterator[Callable[[str], None]]:
    """Locks the file, so that no other process' change gets lost, and yields what writes it. Raises StartupError."""
    from corolla.chassis.errors import StartupError
    from corolla.chassis.private_files import changing, write_private

    try:
        with changing(file):
            yield lambda text: write_private(file, text.encode())
    except OSError as failure:
        raise StartupError(f"{file} cannot be written: {failure.strerror}") from None


def _read(file: Path) -> "tuple[str, KeyTable]":
    """The file's text, and its keys. Raises StartupError."""
    from corolla.chassis.errors import StartupError
    from corolla.client.api.keys import KeyTable

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise StartupError(f"{file} cannot be read; check its path and permissions") from None
    try:
        return text, KeyTable.parse(text)
    except ValueError as failure:
        raise StartupError(f"{file}: {failure}") from None
