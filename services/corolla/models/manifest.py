"""The manifest of a hub repository at one commit: each file's size and checksum."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SHA256_DIGITS: Final = 64
_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredFile:
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
        if len(self.checksum) == _SHA256_DIGITS:
            digest = hashlib.sha256()
        else:
            digest = hashlib.sha1(b"blob %d\0" % self.num_bytes, usedforsecurity=False)
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest() == self.checksum


@dataclass(frozen=True, slots=True)
class Manifest:
    """The commit of a repository, and its files.

    Attributes:
        commit: the commit's hash.
        files: the files by name; a name with a slash lies in a folder.
    """

    commit: str
    files: Mapping[str, StoredFile]

    def to_json(self) -> str:
        files = {name: [file.num_bytes, file.checksum] for name, file in sorted(self.files.items())}
        return json.dumps({"commit": self.commit, "files": files}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """The inverse of `to_json`.

        Raises:
            ValueError: the text is not a manifest.
        """
        try:
            content = json.loads(text)
            files = {
                str(name): StoredFile(int(num_bytes), str(checksum))
                for name, (num_bytes, checksum) in content["files"].items()
            }
            return cls(str(content["commit"]), files)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("this is not a manifest") from error
