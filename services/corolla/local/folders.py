"""Where a local stack keeps its logs."""

import os
import shutil
import time
from pathlib import Path
from typing import Final

_NUM_KEPT_LOG_FOLDERS: Final = 20


def state_folder() -> Path:
    """`$XDG_STATE_HOME/corolla`, else `~/.local/state/corolla`."""
    given = os.environ.get("XDG_STATE_HOME")
    return (Path(given) if given else Path.home() / ".local" / "state") / "corolla"


def new_log_folder() -> Path:
    """A folder of its own for each start; only the newest ones are kept."""
    logs = state_folder() / "logs"
    for old in sorted(logs.glob("2*"))[: 1 - _NUM_KEPT_LOG_FOLDERS]:
        shutil.rmtree(old, ignore_errors=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime())
    return logs / f"{stamp}-{os.getpid()}"
