"""Functions that the tests' fork servers run."""

import os
import signal
import sys
import time
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """`exit STATUS`, `say NAME` of a variable, `modules NAME`, `stubborn` or `sleep`."""
    what, *rest = arguments
    if what == "exit":
        return int(rest[0])
    if what == "say":
        sys.stdout.write(f"{os.environ.get(rest[0])} {sys.argv}\n")
    elif what == "modules":
        sys.stdout.write(f"{rest[0] in sys.modules}\n")
    else:
        if what == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.stdout.write("up\n")
        sys.stdout.flush()
        time.sleep(60)
    return 0
