"""A checkpoint on the hub at one commit; files are fetched when they are needed, and their checksums are checked."""

import logging
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Final

from corolla.chassis.errors import CheckpointError, HubUnavailable
from corolla.models.hub import Hub, Manifest, Stamp, StoredFile, hub_failure
from corolla.models.weights import INDEX_FILE, SINGLE_FILE, no_weights, read_header, read_index, warn_of_index

log = logging.getLogger(__name__)

_SIMULTANEOUS_FILES: Final = 4
# A transfer that still runs has written to its file within this time.
_LEFTOVER_AGE_S: Final = 3600.0
# The endings of a checkpoint's files other than weights: configuration, tokenizer, chat template.
_SMALL_FILES: Final = frozenset({".json", ".jinja", ".txt", ".model"})


class HubSnapshot:
    """A repository at one commit, some of whose files are in the cache.

    Attributes:
        hub: the hub's client.
        repository: hub id.
        folder: the folder of the files in the cache.
        manifest: all files that the hub has of the commit.
    """

    def __init__(self, hub: Hub, repository: str, manifest: Manifest) -> None:
        self.hub = hub
        self.repository = repository
        self.manifest = manifest
        self.folder = hub.repository_folder(repository) / "snapshots" / manifest.commit

    @classmethod
    def pin(cls, hub: Hub, repository: str, revision: str | None) -> "HubSnapshot":
        """Pins a repository to a commit, and fetches small files that the cache lacks or that are damaged there.

        Args:
            revision: branch, tag or commit; None: the main branch.

        Raises:
            CheckpointError: there is no such model, the hub refuses access, or the cache cannot be written.
            HubUnavailable: the hub cannot be reached, and the cache lacks a file.
        """
        snapshot = cls(hub, repository, hub.manifest(repository, revision))
        snapshot.fetch({name for name in snapshot.manifest.files if _is_small(name)})
        return snapshot

    def weight_index(self) -> dict[str, Path]:
        """Maps each tensor's name to the shard that holds it, whether the shard is in the cache or not.

        A single file takes precedence over an index; it is fetched to read its table of contents.

        Raises:
            CheckpointError: the repository has no safetensors, or its index names a file that it lacks.
        """
        has_single, has_index = (name in self.manifest.files for name in (SINGLE_FILE, INDEX_FILE))
        warn_of_index(self.repository, has_single=has_single, has_index=has_index)
        if has_single:
            self.fetch({SINGLE_FILE})
            return dict.fromkeys(read_header(self.folder / SINGLE_FILE), self.folder / SINGLE_FILE)
        if not has_index:
            raise CheckpointError(no_weights(self.repository, self.manifest.files))
        index = read_index(self.folder)
        absent = sorted({shard.name for shard in index.values()} - set(self.manifest.files))
        if absent:
            raise self._missing(absent[0])
        return index

    def identity(self, weight_index: Mapping[str, Path]) -> Iterator[bytes]:
        """Yields bytes that identify the weights: the name and checksum of every file with weights."""
        for name in sorted({shard.name for shard in weight_index.values()}):
            yield f"{name} {self.manifest.files[name].checksum}\n".encode()

    def fetch(self, names: Collection[str]) -> None:
        """Fetches the files of `names` that the cache lacks, and checks the checksums of all.

        A file in `Hub.checked` is not read again. A damaged file is fetched again.

        Raises:
            CheckpointError: a file is missing and offline mode is on, or there is no room for it.
            HubUnavailable: the hub cannot be reached, or sends other contents than it lists.
        """
        wanted = [name for name in sorted(names) if not self._is_known(name)]
        if not wanted:
            return
        missing = [name for name in wanted if _stamp_of(self.folder / name) is None]
        num_bytes = sum(self.manifest.files[name].num_bytes for name in missing)
        if missing:
            self._prepare(missing, num_bytes)
            log.info("fetching", extra={"model": self.repository, "files": len(missing), "bytes": num_bytes})
        started = time.monotonic()
        self._fetch_all(wanted)
        facts = {"files": len(wanted), "seconds": round(time.monotonic() - started, 1)}
        log.info("fetched and checked" if missing else "checked", extra=facts)

    def _fetch_all(self, names: Collection[str]) -> None:
        given_up = threading.Event()

        def fetch(name: str) -> None:
            try:
                if not given_up.is_set():
                    self.hub.patiently(lambda: self._fetch_one(name))
            except BaseException:
                given_up.set()  # other files are not begun, so that the failure is reported soon
                raise

        with ThreadPoolExecutor(_SIMULTANEOUS_FILES, "fetch") as pool:
            try:
                for done in [pool.submit(fetch, name) for name in names]:
                    done.result()
            except (KeyboardInterrupt, SystemExit):
                self.hub.stop()  # an interrupt must not wait for transfers that take minutes
                raise

    def _fetch_one(self, name: str) -> None:
        path, stored = self.folder / name, self.manifest.files[name]
        if _stamp_of(path) is None:
            self.hub.download(self.repository, name, self.manifest.commit)
        if self._is_sound(path, stored):
            return
        if self.hub.is_offline:
            raise CheckpointError(f"{path} is damaged and offline mode is on; fetch it again where there is a network.")
        log.warning("a file of the cache is damaged; fetching it again", extra={"file": name})
        if not path.is_symlink():
            path.unlink(missing_ok=True)  # on a disk without links, huggingface_hub would not replace it
        self.hub.download(self.repository, name, self.manifest.commit, again=True)
        if not self._is_sound(path, stored):
            raise HubUnavailable(
                f"What arrives as {name} of {self.repository!r} is not what the hub says that it has; check the proxy "
                "and HF_ENDPOINT, or give a local folder."
            )

    def _is_sound(self, path: Path, stored: StoredFile) -> bool:
        stamp = _stamp_of(path)
        if stamp is None or not stored.matches(path):
            return False
        # The stamp was taken before the check, so a file that was replaced meanwhile counts as unchecked.
        self.hub.checked[path] = stamp
        return True

    def _is_known(self, name: str) -> bool:
        """This process has found the file sound, and it has not changed since."""
        path = self.folder / name
        return path in self.hub.checked and self.hub.checked[path] == _stamp_of(path)

    def _prepare(self, missing: list[str], num_bytes: int) -> None:
        if self.hub.is_offline:
            raise self._missing(missing[0])
        cache = self.hub.cache
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.hub.repository_folder(self.repository) / "blobs")
            num_free_bytes = shutil.disk_usage(cache).free
        except OSError as error:
            raise hub_failure(error, self.repository, str(cache)) from error
        if num_bytes > num_free_bytes:
            raise CheckpointError(
                f"{cache} has {num_free_bytes >> 20} MiB left, and the missing files of {self.repository!r} have "
                f"{num_bytes >> 20} MiB; give the cache more room, or hold fewer blocks."
            )

    def _missing(self, name: str) -> CheckpointError:
        if self.hub.is_offline:
            return CheckpointError(
                f"{name} of {self.repository!r} is missing in {self.folder}, and "
                "offline mode is on; fetch it where there is a network."
            )
        return CheckpointError(
            f"{name} is missing in {self.repository!r} although {INDEX_FILE} names it; choose another revision."
        )


def _stamp_of(path: Path) -> Stamp | None:
    """The stamp of a file; None where it does not exist, or is a broken link."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _is_small(name: str) -> bool:
    """Configuration, tokenizer and chat template are needed in addition to the weights."""
    path = PurePosixPath(name)
    if path.name.endswith(".index.json"):
        return name == INDEX_FILE
    # A tokenizer may have several chat templates, in a folder.
    return path.suffix in _SMALL_FILES and path.parent.as_posix() in (".", "additional_chat_templates")


def _remove_leftovers(blobs: Path) -> None:
    """Removes the incomplete files of processes that were killed during a transfer: no process continues these."""
    oldest = time.time() - _LEFTOVER_AGE_S
    for leftover in blobs.glob("*.incomplete"):
        try:
            if leftover.stat().st_mtime < oldest:
                leftover.unlink()
        except FileNotFoundError:
            pass  # another process removed it, or it is complete by now
