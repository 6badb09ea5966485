"""The model's files that block servers of a shared stack give each other, as one block server sees them."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from corolla.block_server.part_fetcher import PartFetcher
from corolla.block_server.part_sender import PartSender
from corolla.block_server.registration import Registration
from corolla.chassis.errors import CheckpointError, SettingsError
from corolla.chassis.private_files import write_private
from corolla.chassis.tasks import TaskGroup
from corolla.models.checkpoint import Checkpoint
from corolla.models.model_manifest import DIGEST_BYTES, ModelManifest
from corolla.models.shared_files import SharedFiles
from corolla.v1 import router_pb2
from corolla.wire.network import Network

log = logging.getLogger(__name__)


class ModelFiles:
    """The model's files, as one block server gets and gives them. `find` and `note` are for threads.

    The event loop makes it.

    Args:
        manifest: the manifest, `DIGEST.json`. If the model is the folder `DIGEST` next to it, other block servers give
            this one the manifest and the files.
        model: the model as the settings name it.
        router: the `host:port` of the router, which knows the other block servers.
        network: connects to them.

    Raises:
        SettingsError: the manifest's name is not a SHA-256.
    """

    def __init__(self, manifest: Path, model: str, router: str, network: Network) -> None:
        self._path = manifest
        try:
            self._digest = bytes.fromhex(manifest.stem)
        except ValueError:
            self._digest = b""
        if len(self._digest) != DIGEST_BYTES:
            raise SettingsError(f"COROLLA_MANIFEST={manifest} must be named by its SHA-256, and .json")
        self._is_fetched = Path(model) == manifest.with_suffix("")
        # It asks before this server has a description.
        self._asking = Registration(router, router_pb2.ServerDescription(), router_pb2.ServerLoad, network.channels)
        self._fetcher = PartFetcher(self._digest, self._asking.placement, network.connect)
        self._files: SharedFiles | None = None

    def find(self) -> SharedFiles | None:
        """The model's files, whose missing parts other machines have; None: they are where the settings say.

        Raises:
            CheckpointError: the files cannot be written, or break a rule.
            StartupError: this process ends.
        """
        if not self._is_fetched:
            return None
        if (content := self._read()) is None:
            content = self._fetcher.manifest()
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_private(self._path, content)
            except OSError as failure:
                raise CheckpointError(f"{self._path} cannot be written: {failure.strerror}") from None
        manifest = ModelManifest.parse(content)
        folder = Path(os.path.abspath(self._path.with_suffix("")))
        if manifest.is_folder:
            folder /= manifest.root  # after which the model is named
        files = SharedFiles(manifest, content, folder, self._fetcher.get)
        files.fetch_heads()
        self._files = files
        return files

    def note(self, checkpoint: Checkpoint) -> None:
        """Takes note of a checkpoint that is whole on this machine, and whose files others may have."""
        if self._is_fetched or (content := self._read()) is None:
            return
        manifest = ModelManifest.parse(content)
        if manifest.identity != checkpoint.weights_identity.hex():
            log.warning("the model has changed since its manifest was made, so its files are not shared")
            return
        self._files = SharedFiles(manifest, content, checkpoint.files_folder)

    def sender(self, tasks: TaskGroup, is_computing: Callable[[], bool]) -> PartSender | None:
        """Returns what gives the files to others; None: there are none to give."""
        return PartSender(self._files, self._digest, tasks, is_computing) if self._files is not None else None

    @property
    def seconds_left(self) -> float:
        """How long what is missing will take; 0: nothing is missing, or it is not known."""
        return self._fetcher.seconds_left

    def stop(self) -> None:
        """Ends what threads wait for."""
        self._fetcher.stop()

    async def close(self) -> None:
        """Closes the channel to the router."""
        await self._asking.close()

    def _read(self) -> bytes | None:
        """The manifest; None: it is not here, or not the one that its name says."""
        with contextlib.suppress(OSError):
            content = self._path.read_bytes()
            if hashlib.sha256(content).digest() == self._digest:
                return content
        return None
