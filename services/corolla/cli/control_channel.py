"""The connection of a command to what only operators may ask."""

import grpc

from corolla.sdk.transport import CHANNEL_OPTIONS
from corolla.trust import loopback
from corolla.trust.workload import Role


def open_control_channel(address: str) -> grpc.Channel:
    """With the operator's certificate, where `COROLLA_TLS_DIR` or a stack on this machine gives one.

    Raises:
        SettingsError: the folder does not hold one.
    """
    tls_dir = loopback.tls_dir(address, Role.OPERATOR)
    if tls_dir is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    from corolla.trust.credentials import Credentials

    return grpc.secure_channel(address, Credentials(tls_dir).for_channels(), options=CHANNEL_OPTIONS)
