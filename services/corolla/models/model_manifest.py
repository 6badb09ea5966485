"""The manifest of a model's files: their names and lengths, and the SHA-256 of each part of 1 MiB.

The first machine of a shared stack makes it from its own files. The SHA-256 of the manifest reaches the other machines
through the issuer; all the rest may come from anybody, since it is checked.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple, Self

from pydantic import TypeAdapter, ValidationError

from corolla.chassis.errors import CheckpointError
from corolla.wire.frames import Buffer

PART_BYTES: Final = 1 << 20
DIGEST_BYTES: Final = 32
MOST_MANIFEST_BYTES: Final = 64 << 20
"""Enough for a model of a terabyte."""
_MOST_FILES: Final = 4096
_MOST_FILE_BYTES: Final = 1 << 42
_MOST_NAME_BYTES: Final = 255
_MOST_DEEP: Final = 2


class PartNumber(NamedTuple):
    """A part of one file. Files count from 1, since file 0 is the manifest; parts count from 0."""

    file: int
    part: int


@dataclass(frozen=True)
class ManifestFile:
    """One file.

    Attributes:
        name: its path below the model's folder, with slashes.
        num_bytes: its length.
        num_head_bytes: how many of its first bytes are needed to open it; the others are read for some tensors only.
        checksums: the SHA-256 of each part in turn, in hexadecimal digits.
    """

    name: str
    num_bytes: int
    num_head_bytes: int
    checksums: str

    @property
    def num_parts(self) -> int:
        return math.ceil(self.num_bytes / PART_BYTES)

    def matches(self, part: int, content: Buffer) -> bool:
        """The content is that of a part, by its checksum."""
        digits = 2 * DIGEST_BYTES
        return hashlib.sha256(content).hexdigest() == self.checksums[part * digits : (part + 1) * digits]

    def parts(self, start: int, end: int) -> range:
        """The numbers of the parts that hold the bytes from `start` up to `end`."""
        return range(start // PART_BYTES, math.ceil(min(end, self.num_bytes) / PART_BYTES))


@dataclass(frozen=True)
class ModelManifest:
    """The files of one model.

    Attributes:
        root: the name of the model, by which its folder or its GGUF file is called. A hub id may have two parts.
        identity: the digest of the weights that fingerprints include (`Checkpoint.weights_identity`), in hexadecimal
            digits: a machine with some of the tensors cannot compute it.
        files: the files. If `root` names a GGUF file, they are its parts.
    """

    root: str
    identity: str
    files: Sequence[ManifestFile]

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Reads a manifest. Raises CheckpointError if it breaks a rule; names lead to no place outside the folder."""
        try:
            manifest: Self = TypeAdapter(cls).validate_json(content)
        except ValidationError:
            raise CheckpointError("the manifest of the model's files cannot be read") from None
        if not is_sound(manifest):
            raise CheckpointError("the manifest of the model's files breaks a rule: a name, a length or a checksum")
        return manifest

    @property
    def is_folder(self) -> bool:
        """`root` names the folder of the files, and none of them."""
        return all(file.name != self.root for file in self.files)

    def written(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def is_sound(manifest: ModelManifest) -> bool:
    """The manifest keeps the rules: for the number of files, and their names, lengths and checksums."""
    names = [file.name for file in manifest.files]
    return (
        0 < len(names) <= _MOST_FILES
        and len(set(names)) == len(names)
        and _is_name(manifest.root)
        and _is_digest(manifest.identity)
        and all(map(_is_sound, manifest.files))
    )


def _is_sound(file: ManifestFile) -> bool:
    return (
        _is_name(file.name)
        and 0 <= file.num_head_bytes <= file.num_bytes <= _MOST_FILE_BYTES
        and len(file.checksums) == 2 * DIGEST_BYTES * file.num_parts
    )


def _is_name(name: str) -> bool:
    """The name is a relative path without hidden folders or files, and so without `..`."""
    steps = name.split("/")
    return (
        len(steps) <= _MOST_DEEP
        and name.isprintable()
        and len(name.encode()) <= _MOST_NAME_BYTES
        and all(step and not step.startswith(".") and "\\" not in step for step in steps)
    )


def _is_digest(text: str) -> bool:
    return len(text) == 2 * DIGEST_BYTES and all(digit in "0123456789abcdef" for digit in text)
