"""Finds the files of an adapter in a local folder, or fetches them from the hub at one commit."""

from pathlib import Path
from typing import Final

from corolla.chassis.errors import AdapterError
from corolla.models.adapters.config import CONFIG_FILE
from corolla.models.adapters.file import MAX_FILE_BYTES, WEIGHTS_FILE
from corolla.models.hub import Hub
from corolla.models.hub_snapshot import HubSnapshot

_FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)


def adapter_folder(source: str, revision: str, root: Path | None = None, hub: Hub | None = None) -> Path:
    """Finds the folder of an adapter; fetches it first if it is on the hub.

    Args:
        source: a hub id if there is a `revision`, otherwise a folder, relative to `root` if that is given.
        revision: branch, tag or commit on the hub; empty: `source` is a folder.
        root: the folder that must contain the adapter's folder; None: the adapter may be in any folder.
        hub: the hub's client; None: one with default settings.

    Raises:
        AdapterError: the folder is missing or outside of `root`, or the hub's files are missing, too large or damaged.
        HubUnavailable: the hub cannot be reached.
    """
    if revision:
        snapshot = HubSnapshot.pin(hub or Hub(), source, revision)
        absent = sorted(set(_FILES) - set(snapshot.manifest.files))
        if absent:
            raise AdapterError(
                f"{source!r} has no {absent[0]}; only adapters that PEFT saved as safetensors are served"
            )
        if snapshot.manifest.files[WEIGHTS_FILE].num_bytes > MAX_FILE_BYTES:
            raise AdapterError(f"{source!r} has a larger {WEIGHTS_FILE} than is served")
        snapshot.fetch(_FILES)
        return snapshot.folder
    folder = Path(source).expanduser()
    if root is not None:
        folder = (root / folder).resolve()
        if not folder.is_relative_to(root.resolve()):
            raise AdapterError("the adapter's folder is outside of COROLLA_ADAPTERS_DIR")
    if not folder.is_dir():
        raise AdapterError("the adapter's folder is not there; name the one that PEFT wrote")
    return folder
