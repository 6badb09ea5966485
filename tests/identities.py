"""Certificates for the processes of a test."""

from pathlib import Path

from corolla.trust.authority import Authority
from corolla.trust.workload import Role, Workload

TRUST_DOMAIN = "test"
HERE = ("127.0.0.1", "localhost")


class Identities:
    """An authority, and a folder of its own for each workload that it has signed for."""

    def __init__(self, folder: Path, authority: Authority | None = None) -> None:
        self.authority = authority or Authority()
        self._folder = folder

    def folder_of(self, role: Role, name: str, addresses: tuple[str, ...] = HERE) -> Path:
        """Of a workload; made the first time."""
        folder = self._folder / f"{role.value}-{name}"
        if not folder.exists():
            self.authority.issue(folder, Workload(TRUST_DOMAIN, role, name), addresses)
        return folder
