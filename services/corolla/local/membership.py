"""What this machine has of a stack that it joined: a folder with its key, its certificate and the stack's authority."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from corolla.chassis.errors import StartupError, StoreUnavailable
from corolla.chassis.private_files import make_private_folder, write_private
from corolla.issuer.register import CERTIFICATE_LIFETIME_S
from corolla.local.issuer_client import IssuerClient
from corolla.local.log_files import state_folder
from corolla.trust.authority import private_pem
from corolla.trust.certificate_verifier import CertificateVerifier, PresentedCertificate
from corolla.trust.credentials import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, REVOCATIONS_FILE
from corolla.trust.join_token import JoinToken
from corolla.v1 import issuer_pb2 as pb

_RENEWED_S: Final = CERTIFICATE_LIFETIME_S // 2 - 60
"""A certificate is replaced when it has so many seconds left; the issuer replaces none that has more than half left."""


def joined_folder(address: str) -> Path:
    """Returns the folder of what this machine has of the stack with its issuer at `address`."""
    return state_folder() / "joined" / re.sub(r"[^A-Za-z0-9.-]", "_", address)


class Membership:
    """A machine's membership in one stack.

    Args:
        address: The issuer's `host:port`.
        folder: The folder, which only the user may read.

    Raises:
        StartupError: Other users can read the folder, or it cannot be made.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self._address = address
        self.folder = folder
        self._client: IssuerClient | None = None
        try:
            make_private_folder(folder)
        except OSError as failure:
            raise StartupError(f"cannot use {folder}: {failure.strerror}") from None

    @property
    def exists(self) -> bool:
        """The machine has a certificate of the stack, which may have ended."""
        return (self.folder / CERTIFICATE_FILE).exists()

    def enrol(self, token: JoinToken | None = None) -> pb.EnrolResponse:
        """Gets a certificate, by a token or by the one that the machine has, and writes it. Returns the stack's facts.

        Raises:
            CorollaError: The issuer does not answer, is another one, or refuses; or files cannot be used.
        """
        with self._using_files():
            client = self._connected(token)
            # A machine that joins again is another one. It keeps what it has until it is enrolled.
            is_new = token is not None and self.exists
            key = ec.generate_private_key(ec.SECP256R1()) if is_new else self._key()
            answer = client.enrol(key, token)
            if is_new:
                write_private(self.folder / KEY_FILE, private_pem(key))
            write_private(self.folder / AUTHORITY_FILE, client.authority)
            self._write_revocations(client)
            write_private(self.folder / CERTIFICATE_FILE, answer.certificate)
            return answer

    def follow(self, now_s: float) -> None:
        """Fetches what the authority has revoked, and another certificate at half of this one's life.

        Raises:
            Unauthenticated: This machine was revoked.
            StartupError: The issuer is of another stack, so this machine can only join that one.
            CorollaError: The issuer does not answer, or files cannot be used; the next call tries again.
        """
        try:
            with self._using_files():
                client = self._connected(None)
                client.refresh()
                self._write_revocations(client)
                certificate = (self.folder / CERTIFICATE_FILE).read_bytes()
                ends_s = x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()
                verifier = CertificateVerifier(client.authority, client.revocations)
                if now_s > ends_s - _RENEWED_S or not verifier.is_valid(PresentedCertificate(certificate)):
                    self.enrol()
        except BaseException:
            # The issuer may have another certificate by now, which the next call checks.
            self.close()
            raise

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @contextmanager
    def _using_files(self) -> Iterator[None]:
        try:
            yield
        except OSError as failure:
            raise StoreUnavailable(f"cannot use {self.folder}: {failure.strerror}") from None

    def _connected(self, token: JoinToken | None) -> IssuerClient:
        if token is not None:
            self.close()
        if self._client is None:
            digest = token.authority if token is not None else self._authority_digest()
            self._client = IssuerClient.connect(self._address, digest)
        return self._client

    def _authority_digest(self) -> bytes:
        authority = x509.load_pem_x509_certificate((self.folder / AUTHORITY_FILE).read_bytes())
        return authority.fingerprint(hashes.SHA256())

    def _write_revocations(self, client: IssuerClient) -> None:
        path = self.folder / REVOCATIONS_FILE
        if client.revocations and (not path.exists() or path.read_bytes() != client.revocations):
            write_private(path, client.revocations)

    def _key(self) -> ec.EllipticCurvePrivateKey:
        """The machine's key, which is written before it is used: to ask again with it costs no use of a token."""
        path = self.folder / KEY_FILE
        if not path.exists():
            write_private(path, private_pem(ec.generate_private_key(ec.SECP256R1())))
        key = serialization.load_pem_private_key(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise StartupError(f"{path} is no key of a machine that joined; delete the folder and join again")
        return key
