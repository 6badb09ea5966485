"""`corolla up --share` and `corolla join`: machines join by one line, are lost and come back, and are shut out."""

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from corolla import Client
from corolla.chassis.errors import NoChain
from corolla.local.ports import Ports
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.other_machine import OtherMachine, other_machines
from tests.integration.running_up import COROLLA, RunningUp
from tests.integration.several_machines import FIRST, container, entry_point, unit
from tests.reference import Unsplit

pytestmark = pytest.mark.full

TEXT: Final = "tell me about rivers"
NUM_TOKENS: Final = 400
"""An answer is still under way when a machine is lost after its first token."""
PATIENCE_S: Final = 240
"""It only ends a hang: a machine may be busy."""


class Joined:
    """`corolla join --json` as a child on another machine, which lacks the folder of the model.

    Args:
        folder: a folder for what the machine keeps.
        first: the folder that it lacks.

    Attributes:
        models: the folder of the models that it has fetched.
    """

    def __init__(
        self, folder: Path, machine: OtherMachine, command: Sequence[str], first: Path, variables: Mapping[str, str],
        token: str = "",
    ) -> None:  # fmt: skip
        folder.mkdir(exist_ok=True)
        self.errors = folder / "errors"
        own = {"XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache"), **variables}
        self.models = Path(own["XDG_CACHE_HOME"]) / "corolla" / "models"
        self.logs = folder / "logs"
        options = ["--json", "--log-folder", str(self.logs)]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*machine.without(first), *command, *options],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **own},
            )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(token)
        self.process.stdin.close()
        self.written = ""

    @classmethod
    def by_unit(cls, folder: Path, machine: OtherMachine, address: str, first: Path, token: str) -> "Joined":
        """Runs the unit's line as systemd does, with a credential."""
        credentials = folder / "credentials"
        credentials.mkdir(parents=True)
        (credentials / "token").write_text(token)
        assert {"Environment=XDG_STATE_HOME=%S", "Environment=XDG_CACHE_HOME=%C"} < set(unit().splitlines())
        variable, path = re.findall(r"^Environment=(COROLLA_JOIN\w+)=(.*)$", unit(), re.MULTILINE)[0]
        (started,) = re.findall(r"^ExecStart=(.*)$", unit(), re.MULTILINE)
        program, *arguments = shlex.split(started)
        assert program.endswith("/bin/corolla")
        variables = {variable: path.replace("%d", str(credentials)), "CREDENTIALS_DIRECTORY": str(credentials)}
        return cls(folder, machine, [*COROLLA, *_with(address, arguments)], first, variables)

    @classmethod
    def by_container(cls, folder: Path, machine: OtherMachine, address: str, first: Path, token: str) -> "Joined":
        """Runs what the page's container runs, with folders in place of what is mounted."""
        line = container()
        mounted = {inside: folder / outside.removeprefix("/") for inside, outside in line.mounts.items()}
        variables = line.variables
        for name, value in variables.items():
            (mount,) = [each for each in mounted if Path(value).is_relative_to(each)]
            variables[name] = str(mounted[mount] / Path(value).relative_to(mount))
        file = Path(variables["COROLLA_JOIN_TOKEN_FILE"])
        file.parent.mkdir(parents=True)
        file.write_text(token)
        python, *module = entry_point()
        assert python == "python"
        return cls(folder, machine, [sys.executable, *module, *_with(address, line.arguments)], first, variables)

    def wait_for(self, kind: str) -> dict[str, Any]:
        for line in self.process.stdout or ():
            self.written += line
            event: dict[str, Any] = json.loads(line)
            if event["event"] == kind:
                return event
        pytest.fail(f"it ended: {self.written} {self.errors.read_text()}")


def _with(address: str, arguments: Sequence[str]) -> list[str]:
    """The arguments of the page with the address of the first machine."""
    assert FIRST in arguments
    return [address if each == FIRST else each for each in arguments]


class Shared:
    """The stack that the first machine shares, each time with the same ports and the same state.

    Attributes:
        first: the folder of the model, which no other machine has.
    """

    def __init__(self, folder: Path, machine: OtherMachine) -> None:
        self.folder, self.first = folder, folder / "first"
        self._options = [
            "--share", "--share-host", machine.first_host, "--state-folder", str(folder / "state"),
            "--issuer-port", str(Ports().free()), "--router-port", str(Ports().free()),
            "--model", str(self.first / "tiny"), "--servers", "1", "--threads", "1",
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.up = RunningUp(self.folder, *self._options)
        self.address = self.up.addresses["join"]
        self.client = Client(self.up.addresses["client"])

    def end(self) -> None:
        self.client.close()
        if self.up.process.poll() is None:
            assert self.up.end() == 0

    def tokens(self, *arguments: str) -> str:
        command = [*COROLLA, "tokens", *arguments, "--state-folder", str(self.folder / "state")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def has_servers(self, number: int) -> None:
        """Waits until the newest placement has so many ready servers; of three, until callers find all blocks."""

        def has_them(event: dict[str, Any]) -> bool:
            return event["event"] == "placement" and [each["state"] for each in event["servers"]] == ["ready"] * number

        placements = [event for event in self.up.events if event["event"] == "placement"]
        if not placements or not has_them(placements[-1]):
            self.up.wait_for(has_them)
        while number == 3 and not self.client.models()[0].ready:
            time.sleep(0.05)

    def answers(self) -> list[int]:
        return list(self.client.generate(TEXT, max_tokens=8).token_ids)

    def goes_on(self, whole: Sequence[int], lose: Callable[[], None]) -> None:
        """Checks that an answer is the undisturbed one although a machine is lost in its midst, and comes back."""
        with self.client.stream(TEXT, max_tokens=NUM_TOKENS, ignore_eos=True) as stream:
            next(stream)
            lose()
            for _ in stream:
                pass
        assert list(stream.token_ids) == whole
        assert stream.usage is not None
        assert stream.usage.recoveries > 0
        self.has_servers(3)

    def shuts_out(self, joined: Joined, num_uses: int, token: str) -> None:
        """Checks the token and who came by it, and that a machine ends when both are revoked."""
        listed = self.tokens("list")
        assert f"{num_uses} uses left" in listed
        assert " joined " in listed
        assert secret_of(token) not in listed
        out = self.tokens("revoke", listed.partition(" ")[0], "--machines")
        assert f"machines that are out: {16 - num_uses}" in out
        assert joined.process.wait(PATIENCE_S) == 1
        assert "was revoked" in joined.errors.read_text()
        self.has_servers(1)


@pytest.fixture
def machines() -> Iterator[list[OtherMachine]]:
    with (Path(tempfile.gettempdir()) / "corolla-tests-share.lock").open("w") as lock:
        # Shared stacks of one machine would race for the usual ports.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with other_machines(2) as machines:
            yield machines


@pytest.fixture
def shared(tmp_path: Path, machines: list[OtherMachine], monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    """The first machine has a model of five blocks, and every machine has room for two of them."""
    changes = {"hidden_size": 256, "intermediate_size": 512}
    make_tiny_checkpoint("llama", tmp_path / "first" / "tiny", config_changes=changes)
    monkeypatch.setenv("COROLLA_WEIGHTS_MIB", "5")
    # A lost machine comes back in seconds, but this one may be busy.
    monkeypatch.setenv("COROLLA_RECOVERY_PATIENCE_S", str(PATIENCE_S))
    monkeypatch.delenv("COROLLA_CACHE", raising=False)
    stack = Shared(tmp_path, machines[0])
    yield stack
    stack.end()


def secret_of(token: str) -> str:
    return token.strip().rpartition(".")[2]


def assert_fetched(joined: Joined, whole: Path) -> None:
    """A machine that lacks the model has fetched its files, and none that the model has not."""
    (fetched,) = joined.models.glob("*/tiny")
    assert {each.name for each in fetched.iterdir()} <= {each.name for each in whole.iterdir()}


def blocks_there(joined: Joined, machine: OtherMachine, up: RunningUp) -> list[int]:
    """The blocks that servers hold, as the machine that joined sees them by its own certificate."""
    router = re.sub(r".*:", f"[{machine.first_host}]:", up.addresses["router"])
    (tls_dir,) = (joined.errors.parent / "state" / "corolla" / "joined").iterdir()
    command = [*machine.prefix, *COROLLA, "status", "--json", "--router", router]
    environment = {**os.environ, "COROLLA_TLS_DIR": str(tls_dir)}
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    facts = json.loads(said)
    assert facts["num_sessions"] is None
    assert facts["apart"] == []
    hosts = {each["address"].rpartition(":")[0] for each in facts["servers"]}
    assert {f"[{machine.first_host}]", f"[{machine.host}]"} <= hosts
    return sorted(block for each in facts["servers"] for block in range(*each["span"]))


def is_refused_behind_a_firewall(shared: Shared, machine: OtherMachine, token: str) -> bool:
    """Checks that a machine that the first one cannot reach is refused; False: there is no firewall here."""
    port = Ports().free()
    if not machine.drops(port, is_on=True):
        return False
    by_ipv4 = f"{machine.first_host_4}:{shared.address.rpartition(':')[2]}"
    command = [*COROLLA, "join", by_ipv4, "--port", str(port)]
    refused = Joined(shared.folder / "refused", machine, command, shared.first, {}, token)
    assert refused.process.wait(PATIENCE_S) == 1
    assert f"the first machine cannot reach this one at port {port}" in refused.errors.read_text()
    assert '"machine"' not in "".join(refused.process.stdout or ())
    assert machine.drops(port, is_on=False)
    return True


@pytest.mark.timeout(600)
def test_machines_join_serve_are_lost_come_back_and_are_shut_out(
    shared: Shared, machines: list[OtherMachine]
) -> None:  # fmt: skip
    (machine, third), token = machines, shared.tokens("new")
    with pytest.raises(NoChain):
        shared.answers()
    num_uses = 14 - is_refused_behind_a_firewall(shared, machine, token)
    joined = Joined.by_unit(shared.folder / "second", machine, shared.address, shared.first, token)
    shown = joined.wait_for("machine")
    assert shown["holds"] == "up to 2 blocks"
    assert shown["stack"].startswith("1 block servers; without one: ")
    also = Joined.by_container(shared.folder / "third", third, shared.address, shared.first, token)
    shared.has_servers(3)
    unsplit = Unsplit(shared.first / "tiny")
    answered = shared.answers()
    assert answered == unsplit.generate(unsplit.encode(TEXT), 8).token_ids
    joined.wait_for("ready")
    assert blocks_there(joined, machine, shared.up) == list(range(5))
    assert_fetched(joined, shared.first / "tiny")
    assert_fetched(also, shared.first / "tiny")

    def lose_a_machine() -> None:
        machine.die()
        joined.process.wait(PATIENCE_S)
        shared.has_servers(2)
        # It has a certificate, so people and systemd start it again without a token.
        again.append(Joined(shared.folder / "second", machine, [*COROLLA, "join", shared.address], shared.first, {}))

    def lose_a_link() -> None:
        third.cut()
        shared.has_servers(2)
        third.reconnect()

    again: list[Joined] = []
    whole = unsplit.generate(unsplit.encode(TEXT), NUM_TOKENS, ignore_eos=True).token_ids
    shared.goes_on(whole, lose_a_machine)
    shared.goes_on(whole, lose_a_link)
    logs = [each for folder in (shared.folder / "logs", joined.logs, also.logs) for each in folder.iterdir()]
    said = joined.written + "".join(each.read_text() for each in [*logs, joined.errors, also.errors])
    assert secret_of(token) not in said

    shared.end()
    shared.start()
    again[0].wait_for("recovered")
    shared.has_servers(3)
    assert shared.answers() == answered

    again[0].process.send_signal(signal.SIGINT)
    assert again[0].process.wait(PATIENCE_S) == 0, again[0].errors.read_text()
    shared.has_servers(2)
    shared.shuts_out(also, num_uses, token)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze comes with systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "corolla.service"
    file.write_text(unit().replace("/opt/corolla/bin/corolla", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
