"""The folder of this machine for files that are made from models."""

import os
from pathlib import Path


def default_cache_folder() -> Path:
    """`$COROLLA_CACHE`, else `$XDG_CACHE_HOME/corolla`, else `~/.cache/corolla`."""
    own = os.environ.get("COROLLA_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "corolla"
