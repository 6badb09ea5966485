"""The folder for what is made or fetched for models."""

import os
from pathlib import Path


def default_cache_folder() -> Path:
    """Returns `$COROLLA_CACHE`, `$XDG_CACHE_HOME/corolla` or `~/.cache/corolla`."""
    if own := os.environ.get("COROLLA_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "corolla"


def fetched_models_folder() -> Path:
    """Returns the folder of the manifests and files that other machines of shared stacks gave to this one."""
    return default_cache_folder() / "models"
