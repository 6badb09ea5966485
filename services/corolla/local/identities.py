"""Issues the certificates of a stack on this machine."""

import datetime
import os
import shutil
from pathlib import Path
from typing import Final

from corolla.chassis.errors import StartupError
from corolla.chassis.private_files import hold
from corolla.trust.authority import Authority
from corolla.trust.credentials import REVOCATIONS_FILE
from corolla.trust.loopback import make_folder
from corolla.trust.workload import Role, Workload
from corolla.wire.network import Network

TRUST_DOMAIN: Final = "local"
LIBRARY_TENANT: Final = "public"
_HERE: Final = ("127.0.0.1", "localhost", "::1")
_LIFETIME: Final = datetime.timedelta(days=1)
_LOCK_FILE: Final = "stack.lock"


class StackIdentities:
    """Issues certificates for the processes of one stack and for the user's own programs; `remove` deletes them.

    The authority of a stack of this machine lasts as long as the stack. That of a shared stack is kept in its state
    folder, whose revocations count for the stack's own processes, too.

    Args:
        router: the router's address, by which the user's programs find their certificates.
        shared_host: the address by which other machines reach this one; empty: none does.
        state_folder: the state folder of a shared stack.

    Attributes:
        folder: a folder that only the user may read, for the certificates and other secrets.
        operator: the operator's certificate as a `Network`, with which the stack calls its own processes.

    Raises:
        StartupError: a folder cannot be made, files in it cannot be written, or another stack has the state folder.
    """

    def __init__(self, router: str, shared_host: str = "", state_folder: Path | None = None) -> None:
        self._authority = Authority() if state_folder is None else Authority.kept_in(state_folder)
        self._lock = None if state_folder is None else _lock(state_folder)
        self._revocations = None if state_folder is None else state_folder.absolute() / REVOCATIONS_FILE
        self._addresses = (*_HERE, shared_host) if shared_host else _HERE
        self._issued: dict[Path, Workload] = {}
        self._renewed = datetime.datetime.now(datetime.UTC)
        self.folder = make_folder(router)
        self._issue(self.folder / Role.LIBRARY.value, Workload(TRUST_DOMAIN, Role.LIBRARY, LIBRARY_TENANT))
        self._issue(self.folder / Role.OPERATOR.value, Workload(TRUST_DOMAIN, Role.OPERATOR, "user"))
        self.operator = Network.from_folder(self.folder / Role.OPERATOR.value)

    def folder_of(self, role: Role, name: str) -> Path:
        """The folder with a process's certificate, which the process keeps when it is started again."""
        folder = self.folder / name
        if not folder.exists():
            self._issue(folder, Workload(TRUST_DOMAIN, role, name))
        return folder

    def renew(self, now: datetime.datetime) -> bool:
        """Replaces the certificates of a shared stack at half of their life. Returns whether it did.

        Raises:
            StartupError: files cannot be written; the next call tries again.
        """
        if self._revocations is None or now < self._renewed + _LIFETIME / 2:
            return False
        for folder, workload in self._issued.items():
            self._issue(folder, workload, now)
        self._renewed = now
        if self.operator.credentials is not None:
            self.operator.credentials.files.refresh()
        return True

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _issue(self, folder: Path, workload: Workload, now: datetime.datetime | None = None) -> None:
        # A stack of this machine deletes its certificates, and nothing renews them before.
        until = None if self._revocations is None else (now or self._renewed) + _LIFETIME
        try:
            self._authority.issue(folder, workload, self._addresses, until)
            link = folder / REVOCATIONS_FILE
            if self._revocations is not None and not link.is_symlink():
                link.symlink_to(self._revocations)
        except OSError as failure:
            raise StartupError(f"cannot write {folder}: {failure.strerror}") from None
        self._issued[folder] = workload


def _lock(state_folder: Path) -> int:
    """Returns a descriptor that holds the state folder, until it is closed or this process ends."""
    try:
        return hold(state_folder / _LOCK_FILE)
    except BlockingIOError:
        raise StartupError(
            f"another stack is shared from {state_folder}; stop it, or name another folder with --state-folder"
        ) from None
    except OSError as failure:
        raise StartupError(f"cannot lock {state_folder}: {failure.strerror}") from None
