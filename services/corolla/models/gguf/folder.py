"""Writes the configuration and tokenizer of a GGUF file to a folder in the form of other checkpoints."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import transformers
from filelock import FileLock

from corolla.chassis.errors import CheckpointError
from corolla.models.gguf.description import configuration, end_token_ids
from corolla.models.gguf.header import GgufHeader
from corolla.models.gguf.vocabulary import write_tokenizer

# Raise this whenever a release would write other contents for the same file.
_VERSION: Final = 2
_FILE_MODE: Final = 0o644
_FOLDER_MODE: Final = 0o755


def default_cache_folder() -> Path:
    """The folder for what is made from models: `$COROLLA_CACHE`, `$XDG_CACHE_HOME/corolla` or `~/.cache/corolla`."""
    if own := os.environ.get("COROLLA_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "corolla"


def settings_folder(header: GgufHeader) -> Path:
    """The folder with `config.json`, `generation_config.json` and the tokenizer that the file describes.

    The first call makes the folder, within seconds. It builds the folder under another name and renames it, so a folder
    with the final name is complete. Several processes may call this at the same time.

    Raises:
        CheckpointError: the file's model or tokenizer is not served, or the cache folder cannot be written.
    """
    folders = default_cache_folder() / "gguf"
    folder = folders / f"{header.digest.hex()[:32]}-{transformers.__version__}-{_VERSION}"
    if folder.is_dir():
        return folder
    config = configuration(header)
    try:
        folders.mkdir(parents=True, exist_ok=True)
        with FileLock(folders / f".{folder.name}.lock"):
            if not folder.is_dir():
                building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.building-", dir=folders))
                try:
                    _write(header, config, building)
                    building.rename(folder)
                finally:
                    shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"The model's settings cannot be written to {folders}: {error.strerror or 'the folder is not writable'}; "
            "set COROLLA_CACHE to another folder."
        ) from error
    return folder


def _write(header: GgufHeader, config: dict[str, object], folder: Path) -> None:
    ends = end_token_ids(header.metadata)
    generation: dict[str, object] = {
        "eos_token_id": ends or None,
        **{name: config[name] for name in ("bos_token_id", "pad_token_id") if name in config},
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_tokenizer(header, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(_FOLDER_MODE if path.is_dir() else _FILE_MODE)
