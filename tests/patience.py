"""Connections of tests outlast a pause of the machine. As a module, this is the `corolla` command with such ones.

Between services a peer that is silent for a second is given up. A machine that builds and tests many things at a time
stops a test's process for longer than that, and what broke then would have nothing to do with what the test is about.
What frozen peers do to a stack is shown by `tests/faults/freeze.py` and by the simulation.
"""

import sys
from typing import Final

from corolla.chassis.channels import tolerate_silence
from corolla.cli.app import main

_PATIENCE_MS: Final = 60_000


def outlast_pauses() -> None:
    """Holds for all connections that this process opens or takes from now on, at this end of them."""
    tolerate_silence(_PATIENCE_MS)


if __name__ == "__main__":
    outlast_pauses()
    sys.exit(main())
