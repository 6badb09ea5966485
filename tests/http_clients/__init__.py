"""Clients of OpenAI's API that others wrote, asking a service; each is run as a program of its own."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.architecture.sources import ROOT

PACKAGES: Final = Path(os.environ.get("COROLLA_HTTP_CLIENTS", ROOT / ".venv" / "http-clients"))
EVALUATION: Final = Path(os.environ.get("COROLLA_EVALUATION", ROOT / ".venv" / "evaluation"))
"""The evaluation harness, with all that it needs."""

RECORDED: Final = Path(__file__).with_name("recorded.jsonl")
"""Requests that programs sent, one a line: the program, the path, what the service ignores, and the body."""


def command_of(*arguments: str, packages: Path = PACKAGES) -> list[str]:
    """Runs Python with these arguments; with `variables`, the packages in the folder come first."""
    assert packages.exists(), f"the clients are not installed; run: make {packages.name}"
    return [sys.executable, "-W", "ignore", *arguments]


def script(package: str) -> str:
    """The program that asks with a package."""
    return str(Path(__file__).with_name(f"{package}_package.py"))


def variables(packages: Path = PACKAGES) -> Mapping[str, str]:
    """The environment of such a program."""
    return {**os.environ, "PYTHONPATH": str(packages)}
