"""Calls an issuer, after checking that it is the one of the stack: by the authority's digest, and by its role."""

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf.message import Message

from corolla.chassis.addresses import addresses_of, split_address
from corolla.chassis.errors import InvalidRequest, ReleaseMismatch, ServiceUnavailable, StartupError
from corolla.local.ports import listening_socket
from corolla.sdk.transport import CHANNEL_OPTIONS, error_of
from corolla.trust.addresses import is_same_host
from corolla.trust.authority import authority_digest
from corolla.trust.certificate_verifier import signed_list
from corolla.trust.credentials import CERTIFICATE_FILE, KEY_FILE, CertificateHolders
from corolla.trust.enrolment import RELEASE, enrolment_request, public_der
from corolla.trust.join_token import JoinToken
from corolla.trust.workload import Role
from corolla.v1 import issuer_pb2 as pb
from corolla.v1.issuer_pb2_grpc import IssuerServiceStub

_TIMEOUT_S: Final = 10.0
_MAX_MESSAGE_BYTES: Final = 4 << 20
"""More than a list takes that revokes all certificates of all machines."""
_MAX_AUTHORITY_BYTES: Final = 8192
_MOST_SKEW_S: Final = 600
"""The most by which clocks may differ. Certificates hold from an hour before they are signed."""
_NAME: Final = "localhost"
"""A name in the issuer's certificate. The channel trusts only that certificate, so the name decides nothing."""


class IssuerClient:
    """A channel to the issuer of one authority. It trusts the one certificate that was checked.

    Attributes:
        digest: The digest of the authority.
        authority: The authority's certificate, in PEM.
        revocations: The revocation list of the last `refresh`, in PEM.
        now_s: The issuer's clock at the last `refresh`.
    """

    def __init__(self, address: str, digest: bytes, leaf: bytes) -> None:
        """Use `connect`, which checks `leaf`."""
        self._address = address
        self.digest: Final = digest
        self._channel = grpc.secure_channel(
            address,
            grpc.ssl_channel_credentials(leaf),
            options=[
                *CHANNEL_OPTIONS,
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.ssl_target_name_override", _NAME),
            ],
        )
        self._stub = IssuerServiceStub(self._channel)
        self.authority = self.revocations = b""
        self.now_s = 0
        self._version = ""

    @classmethod
    def connect(cls, address: str, digest: bytes) -> Self:
        """Connects to the issuer at an address. Nothing secret is sent before it has been checked.

        Args:
            digest: The digest of the authority that the issuer must have, as in a token.

        Raises:
            ServiceUnavailable: Nothing answers there, or something else than an issuer, or a clock is wrong.
            StartupError: It is the issuer of another stack.
        """
        leaf = _certificate_of(address)
        client = cls(address, digest, leaf)
        try:
            _check_clock(x509.load_pem_x509_certificate(leaf), address)
            client.refresh()
            _check_issuer(x509.load_pem_x509_certificate(leaf), client.authority, address)
        except BaseException:
            client.close()
            raise
        return client

    def refresh(self) -> None:
        """Asks for the authority and what it has revoked. Raises what `connect` raises."""
        answer = self._call(self._stub.GetTrust, pb.GetTrustRequest())
        authority = _only_authority(answer.authority, self.digest)
        if authority is None:
            raise StartupError(
                f"the token, or what this machine has, is of another stack than the one at {self._address}"
            )
        revocations = signed_list(answer.revocations, authority)
        if answer.revocations and revocations is None:
            raise ServiceUnavailable(f"the authority has not signed the revocation list that {self._address} sends")
        # Nothing else is kept that was sent along.
        self.authority = authority.public_bytes(Encoding.PEM)
        self.revocations = revocations.public_bytes(Encoding.PEM) if revocations is not None else b""
        self.now_s, self._version = answer.now_s, answer.version

    def check_release(self) -> None:
        """Checks that the stack runs this release, since others have other protocols. Raises ReleaseMismatch."""
        if self._version != RELEASE:
            raise ReleaseMismatch(
                f"the stack runs Corolla {self._version or 'of an earlier release'}, and this machine Corolla "
                f"{RELEASE}; install the same release on both"
            )

    def enrol(self, key: ec.EllipticCurvePrivateKey, token: JoinToken | None) -> pb.EnrolResponse:
        """Returns a certificate for a key, with what the stack's machines must know.

        Args:
            token: The token to join by; None: the key has a certificate already.

        Raises:
            CorollaError: The issuer refuses; the message says why.
            StartupError: The answer is none of this issuer.
        """
        ahead_s = round(time.time()) - self.now_s
        if abs(ahead_s) > _MOST_SKEW_S:
            way = "ahead of" if ahead_s > 0 else "behind"
            raise ServiceUnavailable(
                f"this machine's clock is {round(abs(ahead_s) / 60)} minutes {way} that of {self._address}; correct "
                "the clock that is wrong"
            )
        request = enrolment_request(key, self.digest, token.written if token is not None else "")
        answer: pb.EnrolResponse = self._call(self._stub.Enrol, request)
        try:
            own = x509.load_pem_x509_certificate(answer.certificate)
            holder = CertificateHolders(self.authority).find((own.public_bytes(Encoding.DER),))
        except ValueError:
            holder = None
        if holder is None or public_der(holder.key) != request.public_key or holder.workload.role.value != answer.role:
            raise StartupError(f"the certificate from the issuer at {self._address} does not fit the request")
        return answer

    def check_reach(self, key: ec.EllipticCurvePrivateKey, host: str, port: int) -> None:
        """Checks that the first machine reaches a port of this machine, where this machine shows its certificate.

        Args:
            host: The address by which this machine will be known.

        Raises:
            StartupError: The first machine sees another address, or does not reach the port.
            CorollaError: The issuer does not answer, or refuses.
        """
        request = enrolment_request(key, self.digest)
        reach = pb.ReachRequest(public_key=request.public_key, signature=request.signature, port=port)
        answer: pb.ReachResponse = self._call(self._stub.Reach, reach)
        try:
            own = addresses_of(host)
        except OSError:  # a name that only others know
            own = []
        if not any(is_same_host(each, answer.host) for each in own):
            raise StartupError(
                f"the first machine sees this one at {answer.host}, not at {host}: name it by --host {answer.host} if "
                "that is an address of this machine; else something translates addresses in between, so join over an "
                "overlay network such as WireGuard, with the first machine's address there"
            )
        if not answer.met:
            raise StartupError(
                f"the first machine cannot reach this one at port {port}; open the port in this machine's firewall for "
                "all machines of the stack, or name an open one with --port"
            )

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: Any, request: Message) -> Any:
        try:
            return method(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as failure:
            raise error_of(failure, self._address, ServiceUnavailable, "issuer") from None


def address_towards(host: str, port: int = 1) -> str:
    """Returns this machine's address as the machine at `host` sees it, without sending anything. Raises OSError."""
    kind, _, _, _, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def parsed_address(address: str) -> tuple[str, int]:
    """Splits `host:port`. Raises InvalidRequest for anything else."""
    found = split_address(address)
    if found is None:
        raise InvalidRequest(
            "address",
            f"{address!r} is no address; write HOST:PORT, such as 192.168.1.10:50054, or [2001:db8::10]:50054 for IPv6",
        )
    return found


@contextmanager
def showing_certificate(host: str, port: int, folder: Path) -> Iterator[None]:
    """Shows the certificate in a folder to those who connect to a port, in a thread.

    Raises:
        StartupError: The port is taken.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
    listening = listening_socket(host, port)
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            try:
                caller, _ = listening.accept()
                with caller:
                    caller.settimeout(1.0)
                    context.wrap_socket(caller, server_side=True).close()
            except OSError:  # no caller came, or a stranger who speaks no TLS
                continue

    thread = threading.Thread(target=serve, name="showing a certificate", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        listening.close()


def _certificate_of(address: str) -> bytes:
    """Returns the certificate that is shown at an address, in PEM, which proves nothing yet."""
    try:
        return ssl.get_server_certificate(parsed_address(address), timeout=_TIMEOUT_S).encode()
    except ssl.SSLError:
        reason = "a server of another protocol does"
    except TimeoutError:
        reason = "a firewall may drop what is sent there; open this port on the first machine"
    except socket.gaierror:
        reason = f"no machine has the name {address.rpartition(':')[0]}"
    except OSError as failure:
        reason = (failure.strerror or str(failure)).lower()
    raise ServiceUnavailable(f"no issuer answers at {address}: {reason}")


def _check_clock(leaf: x509.Certificate, address: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if not leaf.not_valid_before_utc <= now < leaf.not_valid_after_utc:
        raise ServiceUnavailable(
            f"the certificate at {address} holds from {leaf.not_valid_before_utc:%Y-%m-%d %H:%M} to "
            f"{leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and this machine's clock says {now:%Y-%m-%d %H:%M}; "
            "correct the clock that is wrong"
        )


def _check_issuer(leaf: x509.Certificate, authority: bytes, address: str) -> None:
    holder = CertificateHolders(authority).find((leaf.public_bytes(Encoding.DER),))
    if holder is None or holder.workload.role is not Role.ISSUER:
        raise ServiceUnavailable(f"what answers at {address} is no issuer of the stack, so nothing was sent to it")


def _only_authority(sent: bytes, digest: bytes) -> x509.Certificate | None:
    """Returns the one certificate that was sent, in PEM; None: it has another digest, or others are with it."""
    try:
        if len(sent) > _MAX_AUTHORITY_BYTES:
            return None
        (authority,) = x509.load_pem_x509_certificates(sent)
    except ValueError:
        return None
    return authority if authority_digest(authority) == digest else None
