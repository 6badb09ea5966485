"""Finds the model before other processes need it, and fetches it, so that not all of them fetch it at once.

It also looks at the devices that the block servers may take and, for a machine that joins a stack, at what its blocks
would take in memory and on the disk.

This module runs in a child of its own, since fetching starts threads, which the fork server must not do. It writes the
result to standard output as a line of JSON.
"""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from corolla.chassis.channels import TLS_1_3_ONLY
from corolla.chassis.errors import StartupError
from corolla.chassis.loop_thread import LoopThread
from corolla.local.fork_server import ForkServer
from corolla.local.log_files import LogFile

if TYPE_CHECKING:
    from corolla.models.checkpoint import Checkpoint
    from corolla.models.shared_files import SharedFiles

NAME: Final = "model"
"""The child's name."""
EITHER: Final = "any"
"""Stands for GPUs if this machine has some that compute, and else for its processors."""
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the child found.

    Attributes:
        model_type: the name of the model's family in transformers.
        block_weights: the number of weights of a block.
        head_blocks: how many blocks cost as much work as the head.
        device: the kind of the devices, such as `cuda`.
        devices: the name of each device, and its free memory in bytes; 0: not its own.
        fingerprint, fingerprint_parts: what a block server of this machine would announce; empty if not asked for.
        block_bytes: what the largest block takes in memory.
        edge_bytes: what embedding or head take.
        missing_bytes: the weights that have still to be fetched.
        disk_bytes: the room for them.
        disk: where they would lie.
        manifest: the path of the manifest of the model's files, for machines that join; empty if none was made.
    """

    name: str
    num_blocks: int
    model_type: str
    block_weights: float = 0.0
    head_blocks: float = 0.0
    device: str = "cpu"
    devices: Sequence[tuple[str, int]] = ()
    fingerprint: str = ""
    fingerprint_parts: dict[str, str] = field(default_factory=dict)
    block_bytes: int = 0
    edge_bytes: int = 0
    missing_bytes: int = 0
    disk_bytes: int = 0
    disk: str = ""
    manifest: str = ""


def facts_of(
    fork_server: ForkServer,
    log: LogFile,
    while_waiting: Callable[[], None],
    on_warning: Callable[[str], None] = lambda text: None,
) -> ModelFacts | None:
    """Waits for what the child `NAME` says; None: it ended without a word.

    Args:
        while_waiting: is called again and again; what it raises ends the wait.
        on_warning: is called with what the child says while it waits for other machines.

    Raises:
        StartupError: the model cannot be found, opened or fetched.
    """
    while True:
        is_last = fork_server.is_gone(NAME)
        for line in log.new_lines():
            if line.startswith('{"event"'):
                facts = json.loads(line)
                match facts.pop("event"):
                    case "failed":
                        raise StartupError(facts["message"])
                    case "warning":
                        on_warning(facts["message"])
                    case _:
                        return ModelFacts(**facts)
        if is_last:
            return None
        while_waiting()
        time.sleep(_POLL_S)


def main(arguments: Sequence[str]) -> int:
    """Finds the model, and writes the event `prepared` or `failed`, and events `warning` before.

    Args:
        arguments: the model's name or folder; then, if devices are to be counted, their kind, or else nothing; then,
            if others may join, the folder for the manifest of the model's files, or else nothing; then any word if they
            may also have a model that the hub does not give to everybody, or else nothing; then, for a machine that
            joins, the dtype and the quantization of the stack: the weights are not fetched.
    """
    model, kind, manifests, gated, *look = (*arguments, "", "", "")[: max(4, len(arguments))]
    try:
        with _shared_files(model) as shared:
            found = _facts(model, kind, manifests, look, shared, shares_gated=bool(gated))
    except StartupError as failure:
        _tell("failed", message=failure.message)
        return 1
    _tell("prepared", **asdict(found))
    return 0


def _facts(
    model: str, kind: str, manifests: str, look: Sequence[str], shared: "SharedFiles | None", *, shares_gated: bool
) -> ModelFacts:
    from corolla.models.checkpoint import Checkpoint

    checkpoint = Checkpoint.from_pretrained(model if shared is None else str(shared.path), shared=shared)
    facts: dict[str, Any] = {"device": kind, "devices": [] if not kind else _devices(kind)}
    if kind == EITHER:
        facts["device"] = "cuda" if facts["devices"] else "cpu"
    if look:
        facts |= _looked_at(checkpoint, *look)
    else:
        # All blocks are fetched, since the servers together hold all of them.
        checkpoint.fetch()
        head_blocks = checkpoint.head_blocks()
        facts |= {
            "block_weights": checkpoint.vocab_size * checkpoint.hidden_size / head_blocks,
            "head_blocks": head_blocks,
        }
    if manifests:
        facts["manifest"] = _manifest(checkpoint, Path(manifests), shares_gated=shares_gated)
    return ModelFacts(
        name=checkpoint.name, num_blocks=checkpoint.num_blocks, model_type=checkpoint.config.model_type, **facts
    )


@contextmanager
def _shared_files(model: str) -> "Iterator[SharedFiles | None]":
    """Yields the model's files if other machines have them (COROLLA_MANIFEST); None: they are where `model` says."""
    manifest = os.environ.get("COROLLA_MANIFEST")
    if not manifest or Path(model) != Path(manifest).with_suffix(""):
        yield None
        return
    from corolla.block_server import part_fetcher
    from corolla.block_server.model_files import ModelFiles
    from corolla.wire.network import Network

    part_fetcher.log.addHandler(_Warnings(logging.WARNING))

    os.environ.setdefault(*TLS_1_3_ONLY)
    tls_dir = os.environ.get("COROLLA_TLS_DIR")

    async def begin() -> ModelFiles:
        network = Network.from_folder(Path(tls_dir) if tls_dir else None)
        return ModelFiles(Path(manifest), model, os.environ["COROLLA_ROUTER"], network)

    thread = LoopThread("model files")
    files = thread.call(begin())
    try:
        yield files.find()
    finally:
        thread.stop(files.close)


def _manifest(checkpoint: "Checkpoint", folder: Path, *, shares_gated: bool) -> str:
    from corolla.models.manifest_maker import make_manifest

    try:
        return str(make_manifest(checkpoint, folder, shares_gated=shares_gated) or "")
    except OSError as failure:
        raise StartupError(f"cannot make the manifest of the model's files: {failure}") from None


def _looked_at(checkpoint: Any, dtype: str, quantization: str) -> dict[str, Any]:
    from corolla.compute.sizes import model_size
    from corolla.wire.tensors import DTYPES

    size = model_size(checkpoint, DTYPES[dtype], quantization, "auto")
    snapshot = checkpoint.snapshot
    missing, disk = 0, checkpoint.folder
    if snapshot is not None:
        disk = snapshot.hub.cache
        names = {shard.name for shard in checkpoint.weight_index.values()}
        missing = sum(
            snapshot.manifest.files[name].num_bytes for name in names if not (snapshot.folder / name).exists()
        )
    if checkpoint.shared is not None:
        missing, disk = checkpoint.shared.num_missing_bytes, checkpoint.files_folder
    return {
        "fingerprint": checkpoint.fingerprint(dtype, quantization),
        "fingerprint_parts": checkpoint.fingerprint_parts(dtype, quantization),
        "block_bytes": max(block.weight_bytes for block in size.blocks),
        "edge_bytes": max(size.embedding_bytes, size.head_bytes),
        "missing_bytes": missing,
        "disk_bytes": shutil.disk_usage(_existing(disk)).free,
        "disk": str(disk),
    }


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def _devices(kind: str) -> list[tuple[str, int]]:
    """The devices of a kind. Raises StartupError if there is none, unless either kind will do."""
    import torch

    from corolla.compute.device import device_name, memory_of, num_devices

    try:
        number = num_devices("cuda" if kind == EITHER else kind)
    except StartupError:
        if kind != EITHER:
            raise
        return []
    names = [kind] if ":" in kind else [f"{'cuda' if kind == EITHER else kind}:{index}" for index in range(number)]
    devices = list(map(torch.device, names))
    return [(device_name(each), memory.num_free if (memory := memory_of(each)) is not None else 0) for each in devices]


class _Warnings(logging.Handler):
    """Writes what is logged as events `warning`."""

    def emit(self, record: logging.LogRecord) -> None:
        _tell("warning", message=record.getMessage())


def _tell(event: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()
