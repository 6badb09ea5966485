"""Ports: given ones are checked, found ones are free and never handed out twice."""

import socket
import sys
from collections.abc import Iterator

import pytest

from corolla.chassis.errors import StartupError
from corolla.local.ports import Ports, is_free


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_refused_by_its_number(taken_port: int) -> None:
    assert not is_free(taken_port)
    with pytest.raises(StartupError, match=f"port {taken_port} for the router is taken"):
        Ports().given(taken_port, "router")


def test_a_port_of_both_families_is_one_port(taken_port: int) -> None:
    ports = Ports()
    assert not is_free(taken_port, "::")
    free = ports.free(host="::")
    with socket.socket(socket.AF_INET6) as probe, pytest.raises(OSError, match="in use"):
        probe.bind(("::", free))
    ports.close()


def test_a_taken_usual_port_is_passed_over(taken_port: int) -> None:
    assert Ports().free(taken_port) != taken_port


def test_no_port_is_handed_out_twice() -> None:
    ports = Ports()
    found = [ports.free() for _ in range(50)]
    assert len(set(found)) == 50
    assert ports.free(found[0]) != found[0]
    with pytest.raises(StartupError):
        ports.given(found[0], "router")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartupError, match=r"192\.0\.2\.1"):
        is_free(20_000, "192.0.2.1")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets two sockets have a port in this way")
def test_what_one_stack_has_another_does_not_get_and_its_own_processes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they listen, too."""
    monkeypatch.setattr("random.sample", lambda candidates, count: list(candidates)[:count])
    ours, theirs = Ports(), Ports()
    found = [ours.free() for _ in range(10)]
    assert not {theirs.free() for _ in range(10)} & set(found)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", found[0]))
        listener.listen()
    ours.close()
    theirs.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names of sockets that end with their process")
def test_two_stacks_that_start_at_once_share_no_usual_port() -> None:
    ours, theirs = Ports(), Ports()
    usual = ours.free()
    ours.close()
    ours = Ports()
    assert ours.choose(None, usual, "block server") == usual
    assert theirs.choose(None, usual, "block server") != usual
    with pytest.raises(StartupError, match=f"port {usual} for the router is taken"):
        theirs.given(usual, "router")
    with pytest.raises(StartupError):
        theirs.given(usual, "router", "::")
    assert theirs.given(usual, "router", "127.0.0.2") == usual, "another address has ports of its own"
    theirs.close()
    theirs = Ports()
    ours.close()
    assert theirs.given(usual, "router") == usual
    theirs.close()
