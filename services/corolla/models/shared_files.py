"""The files of a model that the machines of a shared stack give each other, part by part.

A machine that lacks files has them with holes: each file has its whole length at once, and a part is written where it
belongs once its checksum was compared. So files are opened as if they were whole, and what lies between the parts takes
no room on the disk.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from corolla.chassis.errors import CheckpointError
from corolla.models.model_manifest import PART_BYTES, ManifestFile, ModelManifest, PartNumber
from corolla.wire.frames import Buffer

log = logging.getLogger(__name__)

MANIFEST: Final = 0
"""The number of the manifest itself, where files count from 1."""

_DISK_BLOCK_BYTES: Final = 512
"""The unit of `st_blocks`, whatever the file system's own is."""

Get = Callable[["SharedFiles", Sequence[PartNumber]], None]
"""Has `SharedFiles.take` called with each of these parts, from other machines, and returns when all were taken."""


class SharedFiles:
    """The files of one manifest in a folder of this machine. Its methods read and write, so they run in threads.

    Args:
        content: the manifest as it is written.
        folder: where the files are, or become. A fetched model is named after it, so it ends with `manifest.root` where
            that names a folder.
        get: gets parts that are missing; None: all files are whole.
    """

    def __init__(self, manifest: ModelManifest, content: bytes, folder: Path, get: Get | None = None) -> None:
        self.manifest = manifest
        self._content = content
        self._folder = folder
        self._get = get
        # Each file has a byte for each part: 1 if this process has found the part sound, or written it.
        self._sound = [bytearray(file.num_parts) for file in manifest.files]
        self._changed: set[int] = set()
        self._numbers = {folder / file.name: number for number, file in enumerate(manifest.files, 1)}

    @property
    def path(self) -> Path:
        """What opens the model: its folder, or its GGUF file."""
        return self._folder if self.manifest.is_folder else self._folder / self.manifest.root

    @property
    def num_missing_bytes(self) -> int:
        """At most so many bytes of the files are not here: the disk has no blocks for them, or has compressed them."""
        stored = ((self._folder / file.name).stat().st_blocks * _DISK_BLOCK_BYTES for file in self.manifest.files)
        return sum(max(0, file.num_bytes - held) for file, held in zip(self.manifest.files, stored, strict=True))

    def has(self, number: PartNumber) -> bool:
        """The manifest has a part of this number."""
        if number.file == MANIFEST:
            return number.part * PART_BYTES <= len(self._content)
        return number.file <= len(self.manifest.files) and number.part < self._file(number).num_parts

    def read(self, number: PartNumber) -> bytes | None:
        """The bytes of a part for another machine; None: this machine lacks it, or its file has changed."""
        start = number.part * PART_BYTES
        if number.file == MANIFEST:
            return self._content[start : start + PART_BYTES]
        if self._get is not None and not self._sound[number.file - 1][number.part]:
            return None
        try:
            with self._path(number).open("rb", buffering=0) as file:
                content = os.pread(file.fileno(), PART_BYTES, start)
        except OSError:
            return None
        if self._file(number).matches(number.part, content):
            return content
        if number.file not in self._changed:
            self._changed.add(number.file)
            log.error(
                "a file differs from the manifest of the model's files, so other machines do not get these parts",
                extra={"path": str(self._path(number))},
            )
        return None

    def take(self, number: PartNumber, content: Buffer) -> bool:
        """Writes a part that another machine sent. Returns False, and writes nothing, if it is not what it should be.

        Raises:
            CheckpointError: it cannot be written.
        """
        if not self._file(number).matches(number.part, content):
            return False
        with self._writing(), self._path(number).open("r+b", buffering=0) as file:
            start, view = number.part * PART_BYTES, memoryview(content)
            while view:
                written = os.pwrite(file.fileno(), view, start)
                start, view = start + written, view[written:]
        self._sound[number.file - 1][number.part] = 1
        return True

    def fetch_heads(self) -> None:
        """Gets what is needed to open the model: small files, and the tables of contents of the others.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        for file in self.manifest.files:
            path = self._folder / file.name
            with self._writing():
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as made:
                    if made.tell() != file.num_bytes:
                        made.truncate(file.num_bytes)
        self.fetch((self._folder / file.name, 0, file.num_head_bytes) for file in self.manifest.files)

    def fetch(self, places: Iterable[tuple[Path, int, int]]) -> None:
        """Gets the parts of files that hold `num_bytes` from `start` on, for each file, `start` and `num_bytes`.

        Raises:
            CheckpointError: there is no room, or a file cannot be written.
            StartupError: this process ends.
        """
        if self._get is None:
            return
        wanted = {
            PartNumber(self._numbers[path], part)
            for path, start, num_bytes in places
            for part in self.manifest.files[self._numbers[path] - 1].parts(start, start + num_bytes)
            if num_bytes
        }
        missing = [number for number in sorted(wanted) if not self._is_sound(number)]
        if not missing:
            return
        num_bytes, num_free = len(missing) * PART_BYTES, shutil.disk_usage(self._folder).free
        if num_bytes > num_free:
            raise CheckpointError(
                f"{self._folder} has {num_free >> 20} MiB left, and the missing weights have {num_bytes >> 20} MiB; "
                "make room, set COROLLA_CACHE to another folder, or hold fewer blocks"
            )
        log.info("fetching from other machines", extra={"model": self.manifest.root, "bytes": num_bytes})
        self._get(self, missing)

    def _is_sound(self, number: PartNumber) -> bool:
        """The part is here. What an earlier process wrote is read and compared once."""
        sound = self._sound[number.file - 1]
        if not sound[number.part]:
            sound[number.part] = self._is_written(number)
        return bool(sound[number.part])

    def _is_written(self, number: PartNumber) -> bool:
        start = number.part * PART_BYTES
        with contextlib.suppress(OSError), self._path(number).open("rb", buffering=0) as file:
            # In a hole there is nothing to compare. The system raises OSError where no data follow.
            if os.lseek(file.fileno(), start, os.SEEK_DATA) < start + PART_BYTES:
                return self._file(number).matches(number.part, os.pread(file.fileno(), PART_BYTES, start))
        return False

    def _file(self, number: PartNumber) -> ManifestFile:
        return self.manifest.files[number.file - 1]

    def _path(self, number: PartNumber) -> Path:
        return self._folder / self._file(number).name

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._folder} cannot be written: {error.strerror}; make room, or set COROLLA_CACHE to another folder"
            ) from None
