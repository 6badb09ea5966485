"""The fork server: the process whose children are all services of a local stack.

Importing torch and transformers takes seconds of processor time, which a machine with few cores would spend again for
every service. This process imports them once and forks. It never starts a thread, opens a gRPC object or computes, so a
fork copies nothing that would break.

The fork server does not outlive its parent. When its standard input ends, or its parent process changes, it sends all
children SIGTERM and, seconds later, SIGKILL. If it dies itself, the kernel kills the children.

It reads commands from standard input and writes events to standard output, one JSON object a line;
`corolla.local.fork_server` is the other end.
"""

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from corolla.chassis.heap import uncollected_imports

END_GRACE_S: Final = 3.0
_POLL_S: Final = 0.05
_IS_LINUX: Final = sys.platform == "linux"
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15


@dataclass(frozen=True)
class ForkRequest:
    """The request for a new child, which runs `main(arguments)` of a module, with its output in the file `log`.

    Attributes:
        title: the command line that `ps` shows.
        is_forked: whether the child continues this process's imports; else it starts a new interpreter.
    """

    name: str
    module: str
    arguments: list[str]
    environment: dict[str, str]
    log: str
    title: str
    is_forked: bool = True


class ForkServerProcess:
    """Reads commands, starts and signals children, and reports their ends."""

    def __init__(self) -> None:
        # Forking after imports is safe only on systems whose own libraries start no threads, unlike those of macOS.
        self._forking: Any = multiprocessing.get_context("fork" if _IS_LINUX else "spawn")
        self._starting_anew: Any = multiprocessing.get_context("spawn")
        self._parent = os.getppid()
        self._children: dict[str, BaseProcess] = {}
        self._buffer = b""

    def run(self) -> None:
        """Obeys commands until the input ends or the parent is gone. Returns when all children have ended."""
        # A terminal's Ctrl-C is meant for the parent, which stops the children in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The parent may ignore SIGCHLD, and this process would inherit that and lose the exit status of its children.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while os.getppid() == self._parent:
            self._report_ends()
            # This does not wait for children's sentinels, since that of Redis fires when the child executes Redis.
            if not wait([0], _POLL_S):
                continue
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._obey(json.loads(line))
        self._end_children()

    def _obey(self, command: dict[str, Any]) -> None:
        if command["do"] == "start":
            self._start(ForkRequest(**command["request"]))
        elif command["do"] == "warm":
            self._warm(command["modules"])
        elif command["do"] == "signal" and (child := self._children.get(command["name"])) is not None:
            _signal(child, command["number"])

    def _warm(self, modules: list[str]) -> None:
        if not _IS_LINUX:
            return
        started = time.perf_counter()
        with uncollected_imports():
            for module in modules:
                # If the import fails, the child that needs the module reports the error better.
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
        _tell("warm", seconds=time.perf_counter() - started)

    def _start(self, request: ForkRequest) -> None:
        context = self._forking if request.is_forked else self._starting_anew
        child = context.Process(target=run_child, args=(request, os.getpid()))
        child.start()
        self._children[request.name] = child
        _tell("started", name=request.name, pid=child.pid)

    def _report_ends(self) -> None:
        for name, child in list(self._children.items()):
            if (status := child.exitcode) is not None:
                del self._children[name]
                _tell("exited", name=name, pid=child.pid, status=status)
                child.close()

    def _end_children(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for child in self._children.values():
                _signal(child, number)
            give_up = time.monotonic() + END_GRACE_S
            while self._children and time.monotonic() < give_up:
                time.sleep(0.02)
                self._report_ends()


def run_child(request: ForkRequest, fork_server: int) -> None:
    """Prepares the child process in which it runs, calls the module's `main` and exits with the returned status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _IS_LINUX:
        kernel = ctypes.CDLL(None)
        kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl(_PR_SET_NAME, request.name.encode()[:15])
        show_title(request.title)
    if os.getppid() != fork_server:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv = ["corolla", *request.arguments]
    sys.exit(importlib.import_module(request.module).main(request.arguments))


def show_title(title: str) -> None:
    """Sets the command line that `ps` shows for this process, if Linux permits it, cut to the original length.

    `ps` shows the memory that held the arguments at the start, so this function overwrites that memory.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The process name in parentheses may contain spaces, so fields are counted behind the last parenthesis. See
        # proc(5): arg_start, arg_end.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        if 0 < start < end:
            room = end - start
            ctypes.memmove(start, title.encode()[: room - 1].ljust(room, b"\0"), room)


def _signal(child: BaseProcess, number: int) -> None:
    # The kernel does not reuse the process id of a child that has ended until this process reads the child's status.
    if child.exitcode is None and child.pid is not None:
        os.kill(child.pid, number)


def _tell(event: str, **facts: Any) -> None:
    # The parent, which reads the events, may have ended.
    with contextlib.suppress(OSError):
        os.write(1, json.dumps({"event": event, **facts}).encode() + b"\n")


def main() -> int:
    if _IS_LINUX:
        show_title("corolla fork-server")
    ForkServerProcess().run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
