"""`corolla drain`."""

import sys

from corolla.chassis.errors import StartupError
from corolla.cli.control_channel import control_channel
from corolla.v1 import admin_pb2
from corolla.v1.admin_pb2_grpc import AdminServiceStub


def run_drain(address: str, timeout_s: float) -> int:
    """Asks a block server to leave, and waits until it has. Returns 0 also where sessions are left to be replayed."""
    # The advice for a client service that does not answer, to start a stack, would mislead here.
    with control_channel(
        address, StartupError(f"no block server answers at {address}; name its control port")
    ) as channel:
        answer = AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(), timeout=timeout_s)
    left = answer.num_sessions_left
    sys.stdout.write("drained" + (f"; nobody had room for {left} sessions, they are replayed" if left else "") + "\n")
    return 0
