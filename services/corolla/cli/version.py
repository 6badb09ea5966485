"""The version of this release, and its commit if that is known."""

import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Final

from corolla import __version__

_PACKAGE: Final = files("corolla")
_CHECKOUT: Final = Path(__file__).resolve().parents[3]


def version() -> str:
    """The version with its commit, such as `0.2.0 (5f2c81a07d3e)`."""
    commit = _built_from() or _checked_out()
    return f"{__version__} ({commit})" if commit else __version__


def _built_from() -> str:
    """The commit that setup.py wrote into the wheel; empty if it wrote none."""
    try:
        return (_PACKAGE / "commit.txt").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def _checked_out() -> str:
    """The commit of the git checkout that this code runs from; empty if it runs from elsewhere."""
    if not (_CHECKOUT / ".git").exists():
        return ""
    asked = ["git", "-C", str(_CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
