"""Where a local stack keeps its logs."""

import os
import time
from pathlib import Path


def state_folder() -> Path:
    """`$XDG_STATE_HOME/corolla`, else `~/.local/state/corolla`."""
    given = os.environ.get("XDG_STATE_HOME")
    return (Path(given) if given else Path.home() / ".local" / "state") / "corolla"


def new_log_folder() -> Path:
    """A folder of its own for each start."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime())
    return state_folder() / "logs" / f"{stamp}-{os.getpid()}"
