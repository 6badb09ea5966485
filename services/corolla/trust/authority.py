"""A certificate authority that signs the certificates of a stack. Its key lasts as long as the process, or is kept."""

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from corolla.chassis.errors import SettingsError
from corolla.chassis.private_files import changing, make_private_folder, write_private
from corolla.trust.credentials import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE
from corolla.trust.workload import Workload

AUTHORITY_KEY_FILE: Final = "ca.key"
_LIFETIME: Final = datetime.timedelta(days=3650)
_SKEW: Final = datetime.timedelta(hours=1)
_USES: Final = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_SIGNS: Final = {"key_cert_sign": True, "crl_sign": True}
_SHAKES_HANDS: Final = {"digital_signature": True}
_KEY_USES: Final = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


class Authority:
    """Signs certificates for TLS servers and TLS clients. All keys are on the curve P-256.

    Args:
        key: The authority's key; None: a new one.
        certificate: The certificate of that key; None: a new one.
    """

    def __init__(
        self, key: ec.EllipticCurvePrivateKey | None = None, certificate: x509.Certificate | None = None
    ) -> None:
        self._key = key or ec.generate_private_key(ec.SECP256R1())
        self._name = _name("Corolla stack authority") if certificate is None else certificate.subject
        self._until = datetime.datetime.now(datetime.UTC) + _LIFETIME
        self._key_id = _key_id(certificate) if certificate is not None else _new_key_id(self._key.public_key())
        self._certificate = certificate or (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(_SIGNS), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self._until = self._certificate.not_valid_after_utc

    @classmethod
    def kept_in(cls, folder: Path) -> Self:
        """Reads the authority of a private folder; makes one, and the folder, if there is none.

        Raises:
            SettingsError: Other users can read the folder, or its files cannot be read or do not hold an authority.
        """
        try:
            make_private_folder(folder)
            with changing(folder / AUTHORITY_KEY_FILE):
                if not (folder / AUTHORITY_KEY_FILE).exists():
                    made = cls()
                    write_private(folder / AUTHORITY_FILE, made.certificate_pem)
                    # The key is written last, since a folder that has it counts as complete.
                    write_private(folder / AUTHORITY_KEY_FILE, private_pem(made._key))
        except OSError as failure:
            raise SettingsError(f"cannot keep an authority in {folder}: {failure.strerror}") from None
        return cls.read_from(folder)

    @classmethod
    def read_from(cls, folder: Path) -> Self:
        """Reads the authority of a folder, such as a mounted Secret. Raises SettingsError if that is impossible."""
        try:
            key = serialization.load_pem_private_key((folder / AUTHORITY_KEY_FILE).read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((folder / AUTHORITY_FILE).read_bytes())
        except OSError as failure:
            raise SettingsError(f"cannot read the authority in {folder}: {failure.strerror}") from None
        except (ValueError, TypeError):
            raise SettingsError(f"{folder} holds no authority in PEM; name another folder") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise SettingsError(f"key and certificate of the authority in {folder} do not belong together")
        return cls(key, certificate)

    @property
    def certificate_pem(self) -> bytes:
        """The authority's own certificate, which the workloads must trust."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def digest(self) -> bytes:
        """The digest by which machines that join recognise the authority."""
        return authority_digest(self._certificate)

    def secret(self, purpose: bytes) -> bytes:
        """Derives 32 secret bytes from the authority's key, others for each purpose."""
        key = self._key.private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return HKDF(hashes.SHA256(), 32, salt=None, info=purpose).derive(key)

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
        certificate = self.sign(key.public_key(), workload, addresses, until)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(folder / KEY_FILE, private_pem(key))
        write_private(folder / CERTIFICATE_FILE, certificate.public_bytes(serialization.Encoding.PEM))
        write_private(folder / AUTHORITY_FILE, self.certificate_pem)

    def sign(
        self,
        key: ec.EllipticCurvePublicKey,
        workload: Workload,
        addresses: Sequence[str] = (),
        until: datetime.datetime | None = None,
    ) -> x509.Certificate:
        """Returns a certificate that gives a key the name of a workload. The arguments are those of `issue`."""
        names = [x509.UniformResourceIdentifier(str(workload)), *map(_address, addresses)]
        return (
            self._builder(_name(f"corolla {workload.role.value}"), key, until)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(_SHAKES_HANDS), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_USES), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def revocations(self, serial_numbers: Iterable[int], earlier: Iterable[x509.RevokedCertificate] = ()) -> bytes:
        """Returns a list, in PEM, that revokes the certificates with these numbers now, and others since earlier."""
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateRevocationListBuilder(self._name, now, self._until)
        for number in serial_numbers:
            builder = builder.add_revoked_certificate(x509.RevokedCertificateBuilder(number, now).build())
        for each in earlier:
            builder = builder.add_revoked_certificate(each)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime.datetime | None = None
    ) -> x509.CertificateBuilder:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime.now(datetime.UTC) - _SKEW)
            .not_valid_after(until or self._until)
            .add_extension(_new_key_id(key), critical=False)
        )
        if self._key_id is None:
            return builder
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._key_id)
        return builder.add_extension(issuer, critical=False)


def authority_digest(certificate: x509.Certificate) -> bytes:
    """Returns the digest by which tokens and machines name an authority: the SHA-256 of its certificate in DER."""
    return certificate.fingerprint(hashes.SHA256())


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Returns a private key in PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _new_key_id(key: ec.EllipticCurvePublicKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key)


def _key_id(authority: x509.Certificate) -> x509.SubjectKeyIdentifier | None:
    """The id in an authority's certificate, if any. Tools compute it in ways of their own, and OpenSSL compares it."""
    try:
        return authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return None


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(uses: dict[str, bool]) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: uses.get(name, False) for name in _KEY_USES})


def _address(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
