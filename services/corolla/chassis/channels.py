"""gRPC channels and servers with Corolla's options.

gRPC's keepalive alone notices a frozen peer after a minute; with the HTTP/2 ping time-out, after about two seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from corolla.chassis.addresses import host_port, split_address
from corolla.chassis.descriptors import most_connections_of_a_port
from corolla.chassis.errors import CorollaError, InvalidRequest, StartupError
from corolla.chassis.health import OpenStreams

TLS_1_3_ONLY: Final = ("GRPC_SSL_CIPHER_SUITES", "ECDHE-PSK-CHACHA20-POLY1305")
"""The environment variable and value that restrict gRPC to TLS 1.3; set it before the first handshake. gRPC has no
option for the lowest TLS version. The value leaves TLS 1.2 one cipher, which needs a pre-shared key, and Corolla has
no such key."""
MAX_FRAME_BYTES: Final = 64 << 20
"""The size up to which gRPC accepts a message. Services have lower limits, with a status of Corolla's own."""

_COMMON: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
]
# Another service replaces a silent one, so silence must be noticed soon.
_PEERS: Final[list[tuple[str, Any]]] = [
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
]
# A caller may be silent for longer: its machine or network may stop for a moment, and no other process can receive its
# answer.
_CALLERS: Final[list[tuple[str, Any]]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # A busy caller sends pings in bunches, and an idle stream sends no data that would reset gRPC's count of them.
    # Only a flood of pings ends the connection.
    ("grpc.http2.max_ping_strikes", 64),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 50),
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # A connection that carries only pings is idle, and is closed; the caller's next call opens another one.
    ("grpc.max_connection_idle_ms", 60_000),
]
_CHANNEL: Final[list[tuple[str, Any]]] = [
    *_COMMON,
    *_PEERS,
    # gRPC also allows this time for connecting, which can be slow on a busy machine.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),
    # Each channel has its own connection. Otherwise a new channel to a restarted server would share the back-off of an
    # older channel that failed.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy from the environment is for other hosts, not for connections between the services.
    ("grpc.enable_http_proxy", 0),
]
_SERVER: Final[list[tuple[str, Any]]] = [
    *_COMMON,
    # Two servers on one port would silently share its connections.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.server_handshake_timeout_ms", 10_000),
]

_MOST_PEERS: Final = 4096
"""The most connections from other services, where the limit of descriptors allows so many."""


_SILENCE_LIMITS: Final = frozenset(
    {"grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms", "grpc.min_reconnect_backoff_ms"}
)

# Ways to name a service that gRPC knows, other than HOST:PORT.
_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:")


def tolerate_silence(silence_ms: int) -> None:
    """Makes connections that this process opens or accepts from now on survive a silence of `silence_ms`.

    This is for machines that pause processes for seconds, where a short silence does not mean that a peer has failed.
    """
    for options in (_CHANNEL, _PEERS, _CALLERS):
        options[:] = [(name, silence_ms if name in _SILENCE_LIMITS else value) for name, value in options]


Channels = Callable[[str], grpc.aio.Channel]
"""A function that opens a channel to an address: `open_channel`, or a test's simulated network."""


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """Opens a channel to `host:port`, `dns:///name:port` (balanced over all addresses) or any other gRPC target.

    Args:
        credentials: The TLS credentials; None: the connection is not encrypted.
    """
    options = list(_CHANNEL)
    if address.startswith("dns:"):
        options.append(("grpc.lb_policy_name", "round_robin"))
        # Replaced pods have new addresses, and by default gRPC looks them up only twice a minute.
        options.append(("grpc.dns_min_time_between_resolutions_ms", 1000))
    if credentials is not None:
        return grpc.aio.secure_channel(address, credentials, options=options)
    return grpc.aio.insecure_channel(address, options=options)


@dataclass(frozen=True, slots=True)
class CallerBounds:
    """The bounds of a server that callers from outside reach, not only services.

    The server accepts no compressed message, since 60 KB of one can become 60 MB. The number of calls on one connection
    is unbounded, because gRPC fails calls even of callers that respect such a bound.

    Attributes:
        max_request_bytes: The greatest size of a message.
        max_connections: The number of connections at a time; the server closes further ones at once.
        max_connection_age_s: The age after which a connection accepts no new call, and ends with its last one.
    """

    max_request_bytes: int
    max_connections: int
    max_connection_age_s: float


def new_server(callers: CallerBounds | None = None) -> grpc.aio.Server:
    """Creates a server without handlers. Its owner must keep a reference: a collected server silently stops serving.

    Args:
        callers: The bounds for callers from outside; None: only services call this server.
    """
    options = dict([*_SERVER, *_PEERS])
    max_connections = min(callers.max_connections if callers is not None else _MOST_PEERS, most_connections_of_a_port())
    options["grpc.max_allowed_incoming_connections"] = max_connections
    if callers is not None:
        options |= dict(_CALLERS)
        # A request of up to twice the limit is read, and refused with a status that names its size.
        options["grpc.max_receive_message_length"] = 2 * callers.max_request_bytes
        options["grpc.max_connection_age_ms"] = round(callers.max_connection_age_s * 1000)
    return grpc.aio.server(options=list(options.items()), interceptors=[OpenStreams()])


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Listens on `host:port` and returns the port; port 0 takes a free one. Raises StartupError if it cannot."""
    address = host_port(host, port)
    try:
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise StartupError(f"cannot listen on {address}: the address is taken or not ours; choose another port")
    return bound


def unreached(kind: type[CorollaError], service: str, address: str, details: str) -> CorollaError:
    """The error of a call that no service answered.

    Args:
        kind: the class of the error, unless the address itself is wrong.
        service: what was called, such as `router`.
    """
    if split_address(address) is None and not address.startswith(_SCHEMES):
        return InvalidRequest("address", f"{address!r} is no address; write HOST:PORT, such as 127.0.0.1:50051")
    reason = ""
    if "http1" in details:
        reason = ": a server of HTTP/1 does, such as a client service's HTTP port; name the port for gRPC"
    elif "http2 frame" in details.lower() or "Missing :status" in details:
        reason = ": a server of another protocol does"
    elif "errors resolving" in details:
        reason = f": no machine has the name {address.rpartition(':')[0]}"
    elif "refused" in details:
        reason = ": nothing listens there"
    return kind(f"no {service} answers at {address}{reason}")
