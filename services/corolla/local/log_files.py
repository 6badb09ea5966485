"""Finds the folder of a stack's log files, and reads them while they grow."""

import os
import shutil
import time
from pathlib import Path
from typing import Final

_NUM_KEPT_LOG_FOLDERS: Final = 20


class LogFile:
    """The log file of one child, which can be read while the child writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        """Returns the whole lines that were written since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def last_lines(self, num_lines: int = 12) -> list[str]:
        """Returns the last lines of the file, without any effect on `new_lines`."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        return data.decode(errors="replace").rstrip("\n").split("\n")[-num_lines:] if data else []

    def refusal(self) -> str | None:
        """Why nothing can be written to the file, such as a full disk; None if something can."""
        try:
            with self.path.open("ab", buffering=0) as file:
                file.write(b"\n")
        except OSError as failure:
            return failure.strerror
        return None


def with_log(sentence: str, log: LogFile) -> str:
    """Returns a sentence with the end of a log file, or with why there is none."""
    lines = [f"    {line}" for line in log.last_lines()]
    if lines:
        return "\n".join([f"{sentence}; the end of {log.path}:", *lines])
    if (reason := log.refusal()) is not None:
        return f"{sentence}; {log.path} cannot be written: {reason}"
    return f"{sentence}; {log.path} is empty"


def state_folder() -> Path:
    """The folder for state files: `$XDG_STATE_HOME/corolla`, else `~/.local/state/corolla`."""
    given = os.environ.get("XDG_STATE_HOME")
    return (Path(given) if given else Path.home() / ".local" / "state") / "corolla"


def new_log_folder() -> Path:
    """Returns a path for the log folder of this start, and deletes old log folders except the newest."""
    logs = state_folder() / "logs"
    for old in sorted(logs.glob("2*"))[: 1 - _NUM_KEPT_LOG_FOLDERS]:
        shutil.rmtree(old, ignore_errors=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime())
    return logs / f"{stamp}-{os.getpid()}"
