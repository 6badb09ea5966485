"""The process whose children are all services of a local stack.

Importing torch and transformers takes seconds of processor time, which a machine with few cores would spend again for
every service. This process imports them once and forks. It never starts a thread, opens a gRPC object or computes, so a
fork copies nothing that would break.

It lives no longer than whoever started it: when its standard input ends, or its parent is another one than before, all
children get SIGTERM and, seconds later, SIGKILL. The kernel kills them as well should this process itself vanish.

Commands come in on standard input and events go out on standard output, one JSON object a line;
`corolla.local.fork_server` is the other end.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END_GRACE_S = 3.0
_POLL_S = 0.5
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


@dataclass(frozen=True)
class Birth:
    """What a new child is to run: `main(arguments)` of a module, with its output in the file `log`.

    Attributes:
        title: what `ps` shows of it.
    """

    name: str
    module: str
    arguments: list[str]
    environment: dict[str, str]
    log: str
    title: str


class ForkServerProcess:
    """Reads commands, starts and signals children, and reports their ends."""

    def __init__(self, *, forks: bool) -> None:
        self._forks = forks
        self._parent = os.getppid()
        self._pids: dict[str, int] = {}
        self._buffer = b""
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)

    def run(self) -> Birth | None:
        """Returns None in the fork server itself when all is over, and in each forked child what that is to run."""
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        # A terminal's Ctrl-C is for whoever started this, who stops the children in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            readable, _, _ = select.select([0, self._wake_reader], [], [], _POLL_S)
            if self._wake_reader in readable:
                os.read(self._wake_reader, 4096)
            self._reap()
            if os.getppid() != self._parent:
                break
            if 0 in readable:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                for line in lines:
                    if (birth := self._obey(json.loads(line))) is not None:
                        return birth
        self._end_children()
        return None

    def _obey(self, command: dict[str, Any]) -> Birth | None:
        if command["do"] == "start":
            return self._start(Birth(**command["birth"]))
        if command["do"] == "warm":
            self._warm(command["modules"])
        elif command["do"] == "signal" and command["name"] in self._pids:
            os.kill(self._pids[command["name"]], command["number"])
        return None

    def _warm(self, modules: list[str]) -> None:
        if not self._forks:
            return
        started = time.perf_counter()
        for module in modules:
            # Whoever needs the module will say better what is wrong with it.
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        gc.collect()
        gc.freeze()
        _tell("warm", seconds=time.perf_counter() - started)

    def _start(self, birth: Birth) -> Birth | None:
        if self._forks:
            fork_server = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._become_child(birth, fork_server)
                return birth
        else:
            with open(birth.log, "ab") as log:
                command = [sys.executable, "-c", _RUN_CHILD, birth.module, *birth.arguments]
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=birth.environment
                )
            pid = child.pid
        self._pids[birth.name] = pid
        _tell("started", name=birth.name, pid=pid)
        return None

    def _become_child(self, birth: Birth, fork_server: int) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        kernel = ctypes.CDLL(None)
        kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl(_PR_SET_NAME, birth.name.encode()[:15])
        show_title(birth.title)
        if os.getppid() != fork_server:
            os._exit(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(birth.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(nothing)
        os.close(log)
        os.environ.clear()
        os.environ.update(birth.environment)
        sys.argv = ["corolla", *birth.arguments]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            names = [name for name, known in self._pids.items() if known == pid]
            for name in names:
                del self._pids[name]
                _tell("exited", name=name, pid=pid, status=os.waitstatus_to_exitcode(status))

    def _end_children(self) -> None:
        for number, seconds in ((signal.SIGTERM, END_GRACE_S), (signal.SIGKILL, END_GRACE_S)):
            for pid in self._pids.values():
                os.kill(pid, number)
            give_up = time.monotonic() + seconds
            while self._pids and time.monotonic() < give_up:
                time.sleep(0.02)
                self._reap()


def show_title(title: str) -> None:
    """Sets the command line that `ps` shows of this process, where Linux lets it: cut to the length of the first one.

    The kernel reads it from the memory that held the arguments at the start, so that is written over.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may contain spaces; fields are counted behind it. See proc(5): arg_start, arg_end.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        if 0 < start < end:
            room = end - start
            ctypes.memmove(start, title.encode()[: room - 1].ljust(room, b"\0"), room)


_RUN_CHILD = """
import importlib, sys
module, arguments = sys.argv[1], sys.argv[2:]
sys.argv = ["corolla", *arguments]
sys.exit(importlib.import_module(module).main(arguments))
"""


def _tell(event: str, **facts: Any) -> None:
    # Nobody may be left to hear it.
    with contextlib.suppress(OSError):
        os.write(1, json.dumps({"event": event, **facts}).encode() + b"\n")


def main() -> int:
    if sys.platform == "linux":
        show_title("corolla fork-server")
    # Forking after imports is only safe where no framework starts threads by itself.
    fork_server = ForkServerProcess(forks=sys.platform == "linux")
    birth = fork_server.run()
    if birth is None:
        return 0
    return int(importlib.import_module(birth.module).main(birth.arguments))


if __name__ == "__main__":
    sys.exit(main())
