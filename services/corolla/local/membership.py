"""What this machine has of a stack that it joined: a folder with its key, its certificate and the stack's authority."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from corolla.chassis.errors import ServiceUnavailable, StartupError, StoreUnavailable
from corolla.chassis.private_files import hold, make_private_folder, write_private
from corolla.issuer.register import CERTIFICATE_LIFETIME_S
from corolla.local.issuer_client import IssuerClient, showing_certificate
from corolla.local.log_files import state_folder
from corolla.trust.authority import authority_digest, private_pem
from corolla.trust.certificate_verifier import CertificateVerifier, PresentedCertificate
from corolla.trust.credentials import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, REVOCATIONS_FILE
from corolla.trust.join_token import JoinToken
from corolla.v1 import issuer_pb2 as pb

_LOCK_FILE: Final = "join.lock"
_RENEWED_S: Final = CERTIFICATE_LIFETIME_S // 2 - 60
"""A certificate is replaced when it has so many seconds left; the issuer replaces none that has more than half left."""


def joined_folder(address: str) -> Path:
    """Returns the folder of what this machine has of the stack with its issuer at `address`."""
    return state_folder() / "joined" / re.sub(r"[^A-Za-z0-9.-]", "_", address)


class Membership:
    """A machine's membership in one stack. One process of the machine has it at a time.

    Args:
        address: The issuer's `host:port`.
        folder: The folder, which only the user may read.

    Raises:
        StartupError: Other users can read the folder, it cannot be made, or another process has it.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self._address = address
        self.folder = folder
        self._client: IssuerClient | None = None
        try:
            make_private_folder(folder)
            self._lock: int | None = hold(folder / _LOCK_FILE)
        except BlockingIOError:
            raise StartupError(
                f"this machine joins {address} already; stop the other `corolla join`, or give this one a folder of "
                "its own with XDG_STATE_HOME"
            ) from None
        except OSError as failure:
            raise StartupError(f"cannot use {folder}: {failure.strerror}") from None

    @property
    def exists(self) -> bool:
        """The machine has a certificate of the stack, which may have ended."""
        return (self.folder / CERTIFICATE_FILE).exists()

    def is_valid(self, now_s: float) -> bool:
        """The machine has a certificate that has not ended."""
        return self.exists and self._ends_s() > now_s

    def enrol(self, token: JoinToken | None = None) -> pb.EnrolResponse:
        """Gets a certificate, by a token or by the one that the machine has, and writes it. Returns the stack's facts.

        Raises:
            CorollaError: The issuer does not answer, is another one, or refuses; or files cannot be used.
        """
        with self._anew_after_failures():
            client = self._connected(token)
            client.check_release()
            # A machine that joins again is another one. It keeps what it has until it is enrolled.
            is_new = token is not None and self.exists
            return self._enrol(client, token, ec.generate_private_key(ec.SECP256R1()) if is_new else self._key())

    def enrol_pod(self, token: JoinToken) -> None:
        """Gets a certificate for the key that the pod has, by the token of its role, and writes it.

        The issuer may be of another release, as in an upgrade. Raises what `enrol` raises.
        """
        with self._anew_after_failures():
            self._enrol(self._connected(token), token, self._key())

    def check_reach(self, host: str, port: int) -> None:
        """Checks that the first machine reaches this one. Raises what `IssuerClient.check_reach` raises.

        Args:
            host: The address by which this machine will be known.
            port: A port where nothing listens yet.
        """
        everywhere = "::" if ":" in host else "0.0.0.0"  # noqa: S104 - only a certificate is shown there
        with self._anew_after_failures(), showing_certificate(everywhere, port, self.folder):
            self._connected(None).check_reach(self._key(), host, port)

    def _enrol(
        self, client: IssuerClient, token: JoinToken | None, key: ec.EllipticCurvePrivateKey
    ) -> pb.EnrolResponse:
        answer = client.enrol(key, token)
        if key.public_key() != self._key().public_key():
            write_private(self.folder / KEY_FILE, private_pem(key))
        write_private(self.folder / AUTHORITY_FILE, client.authority)
        self._write_revocations(client)
        write_private(self.folder / CERTIFICATE_FILE, answer.certificate)
        return answer

    def follow(self, token: JoinToken | None = None) -> None:
        """Fetches what the authority has revoked, and another certificate at half of this one's life.

        Args:
            token: The token of a pod's role; None: the issuer knows the machine's key.

        Raises:
            Unauthenticated: This machine was revoked.
            StartupError: The issuer is of another stack, so this machine can only join that one.
            CorollaError: The issuer does not answer, a clock is wrong, or files cannot be used; the next call tries
                again.
        """
        with self._anew_after_failures():
            client = self._refreshed(token)
            self._write_revocations(client)
            certificate = (self.folder / CERTIFICATE_FILE).read_bytes()
            verifier = CertificateVerifier(client.authority, client.revocations)
            if client.now_s > self._ends_s() - _RENEWED_S or not verifier.is_valid(PresentedCertificate(certificate)):
                self._enrol(client, token, self._key())

    def close(self) -> None:
        """Ends the calls that run, and gives the folder back."""
        self._disconnect()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @contextmanager
    def _anew_after_failures(self) -> Iterator[None]:
        try:
            yield
        except BaseException as failure:
            # The issuer may have another certificate or clock by now, which the next call checks.
            self._disconnect()
            if isinstance(failure, OSError):
                raise StoreUnavailable(f"cannot use {self.folder}: {failure.strerror}") from None
            raise

    def _connected(self, token: JoinToken | None) -> IssuerClient:
        digest = token.authority if token is not None else self._authority_digest()
        if self._client is not None and self._client.digest != digest:
            self._disconnect()
        if self._client is None:
            self._client = IssuerClient.connect(self._address, digest)
        return self._client

    def _refreshed(self, token: JoinToken | None) -> IssuerClient:
        """Returns a client that has asked for what is revoked.

        The issuer replaces its certificate, and a connection trusts one alone: a new one tells that from an outage.
        """
        client = self._connected(token)
        try:
            client.refresh()
        except ServiceUnavailable:
            if self._client is not client:  # closed meanwhile
                raise
            self._disconnect()
            client = self._connected(token)
        return client

    def _authority_digest(self) -> bytes:
        authority = x509.load_pem_x509_certificate((self.folder / AUTHORITY_FILE).read_bytes())
        return authority_digest(authority)

    def _ends_s(self) -> float:
        certificate = x509.load_pem_x509_certificate((self.folder / CERTIFICATE_FILE).read_bytes())
        return certificate.not_valid_after_utc.timestamp()

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
