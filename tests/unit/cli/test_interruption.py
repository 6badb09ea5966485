"""Ctrl-C while an answer runs: it closes the stream instead of raising in the code that waits for it."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from corolla.cli.interruption import EXIT_INTERRUPTED, INTERRUPTED, imports_end_at_once, interruption


class Stream:
    def __init__(self) -> None:
        self.times_closed = 0

    def close(self) -> None:
        self.times_closed += 1


@pytest.mark.parametrize("is_early", [False, True])
def test_the_first_interrupt_closes_the_stream_as_soon_as_there_is_one_and_raises_nothing(is_early: bool) -> None:
    stream = Stream()
    with interruption() as interrupt:
        for number in range(2):
            if bool(number) is is_early:
                interrupt.closes(stream)
            else:
                signal.raise_signal(signal.SIGINT)
                assert interrupt.came
    assert stream.times_closed == 1


def test_the_second_interrupt_is_an_exception_and_so_is_one_behind_the_stream() -> None:
    with interruption():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_in_another_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run() -> None:
        with interruption() as interrupt:
            seen.append((signal.getsignal(signal.SIGINT), interrupt.came))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_no_library_mistakes_ctrl_c_for_a_missing_part_of_itself(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    part = None\n"
    )
    program = (
        "from corolla.cli.interruption import imports_end_at_once\n"
        "with imports_end_at_once():\n    import library\n    print('went on')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (EXIT_INTERRUPTED, "", INTERRUPTED)


def test_ctrl_c_outside_imports_is_an_exception() -> None:
    with imports_end_at_once(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
