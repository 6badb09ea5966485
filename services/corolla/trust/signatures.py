"""Signs data with the key of a certificate, and verifies the signatures of other workloads."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from corolla.trust.workload import Workload

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
