"""The certificate of this process and the authority that it trusts, read from files that other programs renew.

cert-manager, SPIFFE agents and Vault all write files. Connections that begin after a change use the new files.

A `Signer` signs with the key of the certificate; `CertificateHolders` verify the signatures of other workloads.
"""

import asyncio
import datetime
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from corolla.trust.certificate_verifier import CertificateVerifier, PresentedCertificate
from corolla.trust.watched_files import Contents, WatchedFiles
from corolla.trust.workload import Role, Workload

MAX_CERTIFICATES: Final = 4
MAX_CERTIFICATE_BYTES: Final = 8192
_MAX_KNOWN: Final = 256
_ALGORITHM: Final = ec.ECDSA(hashes.SHA256())


class Signer:
    """Signs with the key of a process' certificate.

    Args:
        certificates: The certificates in PEM: the process' own one, then intermediate ones.
        key: The key in PEM.

    Attributes:
        certificates: The certificates in DER.

    Raises:
        ValueError: The key is not for ECDSA. RSA takes ten times as long, and gRPC does not support Ed25519.
    """

    def __init__(self, certificates: bytes, key: bytes) -> None:
        loaded = serialization.load_pem_private_key(key, None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError(
                "the certificate's key must be an ECDSA key, because this process signs for the sessions that it opens"
            )
        self._key = loaded
        self.certificates = tuple(
            each.public_bytes(serialization.Encoding.DER) for each in x509.load_pem_x509_certificates(certificates)
        )

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data, _ALGORITHM)


@dataclass(frozen=True, slots=True)
class CertificateHolder:
    """A workload with a trusted certificate, the key that verifies its signatures, and the time when its trust ends."""

    workload: Workload
    key: ec.EllipticCurvePublicKey
    until: datetime.datetime

    def has_signed(self, signature: bytes, data: bytes) -> bool:
        try:
            self.key.verify(signature, data, _ALGORITHM)
        except InvalidSignature:
            return False
        return True


class CertificateHolders:
    """Finds the workloads that hold certificates of these authorities.

    It verifies each chain of certificates once, and remembers it until one of its certificates expires.

    Args:
        authorities: The authorities in PEM.
    """

    def __init__(self, authorities: bytes) -> None:
        self._policy = PolicyBuilder().store(Store(x509.load_pem_x509_certificates(authorities)))
        self._known: dict[tuple[bytes, ...], CertificateHolder] = {}

    def find(self, certificates: Sequence[bytes]) -> CertificateHolder | None:
        """Returns the owner of the first certificate; None: no authority has signed it, or it names no workload.

        Args:
            certificates: The certificates in DER; those after the first are intermediate ones.
        """
        chain = tuple(certificates)
        found = self._known.get(chain)
        if found is None or found.until <= datetime.datetime.now(datetime.UTC):
            self._known.pop(chain, None)
            found = self._verified(chain)
            if found is not None:
                if len(self._known) == _MAX_KNOWN:
                    self._known.clear()
                self._known[chain] = found
        return found

    def _verified(self, chain: tuple[bytes, ...]) -> CertificateHolder | None:
        if not 1 <= len(chain) <= MAX_CERTIFICATES or max(map(len, chain)) > MAX_CERTIFICATE_BYTES:
            return None
        try:
            own, *others = map(x509.load_der_x509_certificate, chain)
            verified = self._policy.build_client_verifier().verify(own, others)
            workload, key = workload_of_certificate(own), own.public_key()
        except (VerificationError, ValueError, x509.InvalidVersion, x509.UnsupportedGeneralNameType):
            return None
        if workload is None or not isinstance(key, ec.EllipticCurvePublicKey):
            return None
        return CertificateHolder(workload, key, min(each.not_valid_after_utc for each in verified.chain))


def workload_of_certificate(certificate: x509.Certificate) -> Workload | None:
    """Returns the workload that a certificate names; None: it names none."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    return Workload.only_one(names.get_values_for_type(x509.UniformResourceIdentifier))


CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
AUTHORITY_FILE: Final = "ca.crt"
REVOCATIONS_FILE: Final = "crl.pem"

_NAMES: Final = "x509_subject_alternative_name"
_CERTIFICATE: Final = "x509_pem_cert"


class _Listening:
    """TLS for listeners, which follows changes of the files.

    A listener keeps its context for ever, so its callback chooses the newest one for each handshake.
    """

    _taking: ssl.SSLContext
    _rpc: grpc.ServerCertificateConfiguration

    def __init__(self, folder: Path, *, asks_for_certificates: bool) -> None:
        self._asks_for_certificates = asks_for_certificates
        self._listening = _context(ssl.PROTOCOL_TLS_SERVER, folder, asks_for_certificates=asks_for_certificates)
        self._listening.sni_callback = self._choose

    def for_listeners(self) -> ssl.SSLContext:
        """Returns the TLS context for listeners."""
        return self._listening

    def for_rpc_servers(self) -> grpc.ServerCredentials:
        """Returns the credentials for gRPC servers.

        Servers accept TLS 1.2, too, unless the process has `TLS_1_3_ONLY` set.
        """
        seen = self._rpc

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Returns the configuration for a new connection; None: it has not changed."""
            nonlocal seen
            if seen is self._rpc:
                return None
            seen = self._rpc
            return seen

        return grpc.dynamic_ssl_server_credentials(seen, fetch, self._asks_for_certificates)  # type: ignore[arg-type]

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._taking


class Credentials(_Listening):
    """The certificate of a process, and its checks of other certificates, for mutual TLS.

    Args:
        folder: The folder with `tls.crt`, `tls.key` and `ca.crt`, in PEM. `tls.crt` may also hold intermediate
            certificates, and `ca.crt` may hold several authorities. An optional `crl.pem` holds their revocation lists.

    Attributes:
        files: The files, which the service must watch.
        version: The number of times that the files were read successfully.
        signer: Signs with the key of the certificate, in processes that open sessions; None in other processes.
        certificate_holders: Finds the workloads whose certificates the authority signed, to verify their signatures.

    Raises:
        SettingsError: A file is missing or not valid, or the certificate names no workload; or the process opens
            sessions and its key cannot sign for them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.version = 0
        self._verifier = CertificateVerifier(b"", b"")
        names = (CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE)
        self.files = WatchedFiles("COROLLA_TLS_DIR", folder, names, self._take, optional=(REVOCATIONS_FILE,))
        super().__init__(folder, asks_for_certificates=True)

    @property
    def certificate(self) -> bytes:
        """The certificate of this process, in PEM."""
        return self._certificate

    def for_connections(self) -> ssl.SSLContext:
        """Returns the TLS context for a connection that begins now. It does not check the other end's workload."""
        return self._calling

    def for_channels(self) -> grpc.ChannelCredentials:
        """Returns the credentials for a channel that is opened now."""
        return grpc.ssl_channel_credentials(self._authority, self._key, self._certificate)

    def peer_validity(self, transport: asyncio.BaseTransport) -> Callable[[], bool]:
        """Returns a function that says whether the certificate of a connection's other end is still valid."""
        connection: ssl.SSLObject = transport.get_extra_info("ssl_object")
        certificate = connection.getpeercert(binary_form=True) or b""
        presented = PresentedCertificate(certificate, self._verifier.authorities)
        return lambda: self._verifier.is_valid(presented)

    def caller_validity(self, auth_context: Mapping[str, Iterable[bytes]]) -> Callable[[], bool]:
        """Returns a function that says whether the certificate of a call's caller is still valid."""
        presented = PresentedCertificate(b"".join(auth_context.get(_CERTIFICATE, ())))
        return lambda: self._verifier.is_valid(presented)

    def is_valid(self, certificate: bytes) -> bool:
        """A trusted authority signed the certificate (in DER), which has neither expired nor been revoked."""
        return self._verifier.is_valid(PresentedCertificate(certificate))

    def knows(self, other: Workload | None) -> bool:
        """The workload is of this process' trust domain; an authority may sign for several domains."""
        return other is not None and other.trust_domain == self._workload.trust_domain

    def _take(self, contents: Contents) -> None:
        certificate, key, authority, revocations = contents
        workload = workload_of_certificate(x509.load_pem_x509_certificate(certificate))
        if workload is None:
            raise ValueError("the certificate's only URI must be like spiffe://<trust domain>/<role>/<name>")
        verifier = CertificateVerifier(authority, revocations, self._verifier)
        opens_sessions = workload.role in (Role.CLIENT, Role.LIBRARY)
        signer, certificate_holders = (
            Signer(certificate, key) if opens_sessions else None,
            CertificateHolders(authority),
        )
        self._calling, self._taking = (
            _context(kind, self._folder) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        )
        self.signer, self.certificate_holders = signer, certificate_holders
        self._certificate, self._key, self._authority, self._workload = certificate, key, authority, workload
        self._rpc = grpc.ssl_server_certificate_configuration([(key, certificate)], authority)
        self._verifier = verifier
        self.version += 1


class PublicCertificate(_Listening):
    """The certificate of a public port, whose callers need no certificate.

    Args:
        folder: The folder with `tls.crt` and `tls.key`, in PEM.

    Attributes:
        files: The files, which the service must watch.

    Raises:
        SettingsError: A file is missing, or certificate and key do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files = WatchedFiles("COROLLA_PUBLIC_TLS_DIR", folder, (CERTIFICATE_FILE, KEY_FILE), self._take)
        super().__init__(folder, asks_for_certificates=False)

    def _take(self, contents: Contents) -> None:
        certificate, key = contents
        self._taking = _context(ssl.PROTOCOL_TLS_SERVER, self._folder, asks_for_certificates=False)
        self._rpc = grpc.ssl_server_certificate_configuration([(key, certificate)])


def workload_of_transport(transport: asyncio.BaseTransport) -> Workload | None:
    """Returns the workload at a connection's other end; None: it has no certificate, or one without a workload."""
    certificate: Mapping[str, Any] = transport.get_extra_info("peercert") or {}
    return Workload.only_one(value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI")


def workload_of_call(auth_context: Mapping[str, Iterable[bytes]]) -> Workload | None:
    """Returns the workload that made a call, from gRPC's facts; None as in `workload_of_transport`."""
    return Workload.only_one(name for name in names_of_call(auth_context) if "://" in name)


def names_of_call(auth_context: Mapping[str, Iterable[bytes]]) -> list[str]:
    """Returns all names in the certificate of a call's caller: URIs, DNS names, IP addresses."""
    return [name.decode(errors="replace") for name in auth_context.get(_NAMES, ())]


def _context(protocol: int, folder: Path, *, asks_for_certificates: bool = True) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if asks_for_certificates:
        # Pods have no stable host names, so the workload in the certificate identifies them.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(folder / AUTHORITY_FILE)
    context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE, password=_refuse_password)
    return context


def _refuse_password() -> str:
    raise ValueError(f"{KEY_FILE} is encrypted; a service cannot ask for its password")
