"""Log files, read while they grow."""

from pathlib import Path

from corolla.local.log_files import LogFile


def test_only_whole_lines_come_and_each_once(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    assert log.new_lines() == []
    with log.path.open("ab") as file:
        file.write(b"one\ntw")
        file.flush()
        assert log.new_lines() == ["one"]
        file.write(b"o\nthree \xff\n")
        file.flush()
        assert log.new_lines() == ["two", "three �"]
        assert log.new_lines() == []


def test_a_log_file_is_read_to_its_end(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    assert log.last_lines() == []
    log.path.write_text("".join(f"{number}\n" for number in range(100)))
    assert log.last_lines(3) == ["97", "98", "99"]
    assert len(log.new_lines()) == 100


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    assert LogFile(Path("/dev/full")).refusal() == "No space left on device"
    assert LogFile(tmp_path / "a.log").refusal() is None
    assert LogFile(tmp_path / "no" / "a.log").refusal() == "No such file or directory"
