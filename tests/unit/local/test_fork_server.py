"""The fork server passes environment and arguments to its children, reports their ends, and outlives none."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from corolla.local.fork_server import ForkServer
from tests.architecture.sources import ROOT

CHILDREN = "tests.unit.local.children"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'services'}"}


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[ForkServer]:
    opened = ForkServer(ENVIRONMENT, tmp_path / "fork-server.log")
    yield opened
    opened.close()


def wait_for(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        if time.monotonic() > give_up:
            pytest.fail(f"waited in vain for {what}")
        time.sleep(0.02)


def start(fork_server: ForkServer, name: str, log: Path, *arguments: str, **variables: str) -> None:
    fork_server.start(name, CHILDREN, arguments, {**ENVIRONMENT, **variables}, log)


def test_a_child_gets_its_environment_arguments_and_log(fork_server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    start(fork_server, "a", log, "say", "FLOWER", FLOWER="poppy")
    assert fork_server.wait_gone(["a"], 20) == []
    assert log.read_text() == "poppy ['corolla', 'say', 'FLOWER']\n"
    assert [(each.name, each.status) for each in fork_server.take_exits()] == [("a", 0)]
    assert fork_server.take_exits() == []


def test_the_fork_server_reports_ends_with_status_or_signal(fork_server: ForkServer, tmp_path: Path) -> None:
    start(fork_server, "a", tmp_path / "a.log", "exit", "7")
    start(fork_server, "b", tmp_path / "b.log", "sleep")
    wait_for(lambda: fork_server.pid("b"), "the child")
    fork_server.signal("b", signal.SIGKILL)
    assert fork_server.wait_gone(["a", "b"], 20) == []
    assert {each.name: each.status for each in fork_server.take_exits()} == {"a": 7, "b": -signal.SIGKILL}
    assert fork_server.is_gone("a")
    assert fork_server.pid("b") is None


def test_a_name_can_be_started_again(fork_server: ForkServer, tmp_path: Path) -> None:
    for status in ("3", "4"):
        start(fork_server, "a", tmp_path / "a.log", "exit", status)
        fork_server.wait_gone(["a"], 20)
        assert [each.status for each in fork_server.take_exits()] == [int(status)]


@pytest.mark.skipif(sys.platform != "linux", reason="children are only forked on Linux")
def test_children_inherit_preloaded_modules(fork_server: ForkServer, tmp_path: Path) -> None:
    start(fork_server, "before", tmp_path / "before.log", "modules", "calendar")
    fork_server.warm(["no.such.module", "calendar"])
    start(fork_server, "after", tmp_path / "after.log", "modules", "calendar")
    assert fork_server.wait_gone(["before", "after"], 20) == []
    assert (tmp_path / "before.log").read_text() == "False\n"
    assert (tmp_path / "after.log").read_text() == "True\n"
    assert fork_server.warm_s > 0


@pytest.mark.skipif(sys.platform != "linux", reason="children are only forked on Linux")
def test_a_child_that_is_not_forked_has_an_interpreter_of_its_own(fork_server: ForkServer, tmp_path: Path) -> None:
    fork_server.warm(["calendar"])
    log = tmp_path / "a.log"
    fork_server.start("a", CHILDREN, ["modules", "calendar"], ENVIRONMENT, log, title="corolla a", is_forked=False)
    assert fork_server.wait_gone(["a"], 20) == []
    assert log.read_text() == "False\n"
    assert [each.status for each in fork_server.take_exits()] == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="children are only forked on Linux")
@pytest.mark.parametrize("title", ["corolla block-server 0:15 :50052", "corolla " + "x" * 60])
def test_processes_show_their_title(fork_server: ForkServer, tmp_path: Path, title: str) -> None:
    log = tmp_path / "a.log"
    fork_server.start("a", CHILDREN, ["sleep"], ENVIRONMENT, log, title=title)
    wait_for(lambda: "up" in read(log), "the child")
    child = psutil.Process(pid_of(fork_server, "a"))
    parent = child.parent()
    assert parent is not None
    shown = subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", f"{child.pid},{parent.pid}"], capture_output=True, text=True, check=True
    )
    assert sorted(line.strip() for line in shown.stdout.splitlines()) == sorted([title, "corolla fork-server"])


def test_closing_ends_every_child(tmp_path: Path) -> None:
    fork_server = ForkServer(ENVIRONMENT, tmp_path / "fork-server.log")
    start(fork_server, "a", tmp_path / "a.log", "sleep")
    start(fork_server, "b", tmp_path / "b.log", "stubborn")
    for name in "ab":
        wait_for(lambda name=name: "up" in read(tmp_path / f"{name}.log"), "the child")  # type: ignore[misc]
    pids = [pid_of(fork_server, name) for name in "ab"]
    fork_server.close()
    assert not any(map(psutil.pid_exists, pids))


def pid_of(fork_server: ForkServer, name: str) -> int:
    """What a child says may be read before its parent says which process it is."""
    wait_for(lambda: fork_server.pid(name) is not None, "its process id")
    pid = fork_server.pid(name)
    assert pid is not None
    return pid


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


_PARENT = """
import os, sys
from pathlib import Path
from corolla.local.fork_server import ForkServer
folder = Path(sys.argv[1])
fork_server = ForkServer(os.environ, folder / "fork-server.log")
fork_server.start("a", "tests.unit.local.children", ["sleep"], dict(os.environ), folder / "a.log")
while not fork_server.pid("a"):
    pass
sys.stdout.write(f"{fork_server._process.pid} {fork_server.pid('a')}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("victim", ["parent", "fork_server"])
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
def test_no_child_outlives_parent_or_fork_server(tmp_path: Path, victim: str) -> None:
    command = [sys.executable, "-c", _PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT) as parent:
        if parent.stdout is None:
            pytest.fail("no pipe")
        fork_server_pid, child_pid = map(int, parent.stdout.readline().split())
        os.kill(parent.pid if victim == "parent" else fork_server_pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(child_pid), "the child's end")
        parent.kill()
    wait_for(lambda: not is_alive(fork_server_pid), "the fork server's end")


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
