"""`corolla join` refuses what cannot work before it asks for a token, and ends when it can never go on.

`corolla up --share` shows its token on a terminal only.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from corolla import __version__
from corolla.chassis.errors import CorollaError, InvalidRequest, StartupError, StoreUnavailable
from corolla.cli.app import main
from corolla.cli.enrolment import TOKEN_FILE_VARIABLE
from corolla.cli.interruption import Interrupted
from corolla.cli.join import (
    GRACE_S,
    JoinOptions,
    check_weights,
    checked_capacity,
    checked_host,
    machine_facts,
    options_of_servers,
    run_join,
    shared_host,
)
from corolla.cli.up import run_up
from corolla.issuer.register_file import RegisterFile
from corolla.local.fork_server import ForkServer
from corolla.local.log_files import LogFile
from corolla.local.model_fetch import ModelFacts, facts_of
from corolla.local.options import StackOptions
from corolla.local.supervisor import Report
from corolla.v1 import common_pb2, router_pb2
from corolla.v1 import issuer_pb2 as pb
from tests.charts.rendering import CHART
from tests.integration.several_machines import container, entry_point

STACK = "192.168.1.10:50054"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("COROLLA_JOIN_TOKEN_FILE", raising=False)
    monkeypatch.setattr("sys.stdin", None)
    return tmp_path


def join(state: Path, address: str = STACK, host: str | None = None) -> int:
    options = JoinOptions(
        address=address, model=None, blocks="auto", capacity_blocks=0, port=0, host=host, device="cpu", num_threads=1,
        log_folder=state / "logs",
    )  # fmt: skip
    return run_join(options, verbose=False, as_json=False)


@pytest.mark.parametrize(
    "given, served, is_shared, model",
    [
        (None, "org/name", True, "fetched"),
        (None, "org/name", False, "org/name"),
        (None, "/no/such/folder", True, "fetched"),
        (None, "/", True, "/"),
        (None, "demo", True, "demo"),
        ("org/name", "org/name", True, "org/name"),
    ],
)
def test_other_machines_give_the_files_that_this_one_lacks(
    state: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, served: str, is_shared: bool, model: str
) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(state / "cache"))
    digest = bytes(range(32))
    options = options_of_servers(
        JoinOptions(
            address=STACK, model=given, blocks="auto", capacity_blocks=0, port=0, host="127.0.0.1", device="cpu",
            num_threads=1, log_folder=state / "logs",
        ),
        pb.EnrolResponse(model=served, manifest=digest if is_shared else b""),
    )  # fmt: skip
    fetched = state / "cache" / "models" / digest.hex()
    assert options.model == (str(fetched) if model == "fetched" else model)
    assert options.environment.get("COROLLA_MANIFEST") == (f"{fetched}.json" if model == "fetched" else None)


@pytest.mark.parametrize(
    "given, match",
    [
        ({"address": "[fe80::1]:50054"}, "HOST:PORT.*other machines cannot use"),
        ({"address": "2001:db8::10:50054"}, "HOST:PORT.*for IPv6"),
        ({"address": "nonsense"}, "HOST:PORT"),
        ({"host": "0.0.0.0"}, "--host.*other machines cannot use"),
        ({"host": "ünï"}, "--host"),
        ({"host": ""}, "--host"),
    ],
)
def test_addresses_that_cannot_work_are_refused_first(state: Path, given: dict[str, Any], match: str) -> None:
    with pytest.raises((StartupError, InvalidRequest), match=match):
        join(state, **given)
    assert list(state.iterdir()) == []


def test_a_closed_standard_input_gives_no_token(state: Path) -> None:
    with pytest.raises(StartupError, match="give the token"):
        join(state)


@pytest.mark.parametrize("host", ["ünï", "", "1.2.3", "1.2.3.4:50", "http://a", "a b", "::", "-x", "x" * 300])
def test_a_stack_is_shared_by_an_address_or_a_name(host: str) -> None:
    with pytest.raises(StartupError, match="--share-host"):
        shared_host(host)
    for good in ("192.168.1.10", "first.machine", "node-1", "2001:db8::10"):
        assert checked_host(good, "--share-host") == good
    assert checked_host("[2001:db8::10]", "--share-host") == "2001:db8::10"


FACTS = ModelFacts(
    name="m", num_blocks=10, model_type="llama", fingerprint="f", fingerprint_parts={"dtype": "float32"},
    block_bytes=1 << 30, edge_bytes=1 << 30, missing_bytes=10 << 30, disk_bytes=2 << 30, disk="/cache",
)  # fmt: skip
"""A machine with a disk for two of ten blocks."""


def options(state: Path) -> StackOptions:
    return StackOptions(log_folder=state, shared_host="192.168.1.11", num_servers=1)


def placement(fingerprint: str = "f", num_blocks: int = 10) -> router_pb2.Placement:
    server = router_pb2.ServerDescription(fingerprint=fingerprint, fingerprint_parts={"dtype": "bfloat16"})
    return router_pb2.Placement(
        model="m", num_model_blocks=num_blocks, servers=[router_pb2.PlacedServer(server=server)],
        uncovered=[common_pb2.BlockSpan(start=4, end=10)],
    )  # fmt: skip


def test_a_machine_holds_what_fits_into_its_memory(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_WEIGHTS_MIB", "3500")
    assert checked_capacity(FACTS, options(state), "auto", 0) == 3
    assert checked_capacity(FACTS, options(state), "auto", 2) == 2
    assert checked_capacity(FACTS, options(state), "4:6", 0) == 2
    assert checked_capacity(FACTS, replace(options(state), device="cuda"), "auto", 0) == 0
    shown = machine_facts(FACTS, options(state), ["192.168.1.11:50052"], 3, placement())
    assert shown["holds"] == "up to 3 blocks"
    assert shown["stack"] == "1 block servers; without one: 4:10"


@pytest.mark.parametrize(
    "weights_mib, blocks, match",
    [
        ("100", "auto", r"one block takes 1\.00 GiB next to keys"),
        ("9999", "0:11", "'0:11' is not a span of this model"),
        ("9999", "all", "'all' is not a span"),
        ("9999", "0:5", r"/cache has 2\.0 GiB free, and the weights of 5 of 10 blocks take 5\.0 GiB"),
    ],
)
def test_too_little_memory_and_disk_are_said_before_weights_are_read(
    state: Path, monkeypatch: pytest.MonkeyPatch, weights_mib: str, blocks: str, match: str
) -> None:
    monkeypatch.setenv("COROLLA_WEIGHTS_MIB", weights_mib)
    with pytest.raises(StartupError, match=match):
        checked_capacity(FACTS, options(state), blocks, 0)


@pytest.mark.parametrize("environment, variable", [({}, "HF_HOME"), ({"COROLLA_MANIFEST": "m.json"}, "COROLLA_CACHE")])
def test_a_full_disk_is_named_by_the_variable_that_moves_it(
    state: Path, environment: dict[str, str], variable: str
) -> None:
    given = replace(options(state), environment=environment)
    with pytest.raises(StartupError, match=variable):
        checked_capacity(replace(FACTS, disk_bytes=0), given, "auto", 0)


def test_what_is_waited_for_while_the_model_is_looked_for_is_said_at_once(state: Path) -> None:
    class Ended:
        def is_gone(self, name: str) -> bool:
            return True

    log, said = LogFile(state / "model.log"), list[str]()
    log.path.write_text('a line\n{"event": "warning", "message": "waiting"}\n{"event": "failed", "message": "no"}\n')
    with pytest.raises(StartupError, match="no"):
        facts_of(cast(ForkServer, Ended()), log, lambda: None, said.append)
    assert said == ["waiting"]


def test_another_model_is_refused_before_weights_are_read() -> None:
    check_weights(FACTS, placement())
    check_weights(FACTS, router_pb2.Placement())
    with pytest.raises(StartupError, match="the stack serves m, and this machine has other"):
        check_weights(replace(FACTS, name="other"), placement())
    with pytest.raises(StartupError, match="of 12 blocks, and that of this machine has 10"):
        check_weights(FACTS, placement(num_blocks=12))
    with pytest.raises(StartupError, match=r"dtype \(bfloat16 there, float32 here\).*same model files"):
        check_weights(FACTS, placement("other"))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_token_is_shown_on_a_terminal_only(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    class Running:
        processes = metrics_urls = ()
        page_url = http_address = client_address = router_address = join_address = STACK

        def __init__(self, options: StackOptions) -> None:
            self.options = options

        def start(self, _report: Report) -> None: ...

        def placement(self) -> None:
            raise Interrupted

        def stop(self) -> None: ...

    monkeypatch.setattr("corolla.cli.up.Stack", Running)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    options = StackOptions(log_folder=state, shared_host="192.168.1.10", state_folder=state / "shared")
    assert run_up(options, verbose=False, as_json=False) == 0
    said = capsys.readouterr().out
    assert ("cj1." in said) == is_terminal
    assert ("tokens new" in said) != is_terminal
    assert len(RegisterFile(state / "shared").register().tokens) == is_terminal


def test_what_may_pass_is_waited_for_and_another_stack_ends_it(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[CorollaError] = [StartupError("another stack"), StoreUnavailable("full"), StoreUnavailable("full")]

    class Member:
        exists, folder = True, state

        def __init__(self, *_: object) -> None: ...

        def enrol(self) -> pb.EnrolResponse:
            return pb.EnrolResponse(role="library", router="192.168.1.10:50050")

        def follow(self) -> None:
            raise followed.pop()

        def close(self) -> None: ...

    monkeypatch.setattr("corolla.cli.join.Membership", Member)
    monkeypatch.setattr("corolla.cli.join.FOLLOW_INTERVAL_S", 0.01)
    with pytest.raises(StartupError, match="another stack"):
        join(state)
    assert followed == []


def test_the_container_of_the_page_is_one_of_the_image_that_joins() -> None:
    """What the line says to Docker is known here by name alone, since no container runs."""
    line = container()
    assert set(line.options) == {"--network", "--stop-timeout", "--volume", "--env"}
    assert list(line.options["--network"]) == ["host"]
    assert int(*line.options["--stop-timeout"]) > GRACE_S
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert line.image == f"{values['image']['server']}:{__version__}"
    assert entry_point() == ["python", "-m", "corolla"]
    assert line.mounts[line.variables[TOKEN_FILE_VARIABLE]].startswith("/")
    assert "/state" in line.mounts
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        assert Path(line.variables[name]).is_relative_to("/state")
    assert main([*line.arguments, "--help"]) == 0
