"""The file of the register: no record counts that another program wrote, and its loss gives nothing to anyone."""

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from corolla.chassis.errors import SettingsError, Unauthenticated
from corolla.issuer.register_file import REGISTER_FILE, RegisterFile
from corolla.trust.authority import Authority
from corolla.trust.join_token import JoinToken
from corolla.trust.workload import Role

NOW = 1_800_000_000
DAY_S = 86_400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def listed(file: RegisterFile) -> list[int]:
    return [each.serial_number for each in x509.load_pem_x509_crl(file.revocations())]


def change_token(folder: Path, token: JoinToken, change: dict[str, Any]) -> None:
    path = folder / REGISTER_FILE
    content = json.loads(path.read_text())
    for each in content["tokens"]:
        record = json.loads(each["record"])
        if record["id"] == token.id:
            each["record"] = json.dumps(record | change)
    path.write_text(json.dumps(content))


def test_a_token_and_what_joined_by_it_outlive_the_process(folder: Path) -> None:
    token = RegisterFile(folder).new_token(Role.LIBRARY, "acme", uses=1)
    with RegisterFile(folder).changing() as register:
        register.accept(b"key", token, "m1", NOW - 10**9)
    again = RegisterFile(folder).register()
    assert [(each.id, each.uses, each.tenant) for each in again.tokens] == [(token.id, 0, "acme")]
    assert [(each.id, each.name) for each in again.machines] == [("m1", "acme")]
    assert token.written not in "".join(each.read_text() for each in folder.iterdir() if each.is_file())
    assert token.secret.hex() not in (folder / REGISTER_FILE).read_text()


def test_only_the_user_can_read_what_is_kept(folder: Path) -> None:
    RegisterFile(folder).new_token()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}
    folder.chmod(0o755)
    with pytest.raises(SettingsError, match="other users"):
        RegisterFile(folder)


@pytest.mark.parametrize("change", [{"uses": 1000}, {"expires": 2 * NOW}, {"role": "client"}, {"revoked": False}])
def test_a_changed_record_counts_no_longer(folder: Path, change: dict[str, Any]) -> None:
    file = RegisterFile(folder)
    token, other = file.new_token(), file.new_token()
    with file.changing() as register:
        register.revoke(token.id, with_machines=False)
    change_token(folder, token, change)
    with pytest.raises(Unauthenticated, match="does not know"):
        file.register().checked(token, NOW - 10**9)
    assert file.register().checked(other, NOW - 10**9).id == other.id


def test_a_record_moves_into_no_other_stack_or_list(folder: Path, tmp_path: Path) -> None:
    file, other = RegisterFile(folder), RegisterFile(tmp_path / "other")
    file.new_token()
    other.new_token()
    (tmp_path / "other" / REGISTER_FILE).write_bytes((folder / REGISTER_FILE).read_bytes())
    assert other.register().tokens == []
    content = json.loads((folder / REGISTER_FILE).read_text())
    (folder / REGISTER_FILE).write_text(json.dumps({"tokens": [], "machines": content["tokens"]}))
    assert file.register().machines == []


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b'{"tokens": 1, "machines": []}', b"[" * 100_000, b"\xff"])
def test_a_damaged_file_gives_nothing_and_can_be_written_again(folder: Path, damaged: bytes) -> None:
    file = RegisterFile(folder)
    token = file.new_token()
    (folder / REGISTER_FILE).write_bytes(damaged)
    assert RegisterFile(folder).register().tokens == []
    with pytest.raises(Unauthenticated):
        RegisterFile(folder).register().checked(token, NOW)
    again = file.new_token()
    assert [each.id for each in file.register().tokens] == [again.id]


def test_the_list_names_what_is_revoked(folder: Path) -> None:
    file = RegisterFile(folder)
    token = file.new_token()
    with file.changing() as register:
        register.accept(b"key", token, "m1", NOW - 10**9).signed(4711, 2 * NOW, "pem", NOW)
    with file.changing() as register:
        register.revoke("m1", with_machines=False)
    assert listed(file) == [4711]


@pytest.mark.parametrize("damaged", [b"", b"{", None])
def test_a_register_that_is_lost_gives_no_stolen_certificate_back(
    folder: Path, damaged: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RegisterFile(folder)
    token, now = file.new_token(), int(time.time())
    with file.changing() as register:
        register.accept(b"key", token, "m1", now).signed(4711, now + DAY_S, "pem", now)
        register.revoke("m1", with_machines=False)
    if damaged is None:
        (folder / REGISTER_FILE).unlink()
    else:
        (folder / REGISTER_FILE).write_bytes(damaged)
    file.new_token()
    file.write_revocations()
    assert listed(file) == [4711]
    # The list of another authority counts for nothing.
    own = file.revocations()
    (folder / "crl.pem").write_bytes(Authority().revocations([1]))
    file.write_revocations()
    assert listed(file) == []
    (folder / "crl.pem").write_bytes(own)
    monkeypatch.setattr("time.time", lambda: now + 2 * DAY_S)
    file.write_revocations()
    assert listed(file) == []


def test_the_list_is_written_again_if_only_the_register_was(folder: Path) -> None:
    file = RegisterFile(folder)
    token, now = file.new_token(), int(time.time())
    old = file.revocations()
    with file.changing() as register:
        register.accept(b"key", token, "m1", now).signed(4711, now + DAY_S, "pem", now)
        register.revoke("m1", with_machines=False)
    (folder / "crl.pem").write_bytes(old)
    RegisterFile(folder).write_revocations()
    assert listed(file) == [4711]


def test_an_authority_is_kept_and_a_damaged_one_is_refused(folder: Path) -> None:
    first = Authority.kept_in(folder)
    assert Authority.kept_in(folder).digest == first.digest
    assert Authority.kept_in(folder).secret(b"a") == first.secret(b"a") != first.secret(b"b")
    (folder / "ca.crt").write_bytes(Authority().certificate_pem)
    with pytest.raises(SettingsError, match="belong together"):
        Authority.kept_in(folder)
    (folder / "ca.crt").write_bytes(b"nonsense")
    with pytest.raises(SettingsError, match="no authority"):
        Authority.kept_in(folder)


def test_a_token_is_written_and_read(folder: Path) -> None:
    token = RegisterFile(folder).new_token()
    assert JoinToken.parse(token.written) == token
    assert token.secret.hex() not in repr(token)
    assert str(token.secret) not in repr(token)
    for bad in ("", "cj1.", token.written[:-1], token.written + "x", token.written.replace("cj1", "cj2"), "x" * 10**6):
        assert JoinToken.parse(bad) is None
