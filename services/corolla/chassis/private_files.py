"""Writes and locks files that hold secrets, and makes folders for them."""

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Writes a file completely or not at all, readable by its owner only. A symbolic link stays a link.

    What is written outlives a loss of power.

    Raises:
        OSError: The file cannot be written; the old content stays, and the new content is deleted.
    """
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # O_EXCL: in a shared folder, another user's file or link of that name must not receive the content.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Locks a file while the caller reads and rewrites it, against all processes of this machine that use this lock.

    The lock is on the file's folder, because the file itself is replaced. For a link, the folder of its target is
    locked.

    Raises:
        OSError: The folder does not exist or cannot be locked.
    """
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def hold(path: Path) -> int:
    """Returns a descriptor that holds a lock file until it is closed or this process ends.

    Raises:
        BlockingIOError: Another process of this machine holds it.
        OSError: The file cannot be made.
    """
    held = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(held)
        raise
    return held


def make_private_folder(folder: Path) -> None:
    """Makes a folder that only its owner may read, unless there is one.

    Raises:
        OSError: The folder cannot be made, or PermissionError: others can read or write it, or own it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(errno.EACCES, "other users can read or write the folder", str(folder))


def is_private(folder: Path) -> bool:
    """The folder belongs to this user alone. If it lies in a shared one, another user may have created it."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
