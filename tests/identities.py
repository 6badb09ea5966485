"""Certificates for the processes of a test."""

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from cryptography import x509

from corolla.chassis.private_files import write_private
from corolla.trust.authority import Authority
from corolla.trust.credentials import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    REVOCATIONS_FILE,
    workload_of_certificate,
)
from corolla.trust.workload import Role, Workload

TRUST_DOMAIN = "test"
HERE = ("127.0.0.1", "localhost")


class Identities:
    """An authority, and a folder of its own for each workload that it has signed for."""

    def __init__(
        self,
        folder: Path,
        authority: Authority | None = None,
        trust_domain: str = TRUST_DOMAIN,
        issued: Mapping[Path, Workload] | None = None,
    ) -> None:
        self.authority = authority or Authority()
        self._folder = folder
        self._trust_domain = trust_domain
        self._issued: dict[Path, tuple[Workload, tuple[str, ...]]] = {
            each: (workload, HERE) for each, workload in (issued or {}).items()
        }

    @classmethod
    def found_in(cls, folder: Path) -> Self:
        """The identities of processes whose certificates another authority has signed; this one is not trusted yet."""
        issued: dict[Path, Workload] = {}
        for found in folder.glob(f"*/{CERTIFICATE_FILE}"):
            workload = workload_of_certificate(x509.load_pem_x509_certificate(found.read_bytes()))
            assert workload is not None
            issued[found.parent] = workload
        (trust_domain,) = {each.trust_domain for each in issued.values()}
        return cls(folder, trust_domain=trust_domain, issued=issued)

    def folder_of(
        self, role: Role, name: str, addresses: tuple[str, ...] = HERE, until: datetime.datetime | None = None
    ) -> Path:
        """The folder of a workload, made at the first call; its certificate ends at `until`, or with the authority."""
        folder = self._folder / f"{role.value}-{name}"
        if not folder.exists():
            self._issued[folder] = (Workload(self._trust_domain, role, name), addresses)
            self.authority.issue(folder, *self._issued[folder], until)
        return folder

    def trust(self, *authorities: Authority) -> None:
        """Has every workload trust these authorities, and no others."""
        self.trust_pem(*(each.certificate_pem for each in authorities))

    def trust_pem(self, *authorities: bytes) -> None:
        """The same, of authorities of which only the certificates are known."""
        for folder in self._issued:
            write_private(folder / AUTHORITY_FILE, b"".join(authorities))

    def certificate_of(self, role: Role, name: str) -> bytes:
        """The certificate of a workload, in PEM."""
        return (self.folder_of(role, name) / CERTIFICATE_FILE).read_bytes()

    def revoke(self, *folders: Path) -> None:
        """Every workload learns that the certificates of these count no longer."""
        self.revoke_certificates(*((each / CERTIFICATE_FILE).read_bytes() for each in folders))

    def revoke_certificates(self, *certificates: bytes) -> None:
        """Every workload learns that these, in PEM, count no longer."""
        loaded = map(x509.load_pem_x509_certificate, certificates)
        revoked = self.authority.revocations([each.serial_number for each in loaded])
        for folder in self._issued:
            write_private(folder / REVOCATIONS_FILE, revoked)

    def replace(self, authority: Authority, until: datetime.datetime | None = None) -> None:
        """Every workload gets another certificate, of this authority; the authorities that they trust stay the same."""
        self.authority = authority
        for folder in self._issued:
            self._replace(folder, authority, until)

    def replace_one(self, role: Role, name: str, authority: Authority | None = None) -> None:
        """One workload gets another certificate, of this authority or of the present one."""
        self._replace(self.folder_of(role, name), authority or self.authority, None)

    def _replace(self, folder: Path, authority: Authority, until: datetime.datetime | None) -> None:
        workload, addresses = self._issued[folder]
        draft = folder.with_name(f"{folder.name}-new")
        authority.issue(draft, workload, addresses, until)
        for name in (KEY_FILE, CERTIFICATE_FILE):
            write_private(folder / name, (draft / name).read_bytes())
