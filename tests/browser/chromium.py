"""A headless Chromium, led by playwright, which `make browser` installs in a folder of its own."""

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.architecture.sources import ROOT

PACKAGES: Final = Path(os.environ.get("COROLLA_BROWSER", ROOT / ".venv" / "browser"))
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")


class NoBrowser(Exception):
    """A browser, or the package that leads it, is missing; the sentence says how to install it."""


def package(name: str) -> Any:
    """A module of the folder. Its packages stand behind all others. Raises NoBrowser."""
    if not PACKAGES.is_dir():
        raise NoBrowser("playwright is not installed; run: make browser")
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))
    return importlib.import_module(name)


def executable() -> str:
    """Where Chromium is. Raises NoBrowser."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise NoBrowser("Chromium is missing: install it, on Debian by apt-get install chromium")
    return found


@contextmanager
def browser() -> Iterator[Any]:
    """A `Browser` of playwright. Raises NoBrowser."""
    path, playwright = executable(), package("playwright.sync_api")
    # The sandbox of a browser is not for root, and shared memory of a container may be tiny.
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=path, args=arguments)
        try:
            yield chromium
        finally:
            chromium.close()
