"""Files of one folder that belong together, and that other programs renew while this process runs."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from corolla.chassis.errors import SettingsError

log = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 2.0
_MOST_READS: Final = 8

Contents = tuple[bytes, ...]


class WatchedFiles:
    """Reads the files, and reads them again when they have changed.

    An invalid change, such as a key of another certificate, is logged once, and the old contents stay. Such a change is
    seen while another program writes the files one by one.

    Args:
        variable: The name of the setting that names the folder, for errors.
        take: A function that gets the contents of the files, in any thread. It raises ValueError or OSError for invalid
            contents.
        named: The value of the setting, if it differs from `folder`.
        optional: The names of further files, whose contents are empty while they are missing.

    Raises:
        SettingsError: A file is missing, or the contents are invalid at the start.
    """

    def __init__(
        self,
        variable: str,
        folder: Path,
        names: Sequence[str],
        take: Callable[[Contents], None],
        named: Path | None = None,
        optional: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._names = names
        self._optional = optional
        self._take = take
        self._bad: Contents | None = None
        try:
            self._taken = self._take_all()
        except (OSError, ValueError) as failure:
            raise SettingsError(f"{variable}={named or folder}: {_sentence(failure)}") from None

    async def run(self) -> None:
        """Looks for changes of the files again and again, for ever."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Reads the files, and uses them if they have changed."""
        contents: Contents | None = None
        try:
            contents = self._read()
            if contents in (self._taken, self._bad):
                return
            self._taken = self._take_all()
        except (OSError, ValueError) as failure:
            self._bad = contents
            log.error("cannot use the changed files; continuing with the old ones", extra={"cause": _sentence(failure)})
        else:
            log.info("now using the changed files", extra={"folder": str(self._folder)})

    def _take_all(self) -> Contents:
        for _ in range(_MOST_READS):
            contents = self._read()
            self._take(contents)
            # `take` may have read the files itself, so their contents must still be the same. They may not be at a
            # start, when an issuer that starts at the same time writes its revocations.
            if self._read() == contents:
                return contents
        raise ValueError("the files change again and again while they are read")

    def _read(self) -> Contents:
        needed = [(self._folder / name).read_bytes() for name in self._names]
        return (*needed, *(_contents(self._folder / name) for name in self._optional))


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _sentence(failure: Exception) -> str:
    if isinstance(failure, ssl.SSLError):
        return "certificate, key and authority do not belong together, or are not in PEM"
    if isinstance(failure, OSError):
        return f"{Path(failure.filename or '').name or 'a file'} cannot be read: {failure.strerror}"
    return str(failure)
