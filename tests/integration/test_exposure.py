"""Services as processes: one that would let everybody in ends with a sentence, unless somebody has said that it may."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from corolla.chassis.lifecycle import EXIT_STARTUP
from tests.tiers import quick


def start(service: str, *options: str, **variables: str | Path) -> "subprocess.Popen[str]":
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COROLLA_")}
    usual = {"port": "0", "metrics_port": "0", "metrics_host": "127.0.0.1"}
    environment |= {f"COROLLA_{key.upper()}": str(value) for key, value in {**usual, **variables}.items()}
    command = [sys.executable, "-m", "corolla", service, *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def refused(service: str, **variables: str | Path) -> str:
    """The one sentence that a service ends with."""
    process = start(service, **variables)
    _, said = process.communicate(timeout=60)
    assert process.returncode == EXIT_STARTUP
    (sentence,) = said.splitlines()
    return sentence


@pytest.mark.parametrize("service", quick(["router", "block-server", "client"], "router"))
def test_a_service_that_nothing_guards_ends_with_a_sentence(service: str) -> None:
    sentence = refused(service)
    assert sentence.startswith("corolla: other machines can reach COROLLA_HOST=0.0.0.0 without authentication; set ")


@pytest.mark.parametrize("host", quick(["0.0.0.0", "::"], "::"))
def test_a_stack_that_would_be_exposed_ends_with_the_sentence_before_it_starts(tmp_path: Path, host: str) -> None:
    logs = tmp_path / "logs"
    process = start("up", "--host", host, "--log-folder", str(logs))
    said, complained = process.communicate(timeout=60)
    assert process.returncode == EXIT_STARTUP
    assert said == ""
    (sentence,) = complained.splitlines()
    assert sentence.startswith(f"corolla: other machines can reach COROLLA_HOST={host} without authentication; set ")
    assert not logs.exists()


def test_an_exposed_service_says_so_in_its_log(redis_url: str) -> None:
    process = start("router", insecure="true", redis_url=redis_url, kubernetes="off")
    try:
        lines = iter(process.stderr or ())
        line = next(each for each in lines if "COROLLA_INSECURE" in each)
        assert "WARNING" in line
        assert "host=0.0.0.0 missing=COROLLA_TLS_DIR" in line
        assert any("router serves" in each for each in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "case",
    quick(
        itertools.product(("api_keys_file", "quotas_file", "oidc_jwks"), (b"nonsense", b"\xff", b"", None)),
        ("api_keys_file", b"nonsense"),
    ),
)
def test_a_broken_file_ends_a_client_service_with_a_sentence(tmp_path: Path, case: tuple[str, bytes | None]) -> None:
    variable, content = case
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    given: dict[str, str | Path] = {"host": "127.0.0.1", variable: file}
    if variable == "oidc_jwks":
        given |= {"oidc_issuer": "https://a", "oidc_audience": "b"}
    assert refused("client", **given).startswith(f"corolla: COROLLA_{variable.upper()}={file}: ")
