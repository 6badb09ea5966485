"""The files of authorities and revocations decide which certificates are valid."""

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from corolla.chassis.errors import SettingsError
from corolla.trust.authority import Authority
from corolla.trust.certificate_verifier import CertificateVerifier, PresentedCertificate
from corolla.trust.credentials import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, REVOCATIONS_FILE, Credentials
from corolla.trust.workload import Role
from tests.identities import Identities

NONE = b""


def certificate_of(tmp_path: Path, authority: Authority, until: datetime.datetime | None = None) -> bytes:
    """In PEM, as calls show it."""
    folder = Identities(tmp_path, authority).folder_of(Role.CLIENT, "1", until=until)
    return (folder / CERTIFICATE_FILE).read_bytes()


def number_of(certificate: bytes) -> int:
    return x509.load_pem_x509_certificate(certificate).serial_number


def test_a_certificate_counts_in_either_form_until_it_is_revoked(tmp_path: Path) -> None:
    authority = Authority()
    pem = certificate_of(tmp_path, authority)
    der = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
    for presented in (PresentedCertificate(pem), PresentedCertificate(der)):
        assert CertificateVerifier(authority.certificate_pem, NONE).is_valid(presented)
        assert not CertificateVerifier(authority.certificate_pem, authority.revocations([number_of(pem)])).is_valid(
            presented
        )


def test_a_list_revokes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    authority = Authority()
    one, other = (certificate_of(tmp_path / name, authority) for name in ("one", "other"))
    verifier = CertificateVerifier(
        authority.certificate_pem, authority.revocations([number_of(one)]) + authority.revocations([])
    )
    assert not verifier.is_valid(PresentedCertificate(one))
    assert verifier.is_valid(PresentedCertificate(other))


def test_a_list_that_no_authority_signed_revokes_nothing(tmp_path: Path) -> None:
    authority, rogue = Authority(), Authority()
    pem = certificate_of(tmp_path, authority)
    assert CertificateVerifier(authority.certificate_pem, rogue.revocations([number_of(pem)])).is_valid(
        PresentedCertificate(pem)
    )


def test_a_certificate_that_has_ended_does_not_count(tmp_path: Path) -> None:
    authority = Authority()
    ended = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=1)
    verifier = CertificateVerifier(authority.certificate_pem, NONE)
    assert not verifier.is_valid(PresentedCertificate(certificate_of(tmp_path, authority, until=ended)))
    assert not verifier.is_valid(PresentedCertificate(b"nonsense"))


def test_a_certificate_is_valid_while_its_authority_is_trusted(tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    pem = certificate_of(tmp_path, old)
    first = CertificateVerifier(old.certificate_pem, NONE)
    both = CertificateVerifier(old.certificate_pem + new.certificate_pem, NONE, first)
    last = CertificateVerifier(new.certificate_pem, NONE, both)
    for presented in (PresentedCertificate(pem), PresentedCertificate(pem, first.authorities)):
        assert both.is_valid(presented)
        assert not last.is_valid(presented)


def test_a_certificate_of_an_intermediate_is_valid_while_all_its_authorities_stay_trusted(tmp_path: Path) -> None:
    """No service shows intermediates here: none of the authorities has signed this one."""
    root, other, intermediate = Authority(), Authority(), Authority()
    pem = certificate_of(tmp_path, intermediate)
    first = CertificateVerifier(root.certificate_pem, NONE)
    presented = PresentedCertificate(pem, first.authorities)
    assert first.is_valid(presented)
    assert CertificateVerifier(root.certificate_pem + other.certificate_pem, NONE, first).is_valid(presented)
    assert not CertificateVerifier(other.certificate_pem, NONE, first).is_valid(presented)


def test_revocations_that_are_none_are_refused_at_the_start(tmp_path: Path) -> None:
    folder = Identities(tmp_path).folder_of(Role.BLOCK, "1")
    (folder / REVOCATIONS_FILE).write_text("nonsense")
    with pytest.raises(SettingsError, match=r"crl\.pem holds no certificate revocation list"):
        Credentials(folder)


@pytest.mark.parametrize("digest", [b"of another tool", None])
def test_openssl_takes_certificates_of_an_authority_of_another_tool(tmp_path: Path, digest: bytes | None) -> None:
    """Tools compute key ids in ways of their own: Go since 1.25 takes SHA-256, and some write none."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    if digest is not None:
        builder = builder.add_extension(x509.SubjectKeyIdentifier(digest), critical=False)
    folder = Identities(tmp_path, Authority(key, builder.sign(key, hashes.SHA256()))).folder_of(Role.REDIS, "1")
    context = ssl.create_default_context(cafile=folder / AUTHORITY_FILE)
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context.check_hostname = False
    caller = context.wrap_bio(to_client, to_server)
    server = shown.wrap_bio(to_server, to_client, server_side=True)
    with pytest.raises(ssl.SSLWantReadError):
        caller.do_handshake()
    with pytest.raises(ssl.SSLWantReadError):
        server.do_handshake()
    caller.do_handshake()
