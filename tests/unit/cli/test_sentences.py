"""What goes wrong in a command is one sentence on standard error, without a traceback or notes of libraries.

The tests find commands and options by themselves, so that the rule holds for those that come later, too.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from typer.main import get_command

from corolla.cli.app import app, main
from corolla.cli.interruption import EXIT_INTERRUPTED
from tests.tiers import quick

TIMEOUT_S: Final = 60
HERE: Final = ("--host", "127.0.0.1", "--port", "0")
LONG_RUNNING: Final = {
    # Free ports, which only this machine reaches, and neighbours that are not there.
    "up": ("--port", "0", "--http-port", "0", "--router-port", "0"),
    "demo": (),
    "router": (*HERE, "--redis-url", "redis://127.0.0.1:1"),
    "block-server": (*HERE, "--control-port", "0", "--router", "127.0.0.1:1"),
    "client": (*HERE, "--router", "127.0.0.1:1"),
}

# Runs commands one after the other in one process, which imports torch only once. gRPC writes to the descriptor of
# standard error, so that is what a file takes the place of.
RUN_ALL: Final = """
import json, os, sys, tempfile
from corolla.cli.app import main
outcomes = []
for command in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        status = main(command)
        sys.stderr.flush()
        os.dup2(kept, 2)
        file.seek(0)
        outcomes.append([status, file.read().decode()])
with open(sys.argv[2], "w") as results:
    json.dump(outcomes, results)
"""


def commands() -> Iterator[tuple[list[str], Any]]:
    """Yields each command with its name; a command of a group has the group's name in front."""
    root: Any = get_command(app)
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        yield from ([([name, each], inner[each]) for each in inner] if inner else [([name], command)])


def options_of(command: Any) -> dict[str, Any]:
    return {name: each for each in command.params for name in each.opts if name.startswith("--")}


def what_is_required(command: Any) -> list[str]:
    words: list[str] = []
    for each in command.params:
        if each.required:
            words += [each.opts[0], "x"] if each.param_type_name == "option" else ["x"]
    return words


def assert_one_sentence(said: str) -> None:
    assert said.startswith("corolla: ")
    assert said.endswith("\n")
    assert said.count("\n") == 1


def outcomes_of(cases: list[list[str]], folder: Path) -> list[tuple[int, str]]:
    results = folder / "results"
    environment = {**os.environ, "COROLLA_METRICS_HOST": "127.0.0.1", "XDG_STATE_HOME": str(folder)}
    command = [sys.executable, "-c", RUN_ALL, json.dumps(cases), str(results)]
    subprocess.run(command, env=environment, capture_output=True, check=True, timeout=TIMEOUT_S)
    return [(status, said) for status, said in json.loads(results.read_text(encoding="utf-8"))]


def test_an_option_that_no_command_has(capsys: pytest.CaptureFixture[str]) -> None:
    for name, _ in commands():
        assert main([*name, "--nonsense"]) == 2, name
        said = capsys.readouterr().err
        assert_one_sentence(said)
        assert "--nonsense" in said
        assert said.endswith(f"see corolla {' '.join(name)} --help\n")


def test_help_loses_no_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Markup takes words in brackets for styles, and leaves them out."""
    monkeypatch.setenv("COLUMNS", "400")
    for name, command in (([], get_command(app)), *commands()):
        assert main([*name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert "Usage: corolla" in shown
        for each in command.params:
            text = getattr(each, "help", None) or ""
            assert " ".join(text.split()) in " ".join(shown.split()), (name, each.name)


def test_a_word_in_place_of_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    num_options = 0
    for name, command in commands():
        for option, parameter in options_of(command).items():
            if parameter.type_descriptor.annotation not in (int, float):
                continue
            num_options += 1
            assert main([*name, *what_is_required(command), option, "many"]) == 2, (name, option)
            said = capsys.readouterr().err
            assert_one_sentence(said)
            assert option in said
    assert num_options > 20


def test_a_service_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    num_commands = 0
    for name, command in commands():
        options = options_of(command)
        place = "--server" if "--server" in options else "--router"
        if place not in options or name[0] in LONG_RUNNING or name in (["chat"], ["issuer"], ["adapters", "add"]):
            continue  # these ask only after something else was given: a turn, a folder, files
        num_commands += 1
        assert main([*name, *what_is_required(command), place, "127.0.0.1:1"]) == 1, name
        said = capsys.readouterr().err
        assert_one_sentence(said)
        assert "127.0.0.1:1: nothing listens there; start a stack with `corolla up`" in said
        assert ("--tls" in said) == ("--tls" in options), "a service that speaks TLS looks like none without it"
    assert num_commands >= 5


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    num_options = 0
    for name, command in commands():
        for option, parameter in options_of(command).items():
            if not option.endswith("-file") or name == ["client"]:
                continue  # a client service checks its own files when it starts
            num_options += 1
            assert main([*name, *what_is_required(command), option, "/nowhere/file"]) == 2, (name, option)
            said = capsys.readouterr().err
            assert_one_sentence(said)
            assert "/nowhere/file" in said, parameter.name
    assert num_options >= 3


@pytest.mark.parametrize("command", quick([each for each in LONG_RUNNING if each != "demo"], "router"))
def test_a_busy_port_and_a_model_that_is_not_there(command: str, tmp_path: Path) -> None:
    options = options_of({name[0]: each for name, each in commands()}[command])
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        wrong = [[option, port] for option in options if option.endswith("port")]
        wrong += [["--model", "./nowhere"]] if "--model" in options else []
        # A stack of one machine has no issuer.
        shared = ["--share", "--share-host", "127.0.0.1", "--state-folder", str(tmp_path / "state")]
        more = {"--issuer-port": shared}
        outcomes = outcomes_of(
            [[command, *LONG_RUNNING[command], *more.get(each[0], ()), *each] for each in wrong], tmp_path
        )
    assert len(outcomes) >= 2
    for (option, value), (status, said) in zip(wrong, outcomes, strict=True):
        assert status in (1, 2), option
        assert_one_sentence(said)
        assert value in said
        assert gives_advice(said), said


def gives_advice(said: str) -> bool:
    """Whether the sentence says what to do."""
    return any(f"; {verb} " in said for verb in ("choose", "check"))


@pytest.mark.full
@pytest.mark.parametrize("command", LONG_RUNNING)
def test_ctrl_c_before_a_command_has_done_anything(command: str, tmp_path: Path) -> None:
    environment = {**os.environ, "COROLLA_METRICS_HOST": "127.0.0.1", "XDG_STATE_HOME": str(tmp_path)}
    running = subprocess.Popen(
        [sys.executable, "-m", "corolla", command, *LONG_RUNNING[command]],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(0.6)
    running.send_signal(signal.SIGINT)
    shown, said = running.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in shown + said, shown + said
    if running.returncode == EXIT_INTERRUPTED:
        assert_one_sentence(said)
    else:
        # The router is up by then; services log that they stop.
        assert running.returncode == 0, said
        assert "stopping" in said
