"""Which certificates count, as the files say that name authorities and revocations."""

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from corolla.chassis.errors import SettingsError
from corolla.trust.authority import Authority
from corolla.trust.beliefs import Beliefs, Shown
from corolla.trust.credentials import CERTIFICATE_FILE, REVOCATIONS_FILE, Credentials
from corolla.trust.workload import Role
from tests.identities import Identities

NONE = b""


def certificate_of(tmp_path: Path, authority: Authority, until: datetime.datetime | None = None) -> bytes:
    """In PEM, as calls show it."""
    folder = Identities(tmp_path, authority).folder_of(Role.CLIENT, "1", until=until)
    return (folder / CERTIFICATE_FILE).read_bytes()


def test_a_certificate_counts_in_either_form_until_it_is_revoked(tmp_path: Path) -> None:
    authority = Authority()
    pem = certificate_of(tmp_path, authority)
    der = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
    for shown in (Shown(pem), Shown(der)):
        assert Beliefs(authority.certificate_pem, NONE).hold(shown)
        assert not Beliefs(authority.certificate_pem, authority.revocations([pem])).hold(shown)


def test_a_list_revokes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    authority = Authority()
    one, other = (certificate_of(tmp_path / name, authority) for name in ("one", "other"))
    beliefs = Beliefs(authority.certificate_pem, authority.revocations([one]) + authority.revocations([]))
    assert not beliefs.hold(Shown(one))
    assert beliefs.hold(Shown(other))


def test_a_list_that_no_authority_signed_revokes_nothing(tmp_path: Path) -> None:
    authority, rogue = Authority(), Authority()
    pem = certificate_of(tmp_path, authority)
    assert Beliefs(authority.certificate_pem, rogue.revocations([pem])).hold(Shown(pem))


def test_a_certificate_that_has_ended_does_not_count(tmp_path: Path) -> None:
    authority = Authority()
    ended = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=1)
    beliefs = Beliefs(authority.certificate_pem, NONE)
    assert not beliefs.hold(Shown(certificate_of(tmp_path, authority, until=ended)))
    assert not beliefs.hold(Shown(b"nonsense"))


def test_whom_an_authority_signed_for_counts_as_long_as_that_is_believed(tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    pem = certificate_of(tmp_path, old)
    first = Beliefs(old.certificate_pem, NONE)
    both = Beliefs(old.certificate_pem + new.certificate_pem, NONE, first)
    last = Beliefs(new.certificate_pem, NONE, both)
    for shown in (Shown(pem), Shown(pem, first.authorities)):
        assert both.hold(shown)
        assert not last.hold(shown)


def test_a_certificate_of_an_intermediate_counts_while_all_stay_believed_that_were(tmp_path: Path) -> None:
    """No service shows intermediates here: none of the authorities has signed this one."""
    root, other, intermediate = Authority(), Authority(), Authority()
    pem = certificate_of(tmp_path, intermediate)
    first = Beliefs(root.certificate_pem, NONE)
    shown = Shown(pem, first.authorities)
    assert first.hold(shown)
    assert Beliefs(root.certificate_pem + other.certificate_pem, NONE, first).hold(shown)
    assert not Beliefs(other.certificate_pem, NONE, first).hold(shown)


def test_revocations_that_are_none_are_refused_at_the_start(tmp_path: Path) -> None:
    folder = Identities(tmp_path).folder_of(Role.BLOCK, "1")
    (folder / REVOCATIONS_FILE).write_text("nonsense")
    with pytest.raises(SettingsError, match=r"crl\.pem holds no certificate revocation list"):
        Credentials(folder)
