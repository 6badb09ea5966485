"""A shared stack keeps its authority, and replaces its own certificates in time."""

import datetime
import errno
from pathlib import Path

import pytest
from cryptography import x509

from corolla.chassis.errors import StartupError
from corolla.issuer.register_file import RegisterFile
from corolla.local.identities import StackIdentities
from corolla.trust.credentials import CERTIFICATE_FILE, REVOCATIONS_FILE, Credentials
from corolla.trust.workload import Role

ROUTER = "127.0.0.1:50050"
HOST = "192.168.1.10"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "state"


def certificate_in(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / CERTIFICATE_FILE).read_bytes())


def test_certificates_of_a_shared_stack_are_replaced_at_half_of_their_life(state: Path) -> None:
    identities = StackIdentities(ROUTER, HOST, state)
    folder = identities.folder_of(Role.ROUTER, "router")
    first, now = certificate_in(folder), datetime.datetime.now(datetime.UTC)
    names = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert HOST in map(str, names.get_values_for_type(x509.IPAddress))
    assert first.not_valid_after_utc - now <= datetime.timedelta(days=1)
    assert not identities.renew(now + datetime.timedelta(hours=11))
    later = now + datetime.timedelta(hours=13)
    assert identities.renew(later)
    assert certificate_in(folder).not_valid_after_utc > later
    assert not identities.renew(later)
    assert identities.operator.credentials is not None
    assert identities.operator.credentials.version == 2
    identities.remove()


def test_a_renewal_that_fails_is_tried_again(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = StackIdentities(ROUTER, HOST, state)
    folder = identities.folder_of(Role.ROUTER, "router")
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=13)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("corolla.trust.authority.write_private", full)
        with pytest.raises(StartupError, match="No space left"):
            identities.renew(later)
    assert identities.renew(later)
    assert certificate_in(folder).not_valid_after_utc > later
    identities.remove()


@pytest.mark.parametrize("is_relative", [False, True])
def test_what_the_issuer_revokes_counts_for_the_stacks_own_processes(
    state: Path, monkeypatch: pytest.MonkeyPatch, is_relative: bool
) -> None:
    monkeypatch.chdir(state.parent)
    identities = StackIdentities(ROUTER, HOST, Path(state.name) if is_relative else state)
    folder = identities.folder_of(Role.ROUTER, "router")
    assert Credentials(folder).certificate  # there is no list yet
    RegisterFile(state).new_token()
    assert (folder / REVOCATIONS_FILE).read_bytes() == (state / REVOCATIONS_FILE).read_bytes()
    identities.remove()
    assert (state / REVOCATIONS_FILE).exists()


def test_a_state_folder_has_one_stack_at_a_time_and_one_authority(state: Path) -> None:
    first = StackIdentities(ROUTER, HOST, state)
    authority = first.operator.credentials
    with pytest.raises(StartupError, match="--state-folder"):
        StackIdentities("127.0.0.1:50051", HOST, state)
    first.remove()
    second = StackIdentities(ROUTER, HOST, state)
    assert authority is not None
    assert second.operator.credentials is not None
    assert second.operator.credentials.is_valid(authority.certificate)
    second.remove()
