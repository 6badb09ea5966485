"""The certificate of this process and the authority that it believes, from files that others renew.

cert-manager, SPIFFE agents and Vault all write files. Connections that begin after a change use the new ones.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import grpc
from cryptography import x509

from corolla.trust.beliefs import Beliefs, Shown
from corolla.trust.signatures import Signatories, Signer, workload_of_certificate
from corolla.trust.watched_files import Contents, WatchedFiles
from corolla.trust.workload import Role, Workload

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
AUTHORITY_FILE: Final = "ca.crt"
REVOCATIONS_FILE: Final = "crl.pem"

_NAMES: Final = "x509_subject_alternative_name"
_CERTIFICATE: Final = "x509_pem_cert"


class Credentials:
    """What a process shows to others, and what it asks them to show: TLS 1.3 with certificates of both ends.

    Args:
        folder: with `tls.crt`, `tls.key` and `ca.crt`, in PEM; the first may hold intermediate certificates, too, and
            the last several authorities. A `crl.pem` may hold revocation lists of those authorities.

    Attributes:
        files: which are to be watched.
        version: counts the changes.
        signer: by the key of the certificate, of who opens sessions; None of others.
        signatories: who has certificates of the authority.

    Raises:
        SettingsError: a file is missing or none, or the certificate names no workload; or the key of who opens sessions
            signs nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.version = 0
        self._beliefs = Beliefs(b"", b"")
        names = (CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE)
        self.files = WatchedFiles("COROLLA_TLS_DIR", folder, names, self._take, optional=(REVOCATIONS_FILE,))
        # A listener keeps its context for ever. Which one holds for a handshake is chosen as that begins.
        self._listening = _context(ssl.PROTOCOL_TLS_SERVER, folder)
        self._listening.sni_callback = self._choose

    @property
    def certificate(self) -> bytes:
        """What it shows, in PEM."""
        return self._certificate

    def for_connections(self) -> ssl.SSLContext:
        """For a connection that begins now. Whether the other end is the right one is for its workload to say."""
        return self._calling

    def for_listeners(self) -> ssl.SSLContext:
        """For listeners that live longer than the files."""
        return self._listening

    def for_rpc_servers(self) -> grpc.ServerCredentials:
        """For gRPC servers, likewise. They take TLS 1.2, too, unless the process has `TLS_1_3_ONLY` set."""
        return _rpc_servers(lambda: self._rpc, shows_certificate=True)

    def for_channels(self) -> grpc.ChannelCredentials:
        """For a channel that is opened now."""
        return grpc.ssl_channel_credentials(self._authority, self._key, self._certificate)

    def witness(self, transport: asyncio.BaseTransport) -> Callable[[], bool]:
        """What tells, at any time, whether the certificate still counts that the other end of a connection showed."""
        connection: ssl.SSLObject = transport.get_extra_info("ssl_object")
        certificate = connection.getpeercert(binary_form=True) or b""
        shown = Shown(certificate, self._beliefs.authorities)
        return lambda: self._beliefs.hold(shown)

    def witness_call(self, auth_context: Mapping[str, Iterable[bytes]]) -> Callable[[], bool]:
        """The same for whoever makes a call."""
        shown = Shown(b"".join(auth_context.get(_CERTIFICATE, ())))
        return lambda: self._beliefs.hold(shown)

    def counts(self, certificate: bytes) -> bool:
        """Whether a certificate of an authority that is believed, in DER, has neither ended nor been revoked."""
        return self._beliefs.hold(Shown(certificate))

    def knows(self, other: Workload | None) -> bool:
        """Whether somebody is of this process's trust domain: an authority may sign for others, too."""
        return other is not None and other.trust_domain == self._workload.trust_domain

    def _take(self, contents: Contents) -> None:
        certificate, key, authority, revocations = contents
        workload = workload_of_certificate(x509.load_pem_x509_certificate(certificate))
        if workload is None:
            raise ValueError("the certificate's only URI must be like spiffe://<trust domain>/<role>/<name>")
        beliefs = Beliefs(authority, revocations, self._beliefs)
        opens_sessions = workload.role in (Role.CLIENT, Role.LIBRARY)
        signer, signatories = Signer(certificate, key) if opens_sessions else None, Signatories(authority)
        self._calling, self._taking = (
            _context(kind, self._folder) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        )
        self.signer, self.signatories = signer, signatories
        self._certificate, self._key, self._authority, self._workload = certificate, key, authority, workload
        self._rpc = grpc.ssl_server_certificate_configuration([(key, certificate)], authority)
        self._beliefs = beliefs
        self.version += 1

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._taking


class PublicCertificate:
    """What a service shows to callers who show none.

    Args:
        folder: with `tls.crt` and `tls.key`, in PEM.

    Attributes:
        files: which are to be watched.

    Raises:
        SettingsError: a file is missing, or they do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files = WatchedFiles("COROLLA_PUBLIC_TLS_DIR", folder, (CERTIFICATE_FILE, KEY_FILE), self._take)
        self._listening = _public_context(folder)
        self._listening.sni_callback = self._choose

    def for_listeners(self) -> ssl.SSLContext:
        """For listeners that live longer than the files."""
        return self._listening

    def for_rpc_servers(self) -> grpc.ServerCredentials:
        """For gRPC servers that live longer than the files."""
        return _rpc_servers(lambda: self._rpc, shows_certificate=False)

    def _take(self, contents: Contents) -> None:
        certificate, key = contents
        self._taking = _public_context(self._folder)
        self._rpc = grpc.ssl_server_certificate_configuration([(key, certificate)])

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._taking


def _rpc_servers(
    newest: Callable[[], grpc.ServerCertificateConfiguration], *, shows_certificate: bool
) -> grpc.ServerCredentials:
    seen = newest()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """For a connection that begins. None: nothing new."""
        nonlocal seen
        if seen is newest():
            return None
        seen = newest()
        return seen

    return grpc.dynamic_ssl_server_credentials(seen, fetch, require_client_authentication=shows_certificate)  # type: ignore[arg-type]


def workload_of_transport(transport: asyncio.BaseTransport) -> Workload | None:
    """Who is at the other end of a connection. None: it shows no certificate, or one that names no workload."""
    certificate: Mapping[str, Any] = transport.get_extra_info("peercert") or {}
    return Workload.only_one(value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI")


def workload_of_call(auth_context: Mapping[str, Iterable[bytes]]) -> Workload | None:
    """Who made a call, from what gRPC says of its connection."""
    return Workload.only_one(name for name in names_of_call(auth_context) if "://" in name)


def names_of_call(auth_context: Mapping[str, Iterable[bytes]]) -> list[str]:
    """All that the certificate of a call's connection names: URIs, DNS names, IP addresses."""
    return [name.decode(errors="replace") for name in auth_context.get(_NAMES, ())]


def _context(protocol: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Pods have no names: who is there is said by the workload.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / AUTHORITY_FILE)
    _load_chain(context, folder)
    return context


def _public_context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load_chain(context, folder)
    return context


def _load_chain(context: ssl.SSLContext, folder: Path) -> None:
    context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE, password=_refuse_password)


def _refuse_password() -> str:
    raise ValueError(f"{KEY_FILE} is encrypted; a service cannot ask for its password")
