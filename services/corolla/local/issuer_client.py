"""Calls an issuer, after checking that it is the one of the stack: by the authority's digest, and by its role."""

import datetime
import socket
import ssl
from typing import Any, Final, Self

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf.message import Message

from corolla.chassis.errors import InvalidRequest, ServiceUnavailable, StartupError
from corolla.sdk.transport import CHANNEL_OPTIONS, error_of
from corolla.trust.certificate_verifier import signed_list
from corolla.trust.credentials import CertificateHolders
from corolla.trust.enrolment import enrolment_request, public_der
from corolla.trust.join_token import JoinToken
from corolla.trust.workload import Role
from corolla.v1 import issuer_pb2 as pb
from corolla.v1.issuer_pb2_grpc import IssuerServiceStub

_TIMEOUT_S: Final = 10.0
_MAX_MESSAGE_BYTES: Final = 4 << 20
"""More than a list takes that revokes all certificates of all machines."""
_MAX_AUTHORITY_BYTES: Final = 8192
_NAME: Final = "localhost"
"""A name in the issuer's certificate. The channel trusts only that certificate, so the name decides nothing."""


class IssuerClient:
    """A channel to the issuer of one authority. It trusts the one certificate that was checked.

    Attributes:
        authority: The authority's certificate, in PEM.
        revocations: The revocation list of the last `refresh`, in PEM.
    """

    def __init__(self, address: str, digest: bytes, leaf: bytes) -> None:
        """Use `connect`, which checks `leaf`."""
        self._address = address
        self._digest = digest
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
            client.refresh()
            _check_issuer(x509.load_pem_x509_certificate(leaf), client.authority, address)
        except BaseException:
            client.close()
            raise
        return client

    def refresh(self) -> None:
        """Asks for the authority and what it has revoked. Raises what `connect` raises."""
        answer = self._call(self._stub.GetTrust, pb.GetTrustRequest())
        authority = _only_authority(answer.authority, self._digest)
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

    def enrol(self, key: ec.EllipticCurvePrivateKey, token: JoinToken | None) -> pb.EnrolResponse:
        """Returns a certificate for a key, with what the stack's machines must know.

        Args:
            token: The token to join by; None: the key has a certificate already.

        Raises:
            CorollaError: The issuer refuses; the message says why.
            StartupError: The answer is none of this issuer.
        """
        request = enrolment_request(key, self._digest, token.written if token is not None else "")
        answer: pb.EnrolResponse = self._call(self._stub.Enrol, request)
        try:
            own = x509.load_pem_x509_certificate(answer.certificate)
            holder = CertificateHolders(self.authority).find((own.public_bytes(Encoding.DER),))
        except ValueError:
            holder = None
        if holder is None or public_der(holder.key) != request.public_key or holder.workload.role.value != answer.role:
            raise StartupError(f"the certificate from the issuer at {self._address} does not fit the request")
        return answer

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
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16 or "://" in address:
        raise InvalidRequest("address", f"{address!r} is no address; write HOST:PORT, such as 192.168.1.10:50054")
    return host.strip("[]"), int(port)


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


def _check_issuer(leaf: x509.Certificate, authority: bytes, address: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if not leaf.not_valid_before_utc <= now < leaf.not_valid_after_utc:
        raise ServiceUnavailable(
            f"the certificate at {address} holds from {leaf.not_valid_before_utc:%Y-%m-%d %H:%M} to "
            f"{leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and this machine's clock says {now:%Y-%m-%d %H:%M}; "
            "correct the clock that is wrong"
        )
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
    return authority if authority.fingerprint(hashes.SHA256()) == digest else None
