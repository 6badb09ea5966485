"""The parent's end of the fork server, which starts all children; see `corolla.local.fork_server_process`."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from corolla.local.fork_server_process import END_GRACE_S, ForkRequest

_TITLE_LENGTH = 80


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a child. `status` is its exit status, or the negative number of the signal that killed it."""

    name: str
    pid: int
    status: int

    @property
    def how(self) -> str:
        """The end of the child in words."""
        if self.status >= 0:
            return f"ended with status {self.status}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"was killed by signal {-self.status}"


class ForkServer:
    """Starts children by name, and knows which of them live. Several threads may use it."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._changed = threading.Condition()
        self._pids: dict[str, int | None] = {}
        self._exits: list[Exit] = []
        self._warm_s: list[float] = []
        with log.open("ab") as log_file:
            self._process = subprocess.Popen(
                # Titles later overwrite this command line; the last argument only makes room for them.
                [sys.executable, "-m", "corolla.local.fork_server_process", "-" * _TITLE_LENGTH],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=dict(environment),
                # A terminal's signals stay with the parent, which stops the children in order.
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="fork server", daemon=True)
        self._reader.start()

    def warm(self, modules: Sequence[str]) -> None:
        """Imports modules that children started later will need."""
        self._command({"do": "warm", "modules": list(modules)})

    def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        title: str = "",
        is_forked: bool = True,
    ) -> None:
        """Starts the child `name`, which runs `main(arguments)` of a module, once all earlier commands are done.

        Args:
            title: the command line that `ps` shows; empty: `corolla NAME`.
            is_forked: whether the child continues the fork server's imports; else it starts a new interpreter.
        """
        request = ForkRequest(
            name, module, list(arguments), dict(environment), str(log), title or f"corolla {name}", is_forked
        )
        with self._changed:
            self._pids[name] = None
            self._exits = [each for each in self._exits if each.name != name]
        self._command({"do": "start", "request": asdict(request)})

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to the child if it lives."""
        self._command({"do": "signal", "name": name, "number": number})

    def pid(self, name: str) -> int | None:
        """The process id of a child; None while it does not live."""
        with self._changed:
            return self._pids.get(name)

    def is_gone(self, name: str) -> bool:
        """No child of this name lives or is about to start."""
        with self._changed:
            return name not in self._pids

    def take_exits(self) -> list[Exit]:
        """Returns the ends of the children that have ended since the last call."""
        with self._changed:
            exits, self._exits = self._exits, []
            return exits

    def wait_gone(self, names: Sequence[str], timeout_s: float) -> list[str]:
        """Waits until the children have ended. Returns the names of the children that still live after `timeout_s`."""
        give_up = time.monotonic() + timeout_s
        with self._changed:
            while remaining := [name for name in names if name in self._pids]:
                left_s = give_up - time.monotonic()
                if left_s <= 0:
                    return remaining
                self._changed.wait(left_s)
        return []

    @property
    def warm_s(self) -> float:
        """The seconds that imports have taken so far."""
        return sum(self._warm_s)

    def close(self) -> None:
        """Ends the fork server and, with it, every child that still lives."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(2 * END_GRACE_S + 1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _command(self, command: dict[str, object]) -> None:
        if self._process.stdin is None:
            return
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            # The fork server has ended, and the children with it; `_read` records that.
            return

    def _read(self) -> None:
        for line in self._process.stdout or ():
            event = json.loads(line)
            with self._changed:
                if event["event"] == "started":
                    self._pids[event["name"]] = event["pid"]
                elif event["event"] == "exited":
                    # The child may have been started again meanwhile.
                    if self._pids.get(event["name"]) == event["pid"]:
                        del self._pids[event["name"]]
                    self._exits.append(Exit(event["name"], event["pid"], event["status"]))
                elif event["event"] == "warm":
                    self._warm_s.append(event["seconds"])
                self._changed.notify_all()
        with self._changed:
            self._exits.extend(Exit(name, pid or 0, -9) for name, pid in self._pids.items())
            self._pids.clear()
            self._changed.notify_all()
