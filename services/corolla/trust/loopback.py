"""The folder where a stack on this machine keeps certificates, so that the user's other programs find theirs."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from corolla.chassis.errors import StartupError
from corolla.chassis.private_files import is_private
from corolla.trust.workload import Role

VARIABLE: Final = "COROLLA_TLS_DIR"
_OWNER_FILE: Final = "stack.pid"
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")


def make_folder(router: str) -> Path:
    """Creates an empty private folder for the certificates of a stack, named after its router's port.

    Raises:
        StartupError: Other users can read or write the folder around it, or it cannot be made.
    """
    own, folder = _own_folder(), _folder_of(router)
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(own):
            raise StartupError(
                f"other users can read or write {own}; remove it, or set XDG_RUNTIME_DIR to a folder of your own"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        (folder / _OWNER_FILE).write_text(str(os.getpid()))
    except OSError as failure:
        raise StartupError(
            f"cannot make {folder}: {failure.strerror}; set XDG_RUNTIME_DIR to a folder of your own"
        ) from None
    return folder


def tls_dir(router: str, role: Role, given: str | Path | None = None) -> Path | None:
    """Returns the folder of the certificates with which a program of this user calls a router; None: no encryption.

    It is `given`, or else `COROLLA_TLS_DIR`, or else the folder that a stack on this machine has made for the role.

    Args:
        given: The folder that the caller names, if any.
    """
    if named := given or os.environ.get(VARIABLE):
        return Path(named)
    host = router.rpartition(":")[0]
    folder = _folder_of(router)
    is_left = host in _LOOPBACK and is_private(_own_folder()) and _has_living_owner(folder)
    return folder / role.value if is_left else None


def _own_folder() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"corolla-{os.geteuid()}"


def _folder_of(router: str) -> Path:
    return _own_folder() / router.rpartition(":")[2]


def _has_living_owner(folder: Path) -> bool:
    """The stack of this folder is running.

    A killed stack leaves its folder, and a stack without certificates may use the same port now.
    """
    try:
        os.kill(int((folder / _OWNER_FILE).read_text()), 0)
    except (OSError, ValueError):
        return False
    return True
