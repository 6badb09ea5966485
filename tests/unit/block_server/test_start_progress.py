"""How far a start has come follows from what the process has read."""

from pathlib import Path

from corolla.block_server.start_progress import StartProgress, num_read_bytes


def test_share_and_seconds_left_follow_from_what_was_read() -> None:
    read, clock = [1000], [50.0]
    progress = StartProgress(200, num_read=lambda: read[0], clock=lambda: clock[0])
    assert (progress.share, progress.seconds_left) == (0.0, 0.0)
    read[0], clock[0] = 1050, 53.0
    assert (progress.share, progress.seconds_left) == (0.25, 9.0)
    read[0] = 1400
    assert progress.share < 1


def test_what_is_not_known_is_not_said() -> None:
    progress = StartProgress(0)
    assert (progress.share, progress.seconds_left) == (0.0, 0.0)


def test_the_system_counts_what_is_read_also_out_of_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    before = num_read_bytes()
    file.read_bytes()
    assert num_read_bytes() - before >= 1 << 20
