"""The process that holds all children: what they get, how their ends are told, and that none outlives it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from corolla.local.nursery import Nursery
from tests.architecture.sources import ROOT

CHILDREN = "tests.unit.local.children"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'services'}"}


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    opened = Nursery(ENVIRONMENT, tmp_path / "nursery.log")
    yield opened
    opened.close()


def wait_for(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        if time.monotonic() > give_up:
            pytest.fail(f"waited in vain for {what}")
        time.sleep(0.02)


def start(nursery: Nursery, name: str, log: Path, *arguments: str, **variables: str) -> None:
    nursery.start(name, CHILDREN, arguments, {**ENVIRONMENT, **variables}, log)


def test_a_child_gets_its_environment_arguments_and_log(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    start(nursery, "a", log, "say", "FLOWER", FLOWER="poppy")
    assert nursery.wait_gone(["a"], 20) == []
    assert log.read_text() == "poppy ['corolla', 'say', 'FLOWER']\n"
    assert [(each.name, each.status) for each in nursery.take_exits()] == [("a", 0)]
    assert nursery.take_exits() == []


def test_ends_are_told_with_status_or_signal(nursery: Nursery, tmp_path: Path) -> None:
    start(nursery, "a", tmp_path / "a.log", "exit", "7")
    start(nursery, "b", tmp_path / "b.log", "sleep")
    wait_for(lambda: nursery.pid("b"), "the child")
    nursery.signal("b", signal.SIGKILL)
    assert nursery.wait_gone(["a", "b"], 20) == []
    assert {each.name: each.status for each in nursery.take_exits()} == {"a": 7, "b": -signal.SIGKILL}
    assert nursery.is_gone("a")
    assert nursery.pid("b") is None


def test_a_name_can_be_started_again(nursery: Nursery, tmp_path: Path) -> None:
    for status in ("3", "4"):
        start(nursery, "a", tmp_path / "a.log", "exit", status)
        nursery.wait_gone(["a"], 20)
        assert [each.status for each in nursery.take_exits()] == [int(status)]


@pytest.mark.skipif(sys.platform != "linux", reason="children are only forked on Linux")
def test_children_have_what_was_warmed(nursery: Nursery, tmp_path: Path) -> None:
    start(nursery, "before", tmp_path / "before.log", "modules", "calendar")
    nursery.warm(["no.such.module", "calendar"])
    start(nursery, "after", tmp_path / "after.log", "modules", "calendar")
    assert nursery.wait_gone(["before", "after"], 20) == []
    assert (tmp_path / "before.log").read_text() == "False\n"
    assert (tmp_path / "after.log").read_text() == "True\n"
    assert nursery.warm_s > 0


def test_closing_ends_every_child(tmp_path: Path) -> None:
    nursery = Nursery(ENVIRONMENT, tmp_path / "nursery.log")
    start(nursery, "a", tmp_path / "a.log", "sleep")
    start(nursery, "b", tmp_path / "b.log", "stubborn")
    for name in "ab":
        wait_for(lambda name=name: "up" in read(tmp_path / f"{name}.log"), "the child")  # type: ignore[misc]
    pids = [nursery.pid("a"), nursery.pid("b")]
    nursery.close()
    assert not any(pid is not None and psutil.pid_exists(pid) for pid in pids)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


_PARENT = """
import os, sys
from pathlib import Path
from corolla.local.nursery import Nursery
folder = Path(sys.argv[1])
nursery = Nursery(os.environ, folder / "nursery.log")
nursery.start("a", "tests.unit.local.children", ["sleep"], dict(os.environ), folder / "a.log")
while not nursery.pid("a"):
    pass
sys.stdout.write(f"{nursery._process.pid} {nursery.pid('a')}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("victim", ["parent", "nursery"])
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
def test_no_child_outlives_parent_or_nursery(tmp_path: Path, victim: str) -> None:
    command = [sys.executable, "-c", _PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT) as parent:
        if parent.stdout is None:
            pytest.fail("no pipe")
        nursery_pid, child_pid = map(int, parent.stdout.readline().split())
        os.kill(parent.pid if victim == "parent" else nursery_pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(child_pid), "the child's end")
        parent.kill()
    wait_for(lambda: not is_alive(nursery_pid), "the nursery's end")


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
