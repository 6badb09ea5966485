"""`corolla up --share` and `corolla join`: a machine joins by one line, and comes back, and is shut out."""

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from corolla import Client
from corolla.chassis.errors import NoChain
from corolla.local.ports import Ports
from tests.architecture.sources import ROOT
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.other_machine import OtherMachine, other_machines
from tests.integration.running_up import COROLLA, RunningUp
from tests.reference import Unsplit

pytestmark = pytest.mark.full

TEXT: Final = "tell me about rivers"
PATIENCE_S: Final = 240
"""It only ends a hang: a machine may be busy."""
PAGE: Final = ROOT / "docs" / "several-machines.md"


def unit() -> str:
    """The systemd unit of the page."""
    (found,) = re.findall(r"```\n(\[Unit\]\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


class Joined:
    """`corolla join --json` as a child on another machine, with a state folder and a cache of its own.

    If that is a namespace, it lacks the folder of the model.

    Args:
        first: the folder that it lacks; None: the one in `folder`.
    """

    def __init__(
        self, folder: Path, machine: OtherMachine, command: Sequence[str], variables: Mapping[str, str],
        token: str = "", first: Path | None = None,
    ) -> None:  # fmt: skip
        self.errors = folder / "join-errors"
        folders = {"XDG_STATE_HOME": str(folder / "other-machine"), "COROLLA_CACHE": str(cache(folder))}
        environment = {**os.environ, **folders, **variables}
        options = ["--json", "--log-folder", str(folder / "join-logs")]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*machine.without(first or folder / "first"), *command, *options],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(token)
        self.process.stdin.close()
        self.written = ""

    @classmethod
    def by_unit(cls, folder: Path, machine: OtherMachine, address: str, token: str) -> "Joined":
        """Runs the unit's line as systemd does, with a credential."""
        credentials = folder / "credentials"
        credentials.mkdir()
        (credentials / "token").write_text(token)
        assert {"Environment=XDG_STATE_HOME=%S", "Environment=XDG_CACHE_HOME=%C"} < set(unit().splitlines())
        variable, path = re.findall(r"^Environment=(COROLLA_JOIN\w+)=(.*)$", unit(), re.MULTILINE)[0]
        (started,) = re.findall(r"^ExecStart=(.*)$", unit(), re.MULTILINE)
        program, *arguments = shlex.split(started)
        assert program.endswith("/bin/corolla")
        given = {"192.168.1.10:50054": address}
        arguments = [given.get(each, each) for each in arguments]
        variables = {variable: path.replace("%d", str(credentials)), "CREDENTIALS_DIRECTORY": str(credentials)}
        return cls(folder, machine, [*COROLLA, *arguments], variables)

    def wait_for(self, kind: str) -> dict[str, Any]:
        for line in self.process.stdout or ():
            self.written += line
            event: dict[str, Any] = json.loads(line)
            if event["event"] == kind:
                return event
        pytest.fail(f"it ended: {self.written} {self.errors.read_text()}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first machine has a model of five blocks, and every machine has room for two of them."""
    make_tiny_checkpoint("llama", model(tmp_path), config_changes={"hidden_size": 256, "intermediate_size": 512})
    monkeypatch.setenv("COROLLA_WEIGHTS_MIB", "5")
    (tmp_path / "third").mkdir()
    return tmp_path


def model(folder: Path) -> Path:
    """The model, on the first machine."""
    return folder / "first" / "tiny"


def cache(folder: Path) -> Path:
    """The cache of the other machine."""
    return folder / "other-cache"


@pytest.fixture
def machines() -> Iterator[list[OtherMachine]]:
    with (Path(tempfile.gettempdir()) / "corolla-tests-share.lock").open("w") as lock:
        # Shared stacks of one machine would race for the usual ports.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with other_machines(2) as machines:
            yield machines


@pytest.fixture
def up(folder: Path, machines: list[OtherMachine]) -> Iterator[RunningUp]:
    shared = ("--share", "--share-host", machines[0].first_host, "--state-folder", str(folder / "state"))
    ports = ("--issuer-port", str(Ports().free()), "--router-port", str(Ports().free()))
    served = ("--model", str(model(folder)), "--servers", "1", "--threads", "1")
    running = RunningUp(folder, *shared, *ports, *served)
    yield running
    if running.process.poll() is None:
        running.end()


def tokens(folder: Path, *arguments: str) -> str:
    command = [*COROLLA, "tokens", *arguments, "--state-folder", str(folder / "state")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def assert_fetched(folder: Path, machine: OtherMachine, whole: Path) -> None:
    """A machine that lacks the model has fetched its files, and none that the model has not."""
    if machine.prefix:
        (fetched,) = (cache(folder) / "models").glob("*/tiny")
        assert {each.name for each in fetched.iterdir()} <= {each.name for each in whole.iterdir()}


def status_there(folder: Path, machine: OtherMachine, up: RunningUp) -> list[str]:
    """The spans that the machine that joined sees by its own certificate."""
    router = re.sub(r".*:", f"{bracketed(machine.first_host)}:", up.addresses["router"])
    (tls_dir,) = (folder / "other-machine" / "corolla" / "joined").iterdir()
    command = [*machine.prefix, *COROLLA, "status", "--json", "--router", router]
    environment = {**os.environ, "COROLLA_TLS_DIR": str(tls_dir)}
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    facts = json.loads(said)
    assert facts["num_sessions"] is None
    assert facts["apart"] == []
    hosts = {each["address"].rpartition(":")[0] for each in facts["servers"]}
    assert {bracketed(machine.first_host), bracketed(machine.host)} <= hosts
    return sorted(f"{each['span'][0]}:{each['span'][1]}" for each in facts["servers"])


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def servers(up: RunningUp, number: int) -> None:
    """Waits until the newest placement has so many ready servers."""

    def has_them(event: dict[str, Any]) -> bool:
        return event["event"] == "placement" and [each["state"] for each in event["servers"]] == ["ready"] * number

    placements = [event for event in up.events if event["event"] == "placement"]
    if not placements or not has_them(placements[-1]):
        up.wait_for(has_them)


def is_refused_behind_a_firewall(folder: Path, machine: OtherMachine, address: str, port: int, token: str) -> bool:
    """Checks that a machine that the first one cannot reach is refused; False: no firewall can be made here."""
    if not machine.drops(port, is_on=True):
        return False
    by_ipv4 = f"{machine.first_host_4}:{address.rpartition(':')[2]}"
    variables = {"XDG_STATE_HOME": str(folder / "refused")}
    refused = Joined(folder, machine, [*COROLLA, "join", by_ipv4, "--port", str(port)], variables, token)
    assert refused.process.wait(PATIENCE_S) == 1
    assert f"the first machine cannot reach this one at port {port}" in refused.errors.read_text()
    assert '"machine"' not in "".join(refused.process.stdout or ())
    assert machine.drops(port, is_on=False)
    return True


def test_machines_join_serve_come_back_and_are_shut_out(
    folder: Path, machines: list[OtherMachine], up: RunningUp
) -> None:
    (machine, third), token, port = machines, tokens(folder, "new"), Ports().free()
    client, address = Client(up.addresses["client"]), up.addresses["join"]
    with pytest.raises(NoChain):
        client.generate(TEXT, max_tokens=8)
    join = [*COROLLA, "join", address, "--port", str(port)]
    num_uses = 14 - is_refused_behind_a_firewall(folder, machine, address, port, token)
    joined = Joined.by_unit(folder, machine, address, token)
    shown = joined.wait_for("machine")
    assert shown["holds"] == "up to 2 blocks"
    assert shown["stack"].startswith("1 block servers; without one: ")
    by_third = [*COROLLA, "join", address, "--threads", "1"]
    also = Joined(folder / "third", third, by_third, {}, token, folder / "first")
    up.wait_for(lambda event: event["event"] == "ready")
    servers(up, 3)
    answer = client.generate(TEXT, max_tokens=8)
    unsplit = Unsplit(model(folder))
    assert list(answer.token_ids) == unsplit.generate(unsplit.encode(TEXT), 8).token_ids
    joined.wait_for("ready")
    spans = [tuple(map(int, each.split(":"))) for each in status_there(folder, machine, up)]
    assert sorted(block for start, end in spans for block in range(start, end)) == list(range(5))
    assert_fetched(folder, machine, model(folder))
    assert_fetched(folder / "third", third, model(folder))
    joined.process.send_signal(signal.SIGINT)
    assert joined.process.wait(PATIENCE_S) == 0, joined.errors.read_text()
    servers(up, 2)
    secret = token.strip().rpartition(".")[2]
    assert secret not in joined.written + joined.errors.read_text()
    for log in [*(folder / "logs").iterdir(), *(folder / "join-logs").iterdir()]:
        assert secret not in log.read_text(), log

    again = Joined(folder, machine, join, {})
    servers(up, 3)
    assert client.generate(TEXT, max_tokens=8).token_ids == answer.token_ids
    listed = tokens(folder, "list")
    assert f"{num_uses} uses left" in listed
    assert " joined " in listed
    assert secret not in listed
    assert f"machines that are out: {16 - num_uses}" in tokens(folder, "revoke", listed.partition(" ")[0], "--machines")
    for each in (again, also):
        assert each.process.wait(PATIENCE_S) == 1
        assert "was revoked" in each.errors.read_text()
    servers(up, 1)
    client.close()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze comes with systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "corolla.service"
    file.write_text(unit().replace("/opt/corolla/bin/corolla", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
