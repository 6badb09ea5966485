"""`corolla join` refuses what cannot work before it asks for a token, and ends when it can never go on.

`corolla up --share` shows its token on a terminal only.
"""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corolla.chassis.errors import CorollaError, InvalidRequest, StartupError, StoreUnavailable
from corolla.cli.interruption import Interrupted
from corolla.cli.join import JoinOptions, checked_host, run_join, shared_host
from corolla.cli.up import run_up
from corolla.issuer.register_file import RegisterFile
from corolla.local.options import StackOptions
from corolla.local.stack import Report
from corolla.v1 import issuer_pb2 as pb

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
    "given, match",
    [
        ({"address": "[::1]:50054"}, "HOST:PORT.*IPv6"),
        ({"address": "fe80::1:50054"}, "HOST:PORT"),
        ({"address": "nonsense"}, "HOST:PORT"),
        ({"host": "::1"}, "--host.*IPv6"),
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


@pytest.mark.parametrize("host", ["ünï", "", "1.2.3", "1.2.3.4:50", "http://a", "a b", "::1", "-x", "x" * 300])
def test_a_stack_is_shared_by_an_address_of_ipv4_or_a_name(host: str) -> None:
    with pytest.raises(StartupError, match="--share-host"):
        shared_host(host)
    for good in ("192.168.1.10", "first.machine", "node-1"):
        assert checked_host(good, "--share-host") == good


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

        def follow(self, _now_s: float) -> None:
            raise followed.pop()

        def close(self) -> None: ...

    monkeypatch.setattr("corolla.cli.join.Membership", Member)
    seconds = itertools.count(1.0, 3.0)
    clock = SimpleNamespace(monotonic=lambda: next(seconds), time=lambda: 0.0, sleep=lambda _seconds: None)
    monkeypatch.setattr("corolla.cli.join.time", clock)
    with pytest.raises(StartupError, match="another stack"):
        join(state)
    assert followed == []
