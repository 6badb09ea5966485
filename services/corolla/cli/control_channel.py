"""Connects a command to the services that only operators may call."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from corolla.chassis.errors import CorollaError, RouterUnavailable
from corolla.sdk.transport import CHANNEL_OPTIONS, error_of
from corolla.trust import loopback
from corolla.trust.workload import Role
from corolla.v1.router_pb2_grpc import RouterServiceStub


@contextmanager
def control_channel(address: str, kind: type[CorollaError], service: str) -> Iterator[grpc.Channel]:
    """Opens a channel, with the operator's certificate if `COROLLA_TLS_DIR` or a stack on this machine has one.

    Calls that fail inside the context raise a CorollaError.

    Args:
        kind: the class of the error to raise if nothing answers at the address.
        service: what should answer there, such as `router`.

    Raises:
        SettingsError: the folder does not hold a certificate.
    """
    with _open(address) as channel:
        try:
            yield channel
        except grpc.RpcError as failure:
            raise error_of(failure, address, kind, service) from None


@contextmanager
def router_stub(address: str) -> Iterator[RouterServiceStub]:
    """A stub of the router at an address, on a `control_channel`."""
    with control_channel(address, RouterUnavailable, "router") as channel:
        yield RouterServiceStub(channel)


def _open(address: str) -> grpc.Channel:
    tls_dir = loopback.tls_dir(address, Role.OPERATOR)
    if tls_dir is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    from corolla.trust.credentials import Credentials

    return grpc.secure_channel(address, Credentials(tls_dir).for_channels(), options=CHANNEL_OPTIONS)
