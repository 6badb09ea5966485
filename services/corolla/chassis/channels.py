"""gRPC channels and servers with the options that matter.

Keepalive alone notices a frozen peer only after a minute; with the HTTP/2 ping time-out it takes about two seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from corolla.chassis.errors import StartupError

TLS_1_3_ONLY: Final = ("GRPC_SSL_CIPHER_SUITES", "ECDHE-PSK-CHACHA20-POLY1305")
"""Variable and value, to be set before gRPC's first handshake. It has no option for the least version of TLS; of the
ciphers of TLS 1.2, this leaves one that needs a shared secret, which nobody has."""
MAX_FRAME_BYTES: Final = 64 << 20
"""Hard limit of a gRPC message; services refuse earlier, with a status of their own."""

_COMMON: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
]
# A service that is silent is replaced, and soon.
_PEERS: Final[list[tuple[str, Any]]] = [
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
]
# A caller's machine may stop for a moment, and its network too; nobody else can take the caller's answer.
_CALLERS: Final[list[tuple[str, Any]]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # A busy caller's pings come in bunches, and idle streams carry nothing that forgives them: only floods are cut off.
    ("grpc.http2.max_ping_strikes", 64),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 50),
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Pings keep a connection from looking dead, not from being idle; the next call opens another one.
    ("grpc.max_connection_idle_ms", 300_000),
]
_CHANNEL: Final[list[tuple[str, Any]]] = [
    *_COMMON,
    *_PEERS,
    # Also how long a connection may take to come about, which on a busy machine is more than a moment.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),
    # A connection of its own for each channel: else a new one to who came back shares the pause of one that failed.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy of the environment is for the world outside, not between the services.
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

_LABELLED_EXCESS_BYTES: Final = 64 << 10
"""A request that is larger by no more than this is read, and refused with a status that says by how much."""


_SILENCE_LIMITS: Final = frozenset(
    {"grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms", "grpc.min_reconnect_backoff_ms"}
)


def tolerate_silence(silence_ms: int) -> None:
    """Connections that this process opens or takes from now on bear that the other end is silent for so long.

    For machines that stop processes for seconds, where a frozen peer noticed late is the lesser evil.
    """
    for options in (_CHANNEL, _PEERS, _CALLERS):
        options[:] = [(name, silence_ms if name in _SILENCE_LIMITS else value) for name, value in options]


Channels = Callable[[str], grpc.aio.Channel]
"""What opens channels: `open_channel`, or a network that does not exist."""


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel to `host:port`, `dns:///name:port` (balanced over all addresses) or any other gRPC target.

    Args:
        credentials: None: in the clear.
    """
    options = list(_CHANNEL)
    if address.startswith("dns:"):
        options.append(("grpc.lb_policy_name", "round_robin"))
        # Addresses of pods that were replaced: the default would look them up twice a minute at most.
        options.append(("grpc.dns_min_time_between_resolutions_ms", 1000))
    if credentials is not None:
        return grpc.aio.secure_channel(address, credentials, options=options)
    return grpc.aio.insecure_channel(address, options=options)


@dataclass(frozen=True, slots=True)
class CallerBounds:
    """Of a server that is called by whoever uses Corolla, and not by services only.

    gRPC reads no compressed message, of which 60 KB can be 60 MB. Nothing bounds the calls of one connection: at such a
    bound gRPC fails calls of callers that keep to it.

    Attributes:
        max_request_bytes: of a message.
        max_connections: at a time; a further one is closed at once.
        max_connection_age_s: then a connection takes no new call, and ends with its last one.
    """

    max_request_bytes: int
    max_connections: int
    max_connection_age_s: float


def new_server(callers: CallerBounds | None = None) -> grpc.aio.Server:
    """A server without handlers. Its owner must hold on to it: a collected server silently stops serving.

    Args:
        callers: None: only services call it.
    """
    options = dict([*_SERVER, *_PEERS])
    if callers is not None:
        options |= dict(_CALLERS)
        options["grpc.max_receive_message_length"] = callers.max_request_bytes + _LABELLED_EXCESS_BYTES
        options["grpc.max_allowed_incoming_connections"] = callers.max_connections
        options["grpc.max_connection_age_ms"] = round(callers.max_connection_age_s * 1000)
    return grpc.aio.server(options=list(options.items()))


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Listens on `host:port`; port 0 takes a free one. Returns the port. Raises StartupError when it is taken."""
    address = f"{host}:{port}"
    try:
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise StartupError(f"cannot listen on {host}:{port}: the address is taken or not ours; choose another port")
    return bound
