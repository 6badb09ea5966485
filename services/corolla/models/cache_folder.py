"""Finds the folder for files that Corolla makes from models on this machine."""

import os
from pathlib import Path


def default_cache_folder() -> Path:
    """The cache folder: `$COROLLA_CACHE`, else `$XDG_CACHE_HOME/corolla`, else `~/.cache/corolla`."""
    own = os.environ.get("COROLLA_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "corolla"
