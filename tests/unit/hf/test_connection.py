"""The thread between blocking code and the data plane: shared, interruptible, and gone with its last user."""

import asyncio
import gc
import os
import signal
import threading
import time

import pytest

from corolla.chassis.errors import HopUnavailable, StartupError
from corolla.hf.connection import Connection, ServedModel

NOBODY = "127.0.0.1:9"


@pytest.fixture
def connection() -> Connection:
    return Connection(ServedModel(NOBODY, "model", "fingerprint", 4))


def num_threads() -> int:
    return sum(thread.name == "corolla" for thread in threading.enumerate())


async def thread_name() -> str:
    return threading.current_thread().name


def test_work_runs_in_the_thread(connection: Connection) -> None:
    assert connection.call(thread_name()) == "corolla"
    connection.close()


def test_models_share_a_connection() -> None:
    gc.collect()  # what other tests left behind has threads, too
    before = num_threads()
    first = Connection.shared(ServedModel(NOBODY, "shared", "fingerprint", 4))
    assert Connection.shared(ServedModel(NOBODY, "shared", "fingerprint", 4)) is first
    assert Connection.shared(ServedModel(NOBODY, "shared", "another", 4)) is not first
    del first
    gc.collect()
    assert num_threads() == before


def test_errors_arrive(connection: Connection) -> None:
    async def fail() -> None:
        raise HopUnavailable("gone")

    with pytest.raises(HopUnavailable, match="gone"):
        connection.call(fail())
    connection.close()


def test_an_interrupt_cancels_the_work(connection: Connection) -> None:
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        connection.call(wait())
    assert cancelled.wait(30)
    connection.close()


def test_a_closed_connection_says_so(connection: Connection) -> None:
    connection.close()
    with pytest.raises(HopUnavailable, match="closed"):
        connection.call(thread_name())
    connection.post(lambda: None)


def test_a_forked_process_is_asked_to_load_its_own_model(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(StartupError, match="fork"):
            connection.call(thread_name())
    connection.close()


def test_the_last_reference_may_go_in_the_thread_itself() -> None:
    gc.collect()
    before = num_threads()
    holder = [Connection(ServedModel(NOBODY, "model", "fingerprint", 4))]

    async def drop() -> None:
        holder.clear()

    holder[0].call(drop())
    deadline = time.monotonic() + 30
    while num_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_threads() == before
