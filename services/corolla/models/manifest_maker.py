"""Makes the manifest of a model whose files are on this machine, for machines that join and lack them."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from corolla.chassis.private_files import make_private_folder, write_private
from corolla.models.checkpoint import Checkpoint
from corolla.models.gguf.header import part_names
from corolla.models.hub import is_open, is_small
from corolla.models.model_manifest import MOST_MANIFEST_BYTES, PART_BYTES, ManifestFile, ModelManifest, is_sound
from corolla.models.weights import read_header

_NUM_THREADS: Final = 4


def make_manifest(checkpoint: Checkpoint, folder: Path, *, shares_gated: bool = False) -> Path | None:
    """Writes the manifest of a checkpoint to `folder`. Its name is its SHA-256.

    The checksums of files that have not changed since an earlier start are not computed again. All files must be here;
    those of the hub have had their checksums compared when they were fetched.

    Args:
        shares_gated: whether others may have a model that the hub does not give to everybody.

    Returns:
        The manifest's path; None: the model is too large for one, a file has a name that none may have, or others may
        not have it.

    Raises:
        OSError: a file cannot be read, or the manifest not be written.
        CheckpointError: a file is damaged.
    """
    if checkpoint.is_of_hub and not (shares_gated or is_open(checkpoint.files_folder)):
        return None
    heads = dict(_heads(checkpoint))
    make_private_folder(folder)
    known = folder / f"{_stamps(heads)}.known"
    if known.exists() and (path := folder / known.read_text()).exists():
        return path
    home = checkpoint.files_folder
    files = []
    with ThreadPoolExecutor(_NUM_THREADS, "checksums") as threads:
        for path, num_head_bytes in heads.items():
            num_bytes = path.stat().st_size
            checksums = "".join(threads.map(partial(_checksum, path), range(0, num_bytes, PART_BYTES)))
            files.append(ManifestFile(path.relative_to(home).as_posix(), num_bytes, num_head_bytes, checksums))
    root = checkpoint.name if checkpoint.gguf is None else checkpoint.gguf.path.name
    manifest = ModelManifest(root, checkpoint.weights_identity.hex(), files)
    content = manifest.written()
    if len(content) > MOST_MANIFEST_BYTES or not is_sound(manifest):
        return None
    path = folder / f"{hashlib.sha256(content).hexdigest()}.json"
    write_private(path, content)
    write_private(known, path.name.encode())
    return path


def _heads(checkpoint: Checkpoint) -> Iterator[tuple[Path, int]]:
    """Yields each file of the checkpoint, with the number of its first bytes that are needed to open it."""
    if checkpoint.gguf is not None:
        tensors = checkpoint.gguf.header.tensors.values()
        for part in part_names(checkpoint.gguf.path):
            offsets = [tensor.offset for tensor in tensors if tensor.path == part]
            yield part, min(offsets, default=part.stat().st_size)
        return
    shards = set(checkpoint.weight_index.values())
    for shard in sorted(shards):
        yield shard, min(tensor.offset for tensor in read_header(shard).values())
    for path in sorted(checkpoint.folder.rglob("*")):
        name = path.relative_to(checkpoint.folder).as_posix()
        if path not in shards and path.is_file() and is_small(name) and not path.name.startswith("."):
            yield path, path.stat().st_size


def _stamps(paths: Iterable[Path]) -> str:
    """The digest of the files' places, sizes and times of change."""
    digest = hashlib.sha256()
    for path in paths:
        stamp = path.stat()
        digest.update(f"{path} {stamp.st_ino} {stamp.st_size} {stamp.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _checksum(path: Path, start: int) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.sha256(os.pread(file.fileno(), PART_BYTES, start)).hexdigest()
