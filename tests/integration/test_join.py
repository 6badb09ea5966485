"""`corolla up --share` and `corolla join`: a machine joins by one line, and comes back, and is shut out."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corolla import Client
from corolla.chassis.errors import NoChain
from corolla.local.ports import Ports
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.other_machine import OtherMachine, other_machine
from tests.integration.running_up import COROLLA, RunningUp
from tests.reference import Unsplit

pytestmark = pytest.mark.full

TEXT = "tell me about rivers"


class Joined:
    """`corolla join --json` as a child on another machine, with a state folder of its own."""

    def __init__(self, folder: Path, machine: OtherMachine, address: str, token: str) -> None:
        self.errors = folder / "join-errors"
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "other-machine")}
        options = ["--port", "0", "--capacity-blocks", "2", "--log-folder", str(folder / "join-logs")]
        command = [*machine.prefix, *COROLLA, "join", address, "--json", *options]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        assert self.process.stdin is not None
        self.process.stdin.write(token)
        self.process.stdin.close()
        self.written = ""

    def wait_for(self, kind: str) -> dict[str, Any]:
        for line in self.process.stdout or ():
            self.written += line
            event: dict[str, Any] = json.loads(line)
            if event["event"] == kind:
                return event
        pytest.fail(f"it ended: {self.written} {self.errors.read_text()}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_checkpoint("llama", tmp_path / "tiny")
    return tmp_path


@pytest.fixture
def machine() -> Iterator[OtherMachine]:
    with other_machine() as machine:
        yield machine


@pytest.fixture
def up(folder: Path, machine: OtherMachine) -> Iterator[RunningUp]:
    shared = ("--share", "--share-host", machine.first_host, "--state-folder", str(folder / "state"))
    ports = ("--issuer-port", str(Ports().free()), "--router-port", str(Ports().free()))
    model = ("--model", str(folder / "tiny"), "--blocks", "0:3", "--threads", "1")
    running = RunningUp(folder, *shared, *ports, *model)
    yield running
    if running.process.poll() is None:
        running.end()


def tokens(folder: Path, *arguments: str) -> str:
    command = [*COROLLA, "tokens", *arguments, "--state-folder", str(folder / "state")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def status_there(folder: Path, machine: OtherMachine, up: RunningUp) -> list[str]:
    """The spans that the machine that joined sees by its own certificate."""
    router = f"{machine.first_host}:{up.addresses['router'].rpartition(':')[2]}"
    (tls_dir,) = (folder / "other-machine" / "corolla" / "joined").iterdir()
    command = [*machine.prefix, *COROLLA, "status", "--json", "--router", router]
    environment = {**os.environ, "COROLLA_TLS_DIR": str(tls_dir)}
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    facts = json.loads(said)
    assert facts["num_sessions"] is None
    hosts = {each["address"].rpartition(":")[0] for each in facts["servers"]}
    assert hosts == {machine.first_host, machine.host}
    return sorted(f"{each['span'][0]}:{each['span'][1]}" for each in facts["servers"])


def servers(up: RunningUp, number: int) -> None:
    """Waits until the newest placement has so many ready servers."""

    def has_them(event: dict[str, Any]) -> bool:
        return event["event"] == "placement" and [each["state"] for each in event["servers"]] == ["ready"] * number

    placements = [event for event in up.events if event["event"] == "placement"]
    if not placements or not has_them(placements[-1]):
        up.wait_for(has_them)


def test_a_machine_joins_serves_comes_back_and_is_shut_out(folder: Path, machine: OtherMachine, up: RunningUp) -> None:
    token = tokens(folder, "new")
    client = Client(up.addresses["client"])
    with pytest.raises(NoChain):
        client.generate(TEXT, max_tokens=8)
    joined = Joined(folder, machine, up.addresses["join"], token)
    up.wait_for(lambda event: event["event"] == "ready")
    servers(up, 2)
    answer = client.generate(TEXT, max_tokens=8)
    unsplit = Unsplit(folder / "tiny")
    assert list(answer.token_ids) == unsplit.generate(unsplit.encode(TEXT), 8).token_ids
    joined.wait_for("ready")
    assert status_there(folder, machine, up) == ["0:3", "3:5"]
    joined.process.send_signal(signal.SIGINT)
    assert joined.process.wait(60) == 0, joined.errors.read_text()
    servers(up, 1)
    secret = token.strip().rpartition(".")[2]
    assert secret not in joined.written + joined.errors.read_text()
    for log in [*(folder / "logs").iterdir(), *(folder / "join-logs").iterdir()]:
        assert secret not in log.read_text(), log

    again = Joined(folder, machine, up.addresses["join"], "")
    servers(up, 2)
    assert client.generate(TEXT, max_tokens=8).token_ids == answer.token_ids
    listed = tokens(folder, "list")
    assert "15 uses left" in listed
    assert " joined " in listed
    assert secret not in listed
    assert "machines that are out: 1" in tokens(folder, "revoke", listed.partition(" ")[0], "--machines")
    assert again.process.wait(60) == 1
    assert "was revoked" in again.errors.read_text()
    servers(up, 1)
    client.close()
