"""Ctrl-C while an answer runs: it closes the stream instead of breaking into whatever waits for it."""

import signal
import threading

import pytest

from corolla.cli.interruption import interruption


class Stream:
    def __init__(self) -> None:
        self.times_closed = 0

    def close(self) -> None:
        self.times_closed += 1


def test_the_first_interrupt_closes_the_stream_and_raises_nothing() -> None:
    stream = Stream()
    with interruption() as told:
        told.closes(stream)
        assert not told.came
        signal.raise_signal(signal.SIGINT)
        assert told.came
    assert stream.times_closed == 1


def test_an_interrupt_before_there_is_a_stream_closes_it_as_soon_as_there_is_one() -> None:
    stream = Stream()
    with interruption() as told:
        signal.raise_signal(signal.SIGINT)
        told.closes(stream)
    assert stream.times_closed == 1


def test_the_second_interrupt_is_an_exception() -> None:
    with interruption():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_afterwards_interrupts_are_what_they_were() -> None:
    with interruption():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_in_another_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run() -> None:
        with interruption() as told:
            seen.append((signal.getsignal(signal.SIGINT), told.came))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
