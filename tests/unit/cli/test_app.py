"""The command's manners: help at once, wrong calls and failures in one sentence, exit statuses."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from corolla.cli.app import main
from tests.generation_server import GenerationServer


def test_help_loads_nothing_slow() -> None:
    program = (
        "import sys; from corolla.cli.app import main; main(['--help']); "
        "slow = ('grpc', 'pydantic', 'redis', 'torch', 'transformers'); "
        "sys.exit(str([name for name in slow if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]"


def test_the_module_is_the_command_and_says_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "corolla", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"corolla 0\.\d+\.\d+( \([0-9a-f]{12,}(-dirty)?\))?\n", done.stdout)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nonsense"], "no such command"),
        (["generate"], "missing argument"),
        (["generate", "hi", "--max-tokns", "3"], "--max-tokens"),
        (["generate", "hi", "--top-k", "x"], "--top-k"),
        (["up", "--servers", "0"], "--servers"),
        (["up", "--servers", "3", "--blocks", "0:10,10:30"], "contradicts"),
        (["join", "127.0.0.1:1", "--blocks", "0:4", "--spare-mib", "64"], "no use"),
        (["up", "--dtype", "float7"], "float7"),
    ],
)
def test_a_wrong_call_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("corolla: ")
    assert sentence in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, advice",
    [
        (["generate", "hi", "--server", "127.0.0.1:1"], "corolla up"),
        (["generate", "hi", "--server", "nonsense"], "'nonsense' is no address; write HOST:PORT"),
        (["generate", "hi", "--server", "http://127.0.0.1:8080"], "'http://127.0.0.1:8080' is no address"),
        (["generate", "hi", "--server", "127.0.0.1:99999"], "'127.0.0.1:99999' is no address"),
        (["generate", "hi", "--server", ""], "'' is no address"),
        (["generate", "hi", "--server", "no.such.invalid:50051"], "no machine has the name no.such.invalid"),
        (["status", "--router", "127.0.0.1:1"], "no router answers at 127.0.0.1:1"),
        (["status", "--router", "nonsense"], "'nonsense' is no address"),
    ],
)
def test_an_unreachable_service_is_reported_with_what_to_do(
    arguments: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    message = capsys.readouterr().err
    assert advice in message
    assert message.count("\n") == 1


def test_another_service_is_not_mistaken_for_a_router(
    server: GenerationServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--router", server.address]) == 1
    assert capsys.readouterr().err.startswith("corolla: ")


def test_a_reader_that_closes_its_pipe_is_no_failure(server: GenerationServer) -> None:
    command = f"{sys.executable} -m corolla generate endless --server {server.address} | head -c 5"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "on an"
    assert done.stderr == ""
    assert server.servicer.cancelled.wait(30)


def test_draining_an_unreachable_server_gives_no_advice_for_clients(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "127.0.0.1:1", "--timeout-s", "5"]) == 1
    assert (
        capsys.readouterr().err
        == "corolla: no block server with COROLLA_ADMIN_PORT answers at 127.0.0.1:1: nothing listens there\n"
    )


def completed(words: str) -> list[str]:
    """What bash offers behind these words."""
    environment = {"_COROLLA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-m", "corolla"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_shell_completes_commands_and_options() -> None:
    assert completed("corolla b") == ["bench", "block-server"]
    assert completed("corolla bench --first") == ["--first-token-slo"]


def test_the_script_for_a_shell_is_printed() -> None:
    # The shell is found among the parents of the process.
    program = f"{shlex.quote(sys.executable)} -m corolla --show-completion; exit $?"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert "complete -o default -F" in done.stdout
