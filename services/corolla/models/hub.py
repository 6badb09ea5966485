"""The Hugging Face hub and its local cache: lists the files of a repository at one commit, and fetches them.

The cache has the layout of huggingface_hub, so other tools can use it. Several processes may share it, since a file
gets its name only when it is complete. The cache also has the manifest of each commit: a start without the hub needs
it, since a model's fingerprint includes the checksums of files that are not in the cache. Files are fetched when they
are needed, and their checksums are checked.
"""

import errno
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, is_offline_mode
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.tqdm import tqdm
from pydantic import TypeAdapter

from corolla.chassis.errors import CheckpointError, HubUnavailable
from corolla.models.weights import (
    CONSOLIDATED_INDEX,
    INDEX_FILE,
    no_weights,
    read_header,
    read_index,
    weight_files,
)

log = logging.getLogger(__name__)

_ASK_TIMEOUT_S: Final = 10.0
_FILE_MODE: Final = 0o644
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256_DIGITS: Final = 64

_Result = TypeVar("_Result")

Stamp = tuple[int, int, int]
"""A file's inode, size and time of change; at least one of them changes when the file is replaced."""

_CHECKED: Final[dict[Path, Stamp]] = {}
"""The files that this process has checked, with their stamps; successive block servers of the process share them."""


class StoredFile(NamedTuple):
    """One file of a repository.

    Attributes:
        num_bytes: its length.
        checksum: hexadecimal digits: 64 of the SHA-256 of a large file, or 40 of git's SHA-1 of another file as a blob.
    """

    num_bytes: int
    checksum: str

    def matches(self, path: Path) -> bool:
        """The file at `path` matches by length and checksum; it is read only if its length is right.

        Raises:
            OSError: the file cannot be read.
        """
        if path.stat().st_size != self.num_bytes:
            return False
        digest = hashlib.sha1(b"blob %d\0" % self.num_bytes, usedforsecurity=False)
        if len(self.checksum) == _SHA256_DIGITS:
            digest = hashlib.sha256()
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: digest).hexdigest() == self.checksum


@dataclass(frozen=True)
class Manifest:
    """The commit of a repository, and its files.

    Attributes:
        commit: the commit's hash.
        files: the files by name; a name with a slash lies in a folder.
        is_open: whether the hub gives the files to everybody: they are neither gated nor private. False: it does not,
            or did not say so.
    """

    commit: str
    files: dict[str, StoredFile]
    is_open: bool = False


_MANIFEST: Final = TypeAdapter(Manifest)


def is_open(folder: Path) -> bool:
    """Whether the hub gives everybody the revision that lies in a folder of its cache; see `Manifest.is_open`."""
    try:
        manifest = _MANIFEST.validate_json((folder.parents[1] / "corolla" / f"{folder.name}.json").read_bytes())
    except (IndexError, OSError, ValueError):
        return False
    return manifest.is_open


@dataclass(frozen=True)
class Hub:
    """A client of the hub.

    Attributes:
        offline: whether to use only the cache; `HF_HUB_OFFLINE=1` means the same.
        patience_s: how long to repeat requests after temporary failures (no connection, an overloaded hub, a broken
            transfer).
        cache: the folder of the cache; by default, that of huggingface_hub (`HF_HOME`, `HF_HUB_CACHE`).
        endpoint: address of the hub or a mirror; by default `HF_ENDPOINT`.
        checked: the files of the cache that had the right checksums, with their stamps at that time.
    """

    offline: bool = False
    patience_s: float = 30.0
    cache: Path = field(default_factory=lambda: Path(constants.HF_HUB_CACHE))
    endpoint: str = field(default_factory=lambda: os.environ.get("HF_ENDPOINT") or constants.ENDPOINT)
    checked: dict[Path, Stamp] = field(default_factory=lambda: _CHECKED, repr=False, compare=False)
    _stopped: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    @property
    def is_offline(self) -> bool:
        return self.offline or is_offline_mode()

    def stop(self) -> None:
        """Ends the transfers of all threads; they fail with HubUnavailable."""
        self._stopped.set()

    def download(self, repository: str, name: str, commit: str, *, again: bool = False) -> None:
        """Fetches one file into the cache; with `again`, also if the cache has it.

        Raises:
            CheckpointError: the hub refuses access, or the cache cannot be written to.
            HubUnavailable: the hub cannot be reached, or the transfer breaks off.
        """
        try:
            hf_hub_download(
                repository,
                name,
                revision=commit,
                cache_dir=self.cache,
                endpoint=self.endpoint,
                force_download=again,
                tqdm_class=_bar_until(self._stopped),
            )
        except Exception as error:  # huggingface_hub raises many unrelated classes
            raise hub_failure(error, repository, str(self.cache)) from error

    def repository_folder(self, repository: str) -> Path:
        return self.cache / repo_folder_name(repo_id=repository, repo_type="model")

    def patiently(self, ask: Callable[[], _Result]) -> _Result:
        """Repeats a request while it raises HubUnavailable, for at most `patience_s` and until `stop` is called."""
        ends_at = time.monotonic() + self.patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return ask()
            except HubUnavailable:
                if self._stopped.is_set() or time.monotonic() + pause_s > ends_at:
                    raise
                log.warning("the hub cannot be reached or broke off; trying again", extra={"in_s": pause_s})
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def manifest(self, repository: str, revision: str | None) -> Manifest:
        """Pins a revision to a commit, and lists its files; a commit that the cache knows needs no request.

        Args:
            revision: branch, tag or commit; None: the main branch.

        Raises:
            CheckpointError: there is no such model, or the hub refuses access.
            HubUnavailable: the hub cannot be reached, and the cache does not have the answer.
        """
        commit = self._remembered_commit(repository, revision or constants.DEFAULT_REVISION)
        known = self._remembered(repository, commit)
        if self.is_offline:
            if commit is None:
                raise CheckpointError(
                    f"{repository!r} is not a local folder, the cache {self.cache} does not know its revision "
                    f"{revision or constants.DEFAULT_REVISION!r}, and offline mode is on; fetch it where there "
                    "is a network, or give a local folder."
                )
            return known or self._by_links(repository, commit)
        if known is not None and commit == revision:
            return known  # a commit never changes

        def ask() -> Manifest:
            try:
                return self._ask(repository, revision)
            except HubUnavailable:
                if known is None:
                    raise
                log.warning("the hub cannot be reached; going on with the revision that the cache has")
                return known

        return self.patiently(ask)

    def _ask(self, repository: str, revision: str | None) -> Manifest:
        """Asks the hub for a commit and its files, in one request. Raises as `manifest` does."""
        try:
            api = HfApi(endpoint=self.endpoint)
            info = api.model_info(repository, revision=revision, files_metadata=True, timeout=_ASK_TIMEOUT_S)
        except Exception as error:  # huggingface_hub raises many unrelated classes
            raise hub_failure(error, repository, str(self.cache)) from error
        files: dict[str, StoredFile] = {}
        for sibling in info.siblings or ():
            if sibling.lfs is not None:
                files[sibling.rfilename] = StoredFile(sibling.lfs.size, sibling.lfs.sha256)
            elif sibling.blob_id is not None and sibling.size is not None:
                files[sibling.rfilename] = StoredFile(sibling.size, sibling.blob_id)
        # The commit becomes the name of a folder in the cache.
        if info.sha is None or not _COMMIT.fullmatch(info.sha) or not files:
            raise CheckpointError(
                f"{api.endpoint} does not say which files {repository!r} has, with their checksums; ask the hub itself "
                "or another mirror, or give a local folder."
            )
        manifest = Manifest(info.sha, files, is_open=info.gated is False and info.private is False)
        try:
            _write(self._manifest_path(repository, info.sha), _MANIFEST.dump_json(manifest, indent=1).decode())
            if revision != info.sha:
                _write(self._reference(repository, revision or constants.DEFAULT_REVISION), info.sha)
        except OSError:
            log.warning("cannot write to the hub's cache; a later start without the hub may lack files")
        return manifest

    def _manifest_path(self, repository: str, commit: str) -> Path:
        return self.repository_folder(repository) / "corolla" / f"{commit}.json"

    def _reference(self, repository: str, revision: str) -> Path:
        return self.repository_folder(repository) / "refs" / revision

    def _remembered_commit(self, repository: str, revision: str) -> str | None:
        if _COMMIT.fullmatch(revision):
            return revision
        try:
            return self._reference(repository, revision).read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def _remembered(self, repository: str, commit: str | None) -> Manifest | None:
        if commit is None:
            return None
        try:
            manifest = _MANIFEST.validate_json(self._manifest_path(repository, commit).read_bytes())
        except (OSError, ValueError):
            return None
        return manifest if manifest.commit == commit else None

    def _by_links(self, repository: str, commit: str) -> Manifest:
        """A manifest of a commit that another tool put into the cache; it lists only the files that the cache has.

        Each file of the cache is a link to its content, and the content's name is the checksum.
        """
        folder = self.repository_folder(repository) / "snapshots" / commit
        links = [path for path in folder.rglob("*") if path.is_symlink() and path.exists()]
        return Manifest(
            commit,
            {
                path.relative_to(folder).as_posix(): StoredFile(path.stat().st_size, path.readlink().name)
                for path in links
            },
        )


def _bar_until(stopped: threading.Event) -> type[tqdm]:
    """A class of progress bars that ends transfers once `stopped` is set: huggingface_hub calls it for every chunk."""

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> None:
            if stopped.is_set():
                raise InterruptedError("this process ends")
            super().update(n)

    return Bar


def _write(path: Path, text: str) -> None:
    """Writes a text file atomically: other processes see the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    written = Path(file.name)
    written.chmod(_FILE_MODE)
    written.replace(path)


_TRY_AGAIN: Final = frozenset({408, 425, 429})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNWRITABLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def hub_failure(error: Exception, repository: str, cache: str) -> CheckpointError | HubUnavailable:
    """Corolla's error for an exception of huggingface_hub: HubUnavailable if a retry may help, else CheckpointError.

    The exception's text is not repeated, since it may contain signed addresses.
    """
    error = _cause(error)
    if isinstance(error, GatedRepoError):
        return CheckpointError(
            f"{repository!r} is gated: accept its terms on the hub, and give an access token of that account in "
            "HF_TOKEN, or in the file that HF_TOKEN_PATH names."
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(f"{repository!r} has no such revision; give a branch, a tag or a commit that it has.")
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return CheckpointError(
            f"The hub lists a file of {repository!r} that it does not have; choose another revision."
        )
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
        return CheckpointError(
            f"{repository!r} is not a local folder, and the hub does not know it or does not show it to this access "
            "token; check the name and HF_TOKEN, or give a local folder."
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return CheckpointError(
                f"The hub refuses access to {repository!r} (status {status}); give an access token that may read it in "
                "HF_TOKEN, or in the file that HF_TOKEN_PATH names."
            )
        if 400 <= status < 500 and status not in _TRY_AGAIN:
            return CheckpointError(
                f"The hub refuses {repository!r} (status {status}); check the name and HF_ENDPOINT, or give a local "
                "folder."
            )
    elif isinstance(error, OSError) and error.errno in _FULL:
        return CheckpointError(f"{cache} is full; give the cache more room, or hold fewer blocks.")
    elif isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return CheckpointError(f"{cache} cannot be written to; set HF_HOME to a folder that can.")
    return HubUnavailable(
        f"{repository!r} is not a local folder, and the hub cannot be reached or its answers break off; check the "
        "network, the proxy and HF_ENDPOINT, or give a local folder."
    )


def _cause(error: Exception) -> Exception:
    """The underlying exception, if huggingface_hub has wrapped it in one that says only that no file was found."""
    wrappers = (LocalEntryNotFoundError, RevisionResolutionError, ValueError)
    while isinstance(error, wrappers) and not isinstance(error, HfHubHTTPError):
        if not isinstance(error.__cause__, Exception):
            break
        error = error.__cause__
    return error


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
        snapshot.fetch({name for name in snapshot.manifest.files if is_small(name)})
        return snapshot

    def weight_index(self) -> dict[str, Path]:
        """Maps each tensor's name to the shard that holds it, whether the shard is in the cache or not.

        A single file takes precedence over an index; it is fetched to read its table of contents.

        Raises:
            CheckpointError: the repository has no safetensors, or its index names a file that it lacks.
        """
        single, index_name = weight_files(self.manifest.files)
        if single in self.manifest.files:
            self.fetch({single})
            return dict.fromkeys(read_header(self.folder / single), self.folder / single)
        if index_name not in self.manifest.files:
            raise CheckpointError(no_weights(self.repository, self.manifest.files))
        index = read_index(self.folder, index_name)
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
            f"{name} is missing in {self.repository!r} although an index names it; choose another revision."
        )


def _stamp_of(path: Path) -> Stamp | None:
    """The stamp of a file; None where it does not exist, or is a broken link."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_small(name: str) -> bool:
    """Configuration, tokenizer and chat template are needed in addition to the weights."""
    path = PurePosixPath(name)
    if path.name.endswith(".index.json"):
        return name in (INDEX_FILE, CONSOLIDATED_INDEX)
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
