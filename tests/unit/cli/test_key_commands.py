"""`corolla keys`, on real files."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corolla.chassis.private_files import changing
from corolla.cli.app import main
from corolla.client.api.keys import KeyTable, NewKey


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


def test_a_key_that_is_said_to_be_revoked_is_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    key_ids = [run(capsys, "new", str(file), "--tenant", name)[1].split("_")[1] for name in ("acme", "beta")]
    file.write_text(file.read_text().replace('"id":', '"id"\t:\t'))
    assert run(capsys, "revoke", str(file), key_ids[0])[0] == 0
    assert [record.id for record in KeyTable.parse(file.read_text()).records] == [key_ids[1]]


def test_the_only_key_is_not_revoked_because_services_would_keep_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    key_id = run(capsys, "new", str(file), "--tenant", "acme")[1].split("_")[1]
    before = file.read_text()
    status, _, says = run(capsys, "revoke", str(file), key_id)
    assert status != 0
    assert "is the only key" in says
    assert file.read_text() == before


def test_keys_of_the_simple_form_have_no_id_to_be_revoked_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text("acme:key-of-acme-0001\nbeta:key-of-beta-0001\n")
    assert [line.split() for line in run(capsys, "list", str(file))[1].splitlines()] == [
        ["(no", "id)", "acme"],
        ["(no", "id)", "beta"],
    ]
    status, _, says = run(capsys, "revoke", str(file), "0" * 16)
    assert status != 0
    assert "has no key" in says


def test_a_link_to_a_file_of_keys_stays_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, link = tmp_path / "keys", tmp_path / "link"
    run(capsys, "new", str(file), "--tenant", "acme")
    link.symlink_to(file)
    assert run(capsys, "new", str(link), "--tenant", "beta")[0] == 0
    assert link.is_symlink()
    assert KeyTable.parse(file.read_text()).tenants == {"acme", "beta"}


def test_no_name_ends_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "keys")
    assert "tenant: " in run(capsys, "new", file, "--tenant", "ac\u2028me")[2]
    assert "models" in run(capsys, "new", file, "--tenant", "acme", "--model", "lla\x85ma")[2]
    assert not (tmp_path / "keys").exists()


def test_commands_at_once_lose_nobodys_change(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    revoked = [NewKey("old") for _ in range(2)]
    # One key stays: where both revocations come first, the second one must not meet the only key.
    file.write_text("".join(f"{each.record.line}\n" for each in [NewKey("stays"), *revoked]))
    corolla = [sys.executable, "-m", "corolla", "keys"]
    commands = [[*corolla, "new", str(file), "--tenant", f"tenant-{number}"] for number in range(4)]
    commands += [[*corolla, "revoke", str(file), each.record.id] for each in revoked]
    with changing(file):
        running = [subprocess.Popen(each, stdout=subprocess.PIPE) for each in commands]
        # All stand at the file before one goes on: else the quickest might be through before the next has begun.
        deadline = time.monotonic() + 60
        while num_waiting(file.parent) < len(running):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert [each.wait(60) for each in running] == [0] * len(running)
    for each in running:
        each.communicate()
    assert KeyTable.parse(file.read_text()).tenants == {"stays", *(f"tenant-{number}" for number in range(4))}
    assert [each.name for each in tmp_path.iterdir()] == ["keys"]


def num_waiting(folder: Path) -> int:
    """How many processes wait for the lock of a folder, as the kernel lists them."""
    number = os.stat(folder).st_ino
    waiting = (line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line)
    return sum(each[6].rpartition(":")[2] == str(number) for each in waiting)
