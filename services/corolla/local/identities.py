"""Issues the certificates of a stack on this machine."""

import shutil
from pathlib import Path
from typing import Final

from corolla.chassis.errors import StartupError
from corolla.trust.authority import Authority
from corolla.trust.loopback import make_folder
from corolla.trust.workload import Role, Workload
from corolla.wire.network import Network

TRUST_DOMAIN: Final = "local"
LIBRARY_TENANT: Final = "public"
_HERE: Final = ("127.0.0.1", "localhost", "::1")


class StackIdentities:
    """Issues certificates for the processes of one stack and for the user's own programs; `remove` deletes them.

    Args:
        router: the router's address, by which the user's programs find their certificates.

    Attributes:
        folder: a folder that only the user may read, for the certificates and other secrets.
        operator: the operator's certificate as a `Network`, with which the stack calls its own processes.

    Raises:
        StartupError: the folder cannot be made, or files in it cannot be written.
    """

    def __init__(self, router: str) -> None:
        self._authority = Authority()
        self.folder = make_folder(router)
        self._issue(self.folder / Role.LIBRARY.value, Role.LIBRARY, LIBRARY_TENANT)
        self._issue(self.folder / Role.OPERATOR.value, Role.OPERATOR, "user")
        self.operator = Network.from_folder(self.folder / Role.OPERATOR.value)

    def folder_of(self, role: Role, name: str) -> Path:
        """The folder with a process's certificate, which the process keeps when it is started again."""
        folder = self.folder / name
        if not folder.exists():
            self._issue(folder, role, name)
        return folder

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _issue(self, folder: Path, role: Role, name: str) -> None:
        try:
            self._authority.issue(folder, Workload(TRUST_DOMAIN, role, name), _HERE)
        except OSError as failure:
            raise StartupError(f"cannot write {folder}: {failure.strerror}") from None
