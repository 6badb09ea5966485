"""Connections of tests outlast a pause of the machine, of whatever length.

Between services a peer that is silent for a second is given up. A machine that builds and tests many things at a time
stops a test's process for longer than that, and what broke then would have nothing to do with what the test is about.
What frozen peers do to a stack is shown by `tests/faults/freeze.py` and by the simulation.
"""

from typing import Final

from corolla.chassis import channels

_PATIENCE_MS: Final = 60_000
_LIMITS: Final = frozenset({"grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"})


def outlast_pauses() -> None:
    """Holds for all connections that this process opens or takes from now on, at its own end."""
    for options in (channels._CHANNEL, channels._SERVER):
        options[:] = [(name, _PATIENCE_MS if name in _LIMITS else value) for name, value in options]
