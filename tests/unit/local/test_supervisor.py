"""A process that dies is started again, and people learn when it serves; also on a machine that joined."""

import queue
import threading
from pathlib import Path

import pytest

from corolla.chassis.errors import SettingsError
from corolla.chassis.metrics import MetricsEndpoint, new_registry
from corolla.local.fork_server import Exit
from corolla.local.joined_servers import answers_healthy
from corolla.local.log_files import LogFile
from corolla.local.processes import ManagedProcess
from corolla.local.supervisor import Report, StackEvent, Supervisor

NAME = "server-1"


class Servers:
    """One process, which serves from each start on, and dies when the test says so."""

    def __init__(self) -> None:
        self.processes = (ManagedProcess(NAME, "", (), "127.0.0.1:1", LogFile(Path("unused"))),)
        self.serves = True
        self.exits = list[Exit]()
        self.done = list[str]()
        self.num_looks = 0
        self.is_router_frozen = False
        self.is_over = threading.Event()

    def launch(self, process: ManagedProcess) -> None:
        self.serves = True
        self.done.append("launched")

    def is_serving(self, name: str) -> bool:
        return self.serves

    def take_exits(self) -> list[Exit]:
        taken, self.exits = self.exits, []
        return taken

    def note_exit(self, process: ManagedProcess) -> None:
        self.done.append(f"noted {process.name}")
        if self.is_router_frozen:
            self.is_over.wait()
        raise SettingsError("the certificate cannot be read")

    def look(self, report: Report) -> None:
        self.num_looks += 1


@pytest.mark.parametrize("is_router_frozen", [False, True])
def test_a_process_serves_and_is_started_again_when_it_dies(is_router_frozen: bool) -> None:
    servers, events = Servers(), queue.SimpleQueue[StackEvent]()
    servers.is_router_frozen = is_router_frozen
    supervisor = Supervisor(servers, events.put, restarts=True, are_serving=False)
    supervisor.start()
    try:
        assert events.get(timeout=30) == StackEvent("ready", NAME, "serves")
        servers.serves = False
        servers.exits.append(Exit(NAME, 7, -9))
        died = events.get(timeout=30)
        assert (died.kind, died.source) == ("problem", NAME)
        assert "was killed by SIGKILL; starting it again in" in died.text
        assert events.get(timeout=30) == StackEvent("recovered", NAME, "serves again")
    finally:
        servers.is_over.set()
        supervisor.stop()
    assert servers.num_looks
    # The router must not take the next start for the process that ended.
    assert servers.done == [f"noted {NAME}", "launched"]


def test_health_is_asked_by_http() -> None:
    states = [True]
    endpoint = MetricsEndpoint(new_registry(), "127.0.0.1", 0, lambda: states[-1])
    endpoint.start()
    try:
        assert answers_healthy(endpoint.port)
        states.append(False)
        assert not answers_healthy(endpoint.port)
    finally:
        endpoint.close()
    assert not answers_healthy(endpoint.port)
