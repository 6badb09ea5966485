"""The certificate of this process and the authority that it believes, from files that others renew.

cert-manager, SPIFFE agents and Vault all write files. Connections that begin after a change use the new ones.
"""

import asyncio
import logging
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
from cryptography import x509

from corolla.chassis.errors import SettingsError
from corolla.trust.workload import Workload

log = logging.getLogger(__name__)

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
AUTHORITY_FILE: Final = "ca.crt"

LOOK_INTERVAL_S: Final = 2.0
_URIS: Final = "x509_subject_alternative_name"


class _Files(NamedTuple):
    certificate: bytes
    key: bytes
    authority: bytes


class Credentials:
    """What a process shows to others, and what it asks them to show: TLS 1.3 with certificates of both ends.

    A change of the files that makes no sense, such as a key of another certificate, is logged, and leaves what there
    was: whoever writes them file by file is seen in between.

    Args:
        folder: with `tls.crt`, `tls.key` and `ca.crt`, in PEM; the first may hold intermediate certificates, too, and
            the last several authorities.

    Attributes:
        version: counts the changes.

    Raises:
        SettingsError: a file is missing or none, or the certificate names no workload.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bad: _Files | None = None
        self.version = 0
        try:
            self._take(self._read())
            self._listening = _context(ssl.PROTOCOL_TLS_SERVER, folder)
        except (OSError, ValueError) as failure:
            raise SettingsError(f"COROLLA_TLS_DIR={folder}: {_sentence(failure)}") from None
        # A listener keeps its context for ever. Which one holds for a handshake is chosen as that begins.
        self._listening.sni_callback = self._choose

    @property
    def workload(self) -> Workload:
        """Who this process is."""
        return self._workload

    def for_connections(self) -> ssl.SSLContext:
        """For a connection that begins now. Whether the other end is the right one is for its workload to say."""
        return self._calling

    def for_listeners(self) -> ssl.SSLContext:
        """For listeners that live longer than the files."""
        return self._listening

    def for_rpc_servers(self) -> grpc.ServerCredentials:
        """For gRPC servers, likewise. They take TLS 1.2, too; `require_tls_1_3` is against that."""
        seen = self._files

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal seen
            if seen is self._files:
                return None
            seen = self._files
            return _server_configuration(seen)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(seen),
            fetch,  # type: ignore[arg-type]  # which may answer None: nothing new
            require_client_authentication=True,
        )

    def for_channels(self) -> grpc.ChannelCredentials:
        """For a channel that is opened now."""
        return grpc.ssl_channel_credentials(self._files.authority, self._files.key, self._files.certificate)

    async def run(self) -> None:
        """Takes changes of the files, for ever."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Reads the files, and takes them if they have changed."""
        files: _Files | None = None
        try:
            files = self._read()
            if files in (self._files, self._bad):
                return
            self._take(files)
        except (OSError, ValueError) as failure:
            self._bad = files
            log.error("new certificates cannot be used; the old ones stay", extra={"cause": _sentence(failure)})
        else:
            log.info("certificates were renewed", extra={"workload": str(self._workload)})

    def _read(self) -> _Files:
        return _Files(*((self._folder / name).read_bytes() for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE)))

    def _take(self, files: _Files) -> None:
        workload = workload_of_certificate(x509.load_pem_x509_certificate(files.certificate))
        if workload is None:
            raise ValueError("the certificate's only URI must be like spiffe://<trust domain>/<role>/<name>")
        calling, taking = (_context(kind, self._folder) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
        if self._read() != files:
            raise ValueError("the files change just now")
        self._files, self._workload, self._calling, self._taking = files, workload, calling, taking
        self.version += 1

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._taking


def workload_of_certificate(certificate: x509.Certificate) -> Workload | None:
    """Whom a certificate names. None: no workload."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    return Workload.only_one(names.get_values_for_type(x509.UniformResourceIdentifier))


def workload_of_transport(transport: asyncio.BaseTransport) -> Workload | None:
    """Who is at the other end of a connection. None: it shows no certificate, or one that names no workload."""
    certificate: Mapping[str, Any] = transport.get_extra_info("peercert") or {}
    return Workload.only_one(value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI")


def workload_of_call(auth_context: Mapping[str, Iterable[bytes]]) -> Workload | None:
    """Who made a call, from what gRPC says of its connection."""
    names = [name.decode(errors="replace") for name in auth_context.get(_URIS, ())]
    return Workload.only_one(name for name in names if "://" in name)


def _server_configuration(files: _Files) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.authority)


def _context(protocol: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Pods have no names: who is there is said by the workload.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / AUTHORITY_FILE)
    context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE, password=_refuse_password)
    return context


def _refuse_password() -> str:
    raise ValueError(f"{KEY_FILE} is encrypted; a service cannot ask for its password")


def _sentence(failure: Exception) -> str:
    if isinstance(failure, ssl.SSLError):
        return f"{CERTIFICATE_FILE}, {KEY_FILE} and {AUTHORITY_FILE} do not belong together, or are no PEM"
    if isinstance(failure, OSError):
        return f"{Path(failure.filename or '').name or 'a file'} cannot be read: {failure.strerror}"
    return str(failure)
