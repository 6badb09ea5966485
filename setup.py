"""Adds the commit to what is built, where it is known, for `corolla --version`. All else stands in pyproject.toml."""

import os
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def commit() -> str:
    """What `REVISION` says, where images are built without git; else what git says; else nothing."""
    if (named := os.environ.get("REVISION", "")) or not (ROOT / ".git").exists():
        return named
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class BuildWithCommit(build_py):
    """A checkout that is installed to be edited gets no file: its commit changes."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode and (known := commit()):
            (Path(self.build_lib) / "corolla" / "commit.txt").write_text(known + "\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildWithCommit})
