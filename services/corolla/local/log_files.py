"""The children's log files, read while they grow."""

from pathlib import Path


class LogFile:
    """One child's log. Reading never disturbs the child."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        """Whole lines since the last call."""
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
        """The end of the file, without disturbing `new_lines`."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        return data.decode(errors="replace").rstrip("\n").split("\n")[-num_lines:] if data else []
