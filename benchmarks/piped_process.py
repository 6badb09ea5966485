"""Another engine in a process of its own, asked and answered in lines of JSON: it may have a Python of its own."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self


class PipedProcess:
    """Says "ready" once it can be asked, and then one line for each request.

    Raises:
        RuntimeError: it does not begin.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip
        if self._read() != "ready":
            raise RuntimeError(f"this does not begin; try it by hand: {' '.join(command)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, request: Mapping[str, Any]) -> Any:
        """The answer to a request."""
        if self._process.stdin is None:
            raise RuntimeError("the process has no pipes")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def _read(self) -> str:
        if self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        return self._process.stdout.readline().strip()
