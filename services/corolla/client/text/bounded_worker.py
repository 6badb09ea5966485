"""A process that answers requests in bounded time and memory; `worker_process` sends the requests.

Each message is its length in four bytes, then JSON. A signal ends the process when an answer takes more than
`MOST_CPU_S` of processor time; the process exits when an answer takes more than `MOST_BYTES` of memory, and
`BYTES_PER_BYTE` for each byte of its request.
"""

import contextlib
import json
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

MOST_CPU_S: Final = 1.0
MOST_BYTES: Final = 64 << 20
BYTES_PER_BYTE: Final = 8
"""The further bytes that an answer may take for each byte of its request, whose text is copied several times."""

LENGTH: Final = struct.Struct("<I")
OUT_OF_MEMORY: Final = 3
"""The exit status when memory ran out."""

Answer = Callable[[Any], Any]


def write(stream: IO[bytes], message: Any) -> None:
    data = json.dumps(message, ensure_ascii=False, default=str).encode(errors="surrogatepass")
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def read(stream: IO[bytes]) -> tuple[Any, int]:
    """Reads the next message; returns it and its length in bytes. Raises EOFError at the stream's end."""
    head = stream.read(LENGTH.size)
    data = stream.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else b""
    if not data:
        raise EOFError
    return json.loads(data.decode(errors="surrogatepass")), len(data)


def serve(begin: Callable[[Any], Answer]) -> int:
    """Answers requests until the stream ends. Returns the exit status.

    Args:
        begin: takes the first message, and returns the function that answers all later ones.
    """
    # Ctrl-C in a terminal is for the service, which closes the pipe when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            _serve(begin, sys.stdin.buffer, sys.stdout.buffer)
        except MemoryError:
            return OUT_OF_MEMORY
    return 0


def _serve(begin: Callable[[Any], Answer], requests: IO[bytes], answers: IO[bytes]) -> None:
    own_bytes = _num_bytes()
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    message, length = read(requests)
    answer = begin(message)
    while True:
        request, num_bytes = read(requests)
        if own_bytes:
            most_bytes = (
                max(own_bytes + BYTES_PER_BYTE * length, _num_bytes()) + MOST_BYTES + BYTES_PER_BYTE * num_bytes
            )
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, unlimited[1]))
        # The timer's signal ends a process that does not handle it.
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        result = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write(answers, result)
        resource.setrlimit(resource.RLIMIT_AS, unlimited)


def _num_bytes() -> int:
    """The size of this process's address space; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
