"""`corolla keys`, on real files."""

import os
import stat
from pathlib import Path

import pytest

from corolla.cli.app import main
from corolla.client.api.keys import KeyTable


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["keys", *arguments])
    captured = capsys.readouterr()
    return status, captured.out.strip(), captured.err


def test_a_key_is_made_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nold:key-of-old-00001")
    status, key, _ = run(capsys, "new", str(file), "--tenant", "acme", "--expires-days", "30", "--scope", "chat")
    assert status == 0
    assert key not in file.read_text()
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    (record,) = (each for each in KeyTable.parse(file.read_text()).records if each.tenant == "acme")
    listed = run(capsys, "list", str(file))[1]
    assert f"{record.id}  acme" in listed
    assert "chat" in listed
    assert key.split("_", 2)[2] not in listed
    assert run(capsys, "revoke", str(file), record.id)[0] == 0
    assert file.read_text() == "# ours\nold:key-of-old-00001\n"


def test_mistakes_end_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    assert "cannot be read" in run(capsys, "list", str(file))[2]
    file.write_text("nonsense\n")
    status, _, says = run(capsys, "new", str(file), "--tenant", "acme")
    assert status != 0
    assert "line 1 is not of the form tenant:key" in says
    assert file.read_text() == "nonsense\n"
    file.write_text("old:key-of-old-00001\n")
    assert "has no key 00" in run(capsys, "revoke", str(file), "00")[2]
    assert "tenant: " in run(capsys, "new", str(file), "--tenant", "a:b")[2]
    assert "cannot be written" in run(capsys, "new", str(tmp_path / "none" / "keys"), "--tenant", "acme")[2]
