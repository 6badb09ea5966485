"""Decides whether a certificate is valid: a trusted authority signed it, and it has not ended or been revoked."""

import datetime
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding

log = logging.getLogger(__name__)

_LIST: Final = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)
_MOST_REMEMBERED: Final = 4096
_NEVER: Final = datetime.datetime.min.replace(tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class PresentedCertificate:
    """The certificate of another process, which it showed in a handshake or with a signature.

    Attributes:
        certificate: The other process' own certificate, in PEM or DER, without intermediate ones.
        trusted: The authorities, in DER, that were trusted at the handshake; None: unknown.
    """

    certificate: bytes
    trusted: frozenset[bytes] | None = None


class CertificateVerifier:
    """Checks certificates against the authorities and revocation lists in one state of the files.

    Args:
        authorities: The certificates of the authorities in PEM; empty: no certificate is valid.
        revocations: Certificate revocation lists in PEM, one after the other; empty: none. A list counts if one of the
            authorities signed it, even after the date of its next update.
        before: The verifier of the previous state, if any.

    Attributes:
        authorities: The trusted authorities, in DER.

    Raises:
        ValueError: A file is not in PEM, or holds something else.
    """

    def __init__(self, authorities: bytes, revocations: bytes, before: "CertificateVerifier | None" = None) -> None:
        self._authorities = x509.load_pem_x509_certificates(authorities) if authorities else []
        self._revoked = {
            (revoked.issuer, each.serial_number)
            for revoked in _lists(revocations, self._authorities)
            for each in revoked
        }
        self.authorities: Final = frozenset(each.public_bytes(Encoding.DER) for each in self._authorities)
        known: Mapping[bytes, x509.Certificate] = before.known if before is not None else {}
        # All authorities that this process has trusted until now.
        self.known: Mapping[bytes, x509.Certificate] = {**known} | {
            each.public_bytes(Encoding.DER): each for each in self._authorities
        }
        # When each checked certificate expires; `_NEVER` for one that is not valid.
        self._ends: dict[PresentedCertificate, datetime.datetime] = {}

    def is_valid(self, presented: PresentedCertificate) -> bool:
        """The result is cached, since callers ask often."""
        end = self._ends.get(presented)
        if end is None:
            if len(self._ends) >= _MOST_REMEMBERED:
                self._ends.clear()
            end = self._ends[presented] = self._end_of(presented)
        return datetime.datetime.now(datetime.UTC) < end

    def _end_of(self, presented: PresentedCertificate) -> datetime.datetime:
        try:
            certificate = _read(presented.certificate)
        except ValueError:
            return _NEVER
        if (certificate.issuer, certificate.serial_number) in self._revoked or not self._is_signed(
            certificate, presented
        ):
            return _NEVER
        return certificate.not_valid_after_utc

    def _is_signed(self, certificate: x509.Certificate, presented: PresentedCertificate) -> bool:
        """A trusted authority has signed the certificate, directly or through intermediate certificates.

        Only the handshake saw the intermediate certificates. So a certificate that no authority signed directly is
        valid while all authorities that were trusted at its handshake are still trusted. If those are unknown, it is
        valid unless an authority that is no longer trusted signed it directly.
        """
        if any(_has_signed(each, certificate) for each in self._authorities):
            return True
        if presented.trusted is not None:
            return presented.trusted <= self.authorities
        return not any(_has_signed(each, certificate) for each in self.known.values())


def signed_list(text: bytes, authority: x509.Certificate) -> x509.CertificateRevocationList | None:
    """Returns the first revocation list of a text in PEM; None: there is none, or the authority has not signed it."""
    try:
        found = x509.load_pem_x509_crl(text)
        return found if found.is_signature_valid(authority.public_key()) else None  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None


def _read(certificate: bytes) -> x509.Certificate:
    if certificate.startswith(b"-----"):
        return x509.load_pem_x509_certificate(certificate)
    return x509.load_der_x509_certificate(certificate)


def _lists(text: bytes, authorities: Sequence[x509.Certificate]) -> Iterable[x509.CertificateRevocationList]:
    found = _LIST.findall(text)
    if text.strip() and not found:
        raise ValueError("crl.pem holds no certificate revocation list in PEM")
    for each in map(x509.load_pem_x509_crl, found):
        if any(each.is_signature_valid(authority.public_key()) for authority in authorities):  # type: ignore[arg-type]
            yield each
        else:
            log.warning("ignoring a revocation list in crl.pem that none of the authorities in ca.crt signed")


def _has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
