"""A folder that all processes of one test run share, for what is dear to make; the first one makes and removes it."""

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from filelock import FileLock

_VARIABLE: Final = "COROLLA_TEST_RUN_FOLDER"


@functools.cache
def run_folder() -> Path:
    """The first caller makes the folder; its child processes find it by their environment."""
    if inherited := os.environ.get(_VARIABLE):
        return Path(inherited)
    folder = Path(tempfile.mkdtemp(prefix="corolla-tests-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child leaves it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    os.environ[_VARIABLE] = str(folder)
    return folder


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The file or folder `name` of the run's folder; `make` writes it where it is told, in one process only."""
    path = run_folder() / name
    with FileLock(path.with_name(f".{name}.lock")):
        if not path.exists():
            building = Path(tempfile.mkdtemp(dir=run_folder())) / name
            make(building)
            building.rename(path)
    return path
