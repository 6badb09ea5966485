import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pydantic import Field

from corolla.block_server.settings import BlockServerSettings
from corolla.chassis.errors import SettingsError, StartupError
from corolla.chassis.lifecycle import EXIT_FAILED, EXIT_STARTUP, ask_to_stop, run_service
from corolla.chassis.settings import PREFIX, REMOVED, ServiceSettings, load
from corolla.client.settings import ClientSettings
from corolla.router.settings import RouterSettings


class OwnSettings(ServiceSettings):
    """The settings of the services below."""

    host: str = "127.0.0.1"
    size: int = Field(1, ge=1, description="Some size.")


class Recorded:
    """Records its calls; its start runs the test's own code."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.asked: list[str] = []

    async def start(self) -> None:
        self.asked.append("start")
        if self.failure is not None:
            raise self.failure
        os.kill(os.getpid(), signal.SIGTERM)

    async def stop(self) -> None:
        self.asked.append("stop")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A service leaves its signal handlers in place, since its process ends; the tests' process continues."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_service_runs_until_a_signal_and_is_stopped() -> None:
    service = Recorded()
    assert run_service(OwnSettings, lambda _: service) == 0
    assert service.asked == ["start", "stop"]


@pytest.mark.parametrize(
    "name, instead",
    [
        ("OFFLINE", "set HF_HUB_OFFLINE=1"),
        ("MERGE_REPLAYED_STEPS", "remove it"),
        ("TUNING_BUDGET_S", "COROLLA_PRODUCTS=library"),
    ],
)
def test_a_variable_that_was_a_setting_once_is_named_with_what_to_do_and_changes_nothing(
    name: str, instead: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"{PREFIX}{name}", "3")
    assert run_service(OwnSettings, lambda _: Recorded()) == 0
    logged = capsys.readouterr().err
    assert f"variable={PREFIX}{name}" in logged
    assert instead in logged


def test_a_removed_setting_names_only_settings_that_exist() -> None:
    services = (BlockServerSettings, ClientSettings, RouterSettings)
    known = {f"{PREFIX}{name.upper()}" for model in services for name in model.model_fields}
    named = {name for advice in REMOVED.values() for name in re.findall(rf"{PREFIX}\w+", advice)}
    assert named <= known


@pytest.mark.parametrize("model", [BlockServerSettings, ClientSettings, RouterSettings])
def test_no_setting_is_said_to_have_gone(model: type[ServiceSettings]) -> None:
    assert not REMOVED.keys() & {f"{PREFIX}{name.upper()}" for name in model.model_fields}


def test_a_stopping_service_tolerates_further_requests_and_a_first_signal() -> None:
    class Asked(Recorded):
        async def start(self) -> None:
            self.asked.append("start")
            ask_to_stop()

        async def stop(self) -> None:
            ask_to_stop()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            self.asked.append("stop")

    service = Asked()
    assert run_service(OwnSettings, lambda _: service) == 0
    assert service.asked == ["start", "stop"]


def test_a_failed_start_is_reported_in_a_sentence_and_frees_its_resources(capsys: pytest.CaptureFixture[str]) -> None:
    service = Recorded(StartupError("the port is taken; choose another"))
    assert run_service(OwnSettings, lambda _: service) == EXIT_STARTUP
    assert service.asked == ["start", "stop"]
    assert capsys.readouterr().err == "corolla: the port is taken; choose another\n"


def test_a_bad_setting_ends_the_start_and_names_key_and_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COROLLA_SIZE", "none")
    service = Recorded()
    assert run_service(OwnSettings, lambda _: service) == EXIT_STARTUP
    assert not service.asked
    assert "COROLLA_SIZE='none'" in capsys.readouterr().err


def test_overrides_win_over_the_environment_and_all_bad_keys_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_SIZE", "3")
    assert load(OwnSettings).size == 3
    assert load(OwnSettings, size=5, host=None).size == 5
    monkeypatch.setenv("COROLLA_GRACE_S", "-1")
    with pytest.raises(SettingsError, match=r"COROLLA_SIZE=0.*") as caught:
        load(OwnSettings, size=0)
    assert "COROLLA_GRACE_S='-1'" in caught.value.message


def test_a_second_signal_ends_the_process_at_once() -> None:
    program = (
        "import asyncio, os, signal\n"
        "from corolla.chassis.lifecycle import run_service\n"
        "from corolla.chassis.settings import ServiceSettings\n"
        "class Slow:\n"
        "    async def start(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "    async def stop(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        await asyncio.sleep(60)\n"
        "run_service(ServiceSettings, lambda _: Slow(), host='127.0.0.1')\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == -signal.SIGTERM


FAILS = """
import asyncio, sys, time
from corolla.chassis import lifecycle
from corolla.chassis.settings import ServiceSettings
class Failing:
    async def start(self): lifecycle.fail(self.say)
    async def say(self):
        print("NOT_SERVING", flush=True)
        {say}
    async def stop(self): print("stopped", flush=True)
print(lifecycle.run_service(ServiceSettings, lambda _: Failing(), host='127.0.0.1'))
"""


@pytest.mark.parametrize("say", ["pass", "await asyncio.sleep(60)", "time.sleep(60)", "raise RuntimeError"])
def test_a_failed_service_is_reported_and_ends_at_once_whatever_hangs(say: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FAILS.format(say=say)], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == EXIT_FAILED
    assert ended.stdout == "NOT_SERVING\n"
