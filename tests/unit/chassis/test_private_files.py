"""Files that hold secrets are whole, and their owner's."""

import os
import stat
from pathlib import Path

import pytest

from corolla.chassis.private_files import write_private


def test_only_its_owner_reads_it_also_where_others_could_before(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("old")
    file.chmod(0o644)
    write_private(file, b"new")
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_one(tmp_path: Path) -> None:
    file, link = tmp_path / "secret", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    write_private(link, b"new")
    assert link.is_symlink()
    assert file.read_bytes() == b"new"


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(OSError, match=r"directory"):
        write_private(taken, b"new")
    assert list(tmp_path.iterdir()) == [taken]


def test_an_interruption_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_private(tmp_path / "secret", b"new")
    assert list(tmp_path.iterdir()) == []
