"""A certificate authority that signs the certificates of a local stack. Its key lasts as long as the process."""

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from corolla.chassis.private_files import write_private
from corolla.trust.credentials import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE
from corolla.trust.workload import Workload

_LIFETIME: Final = datetime.timedelta(days=365)
_SKEW: Final = datetime.timedelta(hours=1)
_USES: Final = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_SIGNS: Final = {"key_cert_sign": True, "crl_sign": True}
_SHAKES_HANDS: Final = {"digital_signature": True}
_KEY_USES: Final = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


class Authority:
    """Signs certificates for TLS servers and TLS clients. All keys are on the curve P-256."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("Corolla stack authority")
        self._until = datetime.datetime.now(datetime.UTC) + _LIFETIME
        self._certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(_SIGNS), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate_pem(self) -> bytes:
        """The authority's own certificate, which the workloads must trust."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self, folder: Path, workload: Workload, addresses: Sequence[str], until: datetime.datetime | None = None
    ) -> None:
        """Writes a workload's certificate, its key and the authority as private files that `Credentials` reads.

        Args:
            workload: The workload that the certificate names.
            addresses: The DNS names and IP addresses of the workload.
            until: When the certificate expires; None: when the authority's own certificate does.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(str(workload)), *map(_address, addresses)]
        certificate = (
            self._builder(_name(f"corolla {workload.role.value}"), key.public_key(), until)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(_SHAKES_HANDS), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_USES), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(folder / KEY_FILE, private)
        write_private(folder / CERTIFICATE_FILE, certificate.public_bytes(serialization.Encoding.PEM))
        write_private(folder / AUTHORITY_FILE, self.certificate_pem)

    def revocations(self, certificates: Iterable[bytes]) -> bytes:
        """Returns a list, in PEM, that revokes these certificates, also in PEM."""
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateRevocationListBuilder(self._name, now, self._until)
        for certificate in map(x509.load_pem_x509_certificate, certificates):
            revoked = x509.RevokedCertificateBuilder(certificate.serial_number, now).build()
            builder = builder.add_revoked_certificate(revoked)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime.datetime | None = None
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime.now(datetime.UTC) - _SKEW)
            .not_valid_after(until or self._until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(uses: dict[str, bool]) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: uses.get(name, False) for name in _KEY_USES})


def _address(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
