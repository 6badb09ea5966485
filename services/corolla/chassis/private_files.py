"""Files that hold secrets."""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, readable by its owner only. A link stays one.

    Raises:
        OSError: it cannot be written; what there was stays, and nothing of the new content.
    """
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # Exclusively: in a folder for all, somebody else's file or link of that name must not get it.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Whoever reads a file to write it again does so in here: one at a time, in any process of this machine.

    The lock is on the file's folder, which stays when the file is replaced. A link leads to the folder of its target.

    Raises:
        OSError: there is no such folder, or it cannot be locked.
    """
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
