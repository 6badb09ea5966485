"""llama.cpp reading the files that Corolla reads; it is run as a program of its own, since it brings other packages."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.architecture.sources import ROOT

PACKAGES: Final = Path(os.environ.get("COROLLA_LLAMA_CPP", ROOT / ".venv" / "llama-cpp"))
_PROGRAM: Final = Path(__file__).with_name("program.py")


def _ask(path: Path, **question: Any) -> Any:
    assert PACKAGES.exists(), "llama-cpp-python is not installed; run: make llama-cpp"
    answered = subprocess.run(
        [sys.executable, "-W", "ignore", _PROGRAM], input=json.dumps({"path": str(path), **question}),
        env={**os.environ, "PYTHONPATH": str(PACKAGES)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answered.returncode == 0, answered.stderr
    return json.loads(answered.stdout)


def token_ids_of(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of texts, with those that the file puts before and after a text."""
    found: list[list[int]] = _ask(path, texts=texts)
    return found


def greedy_token_ids(path: Path, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The tokens after a prompt, each the likeliest, computed in float32; tokens that end an answer do not end it."""
    found: list[int] = _ask(path, prompt_ids=prompt_ids, num_tokens=num_tokens)
    return found


def numbers_of(path: Path, kind: str, count: int) -> Any:
    """The first numbers that the bytes of a file stand for, as tensors of a type; float32 `[count]`."""
    return np.array(_ask(path, kind=kind, count=count), dtype=np.float32)
