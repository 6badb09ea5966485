"""A Redis server of a test's own, as a child process that keeps everything in memory."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from corolla.chassis.errors import StartupError
from corolla.local.ports import Ports
from corolla.local.redis_server import find_redis_server, write_configuration

_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 5.0
_HOST: Final = "127.0.0.1"

# A small interpreter that asks for its parent's death signal (PR_SET_PDEATHSIG, SIGKILL) and then becomes Redis. Not a
# `preexec_fn`: that runs Python in a forked copy of this process, which gRPC's threads may have left beyond use.
_DIE_WITH_PARENT: Final = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


class EmbeddedRedis:
    """A running `redis-server` on the loopback address, without persistence. On Linux it dies with its parent."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_file: Path, password: str) -> None:
        self._process = process
        self._password = password
        self.port = port
        self.log_file = log_file

    @classmethod
    def start(cls, folder: Path, port: int = 0, *, password: str = "", lines: Sequence[str] = ()) -> "EmbeddedRedis":
        """Returns once it answers.

        Args:
            folder: for its log file; made if missing.
            port: to listen on; 0 takes a free one.
            password: that it asks for; empty: none.
            lines: more of its configuration; with those of a Sentinel, it is one.

        Raises:
            StartupError: there is no `redis-server`, or it does not come up.
        """
        folder.mkdir(parents=True, exist_ok=True)
        log_file = folder / "redis.log"
        port = port or Ports().free()
        configuration = folder / "redis.conf"
        write_configuration(configuration, folder, port)
        if password:
            lines = [*lines, f'requirepass "{password}"']
        with configuration.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        is_sentinel = any(line.startswith("sentinel ") for line in lines)
        command = [str(find_redis_server()), str(configuration), *(["--sentinel"] if is_sentinel else [])]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        with log_file.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        server = cls(process, port, log_file, password)
        try:
            server.wait_until_it_answers()
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def url(self) -> str:
        login = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"redis://{login}{_HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._process.pid

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Redis does nothing meanwhile, and keeps its connections."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends it and waits for that; nothing is kept."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                raise StartupError(f"redis-server ended with {status}; is its port taken? See {self.log_file}")
            if _answers(self.port, self.pid, self._password):
                return
            time.sleep(0.01)
        raise StartupError(f"redis-server did not answer within {_START_TIMEOUT_S:.0f} s; see {self.log_file}")


def _answers(port: int, pid: int, password: str) -> bool:
    """Whether the process `pid` answers on the port: a stranger may have taken it."""
    try:
        with socket.create_connection((_HOST, port), timeout=0.5) as connection, connection.makefile("rb") as replies:
            if password:
                connection.sendall(f'AUTH "{password}"\r\n'.encode())
                replies.readline()
            connection.sendall(b"PING\r\n")
            if not replies.readline().startswith(b"+PONG"):
                return False
            connection.sendall(b"INFO server\r\n")
            length = int(replies.readline().removeprefix(b"$"))
            return f"process_id:{pid}\r\n".encode() in replies.read(length)
    except (OSError, ValueError):
        return False
