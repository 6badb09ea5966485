"""Connections of tests outlast a pause of the machine. As a module, this is the `corolla` command with such ones.

Between services a peer that is silent for a second is given up. A machine that builds and tests many things at a time
stops a test's process for longer than that, and what broke then would have nothing to do with what the test is about.
What frozen peers do to a stack is shown by `tests/faults/freeze.py` and by the simulation.
"""

import sys
from typing import Final

from corolla.chain import control
from corolla.chassis import channels
from corolla.cli.app import main
from corolla.wire import stream

_PATIENCE_S: Final = 60


def outlast_pauses() -> None:
    """Holds for all connections that this process opens or takes from now on, at this end of them."""
    channels.tolerate_silence(1000 * _PATIENCE_S)
    control.RECORD_TIMEOUT_S = _PATIENCE_S
    stream.tolerate_silence(_PATIENCE_S)


if __name__ == "__main__":
    outlast_pauses()
    sys.exit(main())
