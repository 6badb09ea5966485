"""Finds out whether a process serves, by its gRPC health or Redis's answer to a ping.

Calls are made apart from the caller's thread, so that a signal to the main thread ends a wait at once.
"""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corolla.chassis.errors import CorollaError, Unauthenticated
from corolla.chassis.threads import begun_apart
from corolla.router.redis_address import answers
from corolla.sdk.client import Client
from corolla.v1 import router_pb2
from corolla.v1.router_pb2_grpc import RouterServiceStub
from corolla.wire.network import Network

_TIMEOUT_S = 1.0
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),
]


class Probe:
    """Asks one gRPC service for its health and, if it is the router, for the placement."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._address = address
        self.open(credentials)

    def open(self, credentials: grpc.ChannelCredentials | None) -> None:
        """Opens a channel, which takes the place of the one that the probe has; running calls end on that one."""
        self._channel = (
            grpc.secure_channel(self._address, credentials, options=_OPTIONS)
            if credentials is not None
            else grpc.insecure_channel(self._address, options=_OPTIONS)
        )

    def is_serving(self) -> bool:
        return begun_apart(self._is_serving).result()

    def placement(self, model: str) -> router_pb2.Placement | None:
        """The placement that a router knows; None if it does not answer."""
        return begun_apart(partial(self._placement, model)).result()

    def close(self) -> None:
        self._channel.close()

    def _is_serving(self) -> bool:
        # The published type annotations of this stub lack the method.
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _placement(self, model: str) -> router_pb2.Placement | None:
        try:
            return RouterServiceStub(self._channel).GetPlacement(
                router_pb2.GetPlacementRequest(model=model), timeout=_TIMEOUT_S
            )
        except grpc.RpcError:
            return None

    def remove_server_at(self, model: str, address: str) -> None:
        """Has a router remove the block server at an address; does nothing if the router does not answer.

        The certificate must be that server's own.
        """
        if (placement := self.placement(model)) is None:
            return
        for each in placement.servers:
            if each.server.address == address:
                request = router_pb2.DeregisterServerRequest(model=model, server_id=each.server.server_id)
                with suppress(grpc.RpcError):
                    RouterServiceStub(self._channel).DeregisterServer(request, timeout=_TIMEOUT_S)


def remove_dead_server(router: str, network: Network, model: str, address: str) -> None:
    """Tells a router that the process of a block server has ended, so that others replace it before its lease ends.

    Args:
        router: the router's `host:port`.
        network: the network with the certificate of that server.
        address: the server's `host:port` in the placement.
    """
    credentials = network.credentials
    probe = Probe(router, credentials.for_channels() if credentials is not None else None)
    try:
        probe.remove_server_at(model, address)
    finally:
        probe.close()


def knows_a_chain(client_address: str) -> bool:
    """The client service knows servers for all blocks."""
    return begun_apart(partial(_knows_a_chain, client_address)).result()


def _knows_a_chain(client_address: str) -> bool:
    with Client(client_address, timeout=_TIMEOUT_S) as client:
        try:
            return all(model.ready for model in client.models())
        except Unauthenticated:
            # The client service asks for a key, which the stack does not have. The service learns of new servers within
            # a second anyway.
            return True
        except CorollaError:
            return False


def redis_answers(url: str) -> bool:
    """Raises ValueError if the address is not valid for Redis."""
    return asyncio.run(answers(url, _TIMEOUT_S))
