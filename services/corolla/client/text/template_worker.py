"""Renders a checkpoint's chat template for a client service, whose other end is `template_process`.

Each message is a JSON object behind its length in four bytes. The system ends this process when a rendering takes more
than `MOST_CPU_S` of a processor; it ends itself when one takes more than `MOST_BYTES` of memory.
"""

import contextlib
import json
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import IO, Any, Final

from corolla.client.text.template import Template, TemplateRefusal

MOST_CPU_S: Final = 1.0
MOST_BYTES: Final = 64 << 20
BYTES_PER_BYTE: Final = 8
"""Of a request, whose text is there several times; these come on top."""

LENGTH: Final = struct.Struct("<I")
OUT_OF_MEMORY: Final = 3
"""The exit status."""


def write(stream: IO[bytes], message: Any) -> None:
    data = json.dumps(message, ensure_ascii=False, default=str).encode(errors="surrogatepass")
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def read(stream: IO[bytes]) -> tuple[Any, int]:
    """The next message and its length. Raises EOFError where none comes."""
    head = stream.read(LENGTH.size)
    data = stream.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else b""
    if not data:
        raise EOFError
    return json.loads(data.decode(errors="surrogatepass")), len(data)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Renders until no request comes any more: first comes a template, then what `Template.render` takes."""
    own_bytes = _num_bytes()
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    (source, special_tokens), length = read(requests)
    template: Template | None = None
    while True:
        conversation, num_bytes = read(requests)
        if own_bytes:
            most_bytes = own_bytes + MOST_BYTES + BYTES_PER_BYTE * (length + num_bytes)
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, unlimited[1]))
        # The signal that comes then ends a process that does not handle it.
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        try:
            template = template or Template(source, special_tokens)
            answer = {"text": str(template.render(**conversation))}
        except MemoryError:
            raise
        except TemplateRefusal as refusal:
            answer = {"refusal": refusal.sentence}
        except Exception:  # a template is a program of the checkpoint's
            answer = {"refusal": ""}
        signal.setitimer(signal.ITIMER_PROF, 0)
        write(answers, answer)
        resource.setrlimit(resource.RLIMIT_AS, unlimited)


def _num_bytes() -> int:
    """Of this process's address space; 0 on a system that does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> int:
    # A terminal's signals are for the service, which closes the pipe when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            serve(sys.stdin.buffer, sys.stdout.buffer)
        except MemoryError:
            return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
