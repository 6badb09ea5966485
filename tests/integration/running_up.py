"""`corolla up` as a child process."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

COROLLA = [sys.executable, "-m", "corolla"]


class RunningUp:
    """`corolla up --json` as a child."""

    def __init__(self, folder: Path, *options: str, corolla: Sequence[str] = COROLLA) -> None:
        self.log_folder = folder / "logs"
        # Others have stacks up at the same time.
        ports = ["--port", "0", "--http-port", "0", "--router-port", "0"]
        command = [*corolla, "up", "--json", *ports, "--log-folder", str(self.log_folder)]
        self._errors = (folder / "errors").open("wb")
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=self._errors, text=True)
        self.events: list[dict[str, Any]] = []
        self.addresses = self.wait_for(lambda event: event["event"] == "addresses")
        self.pids: dict[str, int] = self.addresses["processes"]

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Reads events until one is wanted. The test's own time limit ends a vain wait."""
        for line in self.process.stdout or ():
            event: dict[str, Any] = json.loads(line)
            self.events.append(event)
            if wanted(event):
                return event
        pytest.fail(f"the stack ended: {self.events[-3:]}, {Path(self._errors.name).read_text()}")

    def end(self, number: int = signal.SIGINT) -> int:
        """Returns the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(40)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._errors.close()
        return status
