"""Strangers to a port, very many at a time, who begin something and do not end it: a process of its own.

    python -m tests.adversary.strangers ADDRESS KINDS NUMBER SECONDS

They come one after the other within those seconds, and stay until the other end has cut off every one. Before an
address, `tls:` has them make a handshake first.
"""

import asyncio
import contextlib
import ssl
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PATH: Final = "/corolla.v1.GenerationService/Generate"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_HEADERS: Final = 4
LARGEST_FRAME: Final = 1 << 14
MIB: Final = 1 << 20


def frame(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> bytes:
    """An HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


GREETING: Final = PREFACE + frame(SETTINGS, b"")


def literal(text: str) -> bytes:
    """A string of HPACK, as it is."""
    data, length = text.encode(), b""
    number = len(data)
    if number < 127:
        return bytes([number]) + data
    number -= 127
    while number >= 128:
        length += bytes([number % 128 + 128])
        number //= 128
    return bytes([127]) + length + bytes([number]) + data


def block(more: Mapping[str, str] | None = None) -> bytes:
    """The headers of a gRPC call, none of which the other end is to remember."""
    headers = {
        ":method": "POST", ":scheme": "http", ":path": PATH, ":authority": "a", "te": "trailers",
        "content-type": "application/grpc", "authorization": "Bearer ck_unknown", **(more or {}),
    }  # fmt: skip
    return b"".join(b"\x00" + literal(name) + literal(value) for name, value in headers.items())


def call(stream: int = 1, more: Mapping[str, str] | None = None) -> bytes:
    return frame(HEADERS, block(more), END_HEADERS, stream)


def part(data: bytes, stream: int = 1) -> bytes:
    """Frames of data, of which no end is marked."""
    pieces = (data[start : start + LARGEST_FRAME] for start in range(0, len(data), LARGEST_FRAME))
    return b"".join(frame(DATA, piece, 0, stream) for piece in pieces)


def bomb(num_mib: int = 60) -> bytes:
    """A compressed message of zeros: a kilobyte for each of its MiB."""
    packer = zlib.compressobj(wbits=31)
    packed = b"".join(packer.compress(bytes(MIB)) for _ in range(num_mib)) + packer.flush()
    return b"\x01" + struct.pack(">I", len(packed)) + packed


def half_message(num_bytes: int = 48 << 10) -> bytes:
    return b"\x00" + struct.pack(">I", 4 * MIB) + bytes(num_bytes)


TLS: Final = "tls:"


def trusting() -> ssl.SSLContext:
    """A context for which any certificate will do."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def client_hello() -> bytes:
    taken, given = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        trusting().wrap_bio(taken, given).do_handshake()
    return given.read()


def large_metadata() -> bytes:
    """A block of 64 KiB of metadata, in as many frames as it takes."""
    data = block({f"x-{number}": "v" * 1024 for number in range(64)})
    pieces = [data[start : start + LARGEST_FRAME] for start in range(0, len(data), LARGEST_FRAME)]
    last = len(pieces) - 1
    return b"".join(
        frame(CONTINUATION if number else HEADERS, piece, END_HEADERS if number == last else 0, 1)
        for number, piece in enumerate(pieces)
    )


KINDS: Final[Mapping[str, bytes]] = {
    "silent": b"",
    "greeted": GREETING,
    "bomb": GREETING + call(1, {"grpc-encoding": "gzip"}) + part(bomb()),
    "half_message": GREETING + call() + part(half_message()),
    "half_headers": GREETING + frame(HEADERS, block(), 0, 1),
    "half_frame": GREETING + frame(HEADERS, block({"x": "v" * 8192}), END_HEADERS, 1)[:-4096],
    "large_metadata": GREETING + large_metadata(),
    "pings": GREETING + frame(PING, bytes(8)) * 2000,
    "settings": GREETING + frame(SETTINGS, b"") * 2000,
    "resets": GREETING + b"".join(call(each) + frame(RST_STREAM, bytes(4), 0, each) for each in range(1, 16, 2)),
    "half_handshake": client_hello(),
    "half_hello": client_hello()[:20],
}
"""What each sends, and then nothing more."""


async def live(address: str, sent: bytes, context: ssl.SSLContext | None) -> None:
    """Until the other end cuts it off."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(ConnectionError):
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(sent)
        while await reader.read(1 << 16):
            pass
        writer.close()


async def main(address: str, kinds: Sequence[str], number: int, seconds: float) -> None:
    context = trusting() if address.startswith(TLS) else None
    async with asyncio.TaskGroup() as tasks:
        for place in range(number):
            tasks.create_task(live(address.removeprefix(TLS), KINDS[kinds[place % len(kinds)]], context))
            await asyncio.sleep(seconds / number)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), float(sys.argv[4])))
