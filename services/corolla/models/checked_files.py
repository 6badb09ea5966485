"""Which files of the cache were read and found right: each is read once in a process's life for that."""

from pathlib import Path
from typing import Final

Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """What changes when a file is replaced; None: there is none, or a link to nothing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


class CheckedFiles:
    """Files as they were when they were found right."""

    def __init__(self) -> None:
        self._stamps: dict[Path, Stamp] = {}

    def note(self, path: Path, stamp: Stamp) -> None:
        """The file is right if it still has the stamp that it had before it was read."""
        self._stamps[path] = stamp

    def __contains__(self, path: Path) -> bool:
        """Whether the file was found right and has not changed since."""
        return path in self._stamps and self._stamps[path] == stamp_of(path)


OF_THIS_PROCESS: Final = CheckedFiles()
"""Incarnations of a block server follow each other in one process, and need not read again what they share."""
