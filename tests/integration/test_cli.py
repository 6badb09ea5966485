"""The `corolla` command with a real stack, as on a terminal."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from corolla import Client
from corolla.chassis.errors import SpanRefused
from corolla.chassis.status import from_rpc_error
from corolla.trust.loopback import tls_dir
from corolla.trust.workload import Role
from corolla.v1 import router_pb2
from corolla.v1.router_pb2_grpc import RouterServiceStub
from corolla.wire.network import Network
from tests.integration.running_up import COROLLA, RunningUp

pytestmark = pytest.mark.model

START_TIMEOUT_S = 150


def corolla(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COROLLA, *arguments], input=text, capture_output=True, text=True, check=False, timeout=START_TIMEOUT_S
    )


def all_gone(pids: dict[str, int], within_s: float = 30.0) -> bool:
    give_up = time.monotonic() + within_s
    while any(is_alive(pid) for pid in pids.values()):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    running = RunningUp(tmp_path_factory.mktemp("up"), "--blocks", "0:12,12:30")
    yield running
    if running.process.poll() is None:
        running.end()


def test_a_completion_is_the_same_by_every_way(up: RunningUp) -> None:
    server = up.addresses["client"]
    asked = ("generate", "The capital of France is", "--max-tokens", "6", "--server", server)
    streamed, whole, facts = corolla(*asked), corolla(*asked, "--no-stream"), corolla(*asked, "--json")
    assert streamed.stdout.strip().startswith("Paris")
    assert streamed.stderr == ""
    assert whole.stdout == streamed.stdout
    assert json.loads(facts.stdout)["completions"][0]["text"] + "\n" == streamed.stdout
    with Client(server) as client:
        assert client.generate("The capital of France is", max_tokens=6).text + "\n" == streamed.stdout


def test_a_seed_repeats_a_sampled_answer(up: RunningUp) -> None:
    asked = ("generate", "Once upon a time", "--max-tokens", "8", "--temperature", "1.5", "--server")
    first, again, other = (corolla(*asked, up.addresses["client"], "--seed", seed).stdout for seed in ("5", "5", "6"))
    assert first == again != other


def test_the_second_turn_of_a_chat_is_cached(up: RunningUp) -> None:
    done = corolla(
        "chat", "--json", "--max-tokens", "12", "--server", up.addresses["client"],
        text="What is the capital of France?\nAnd of Italy?\n",
    )  # fmt: skip
    first, second = [json.loads(line) for line in done.stdout.splitlines()]
    assert "Paris" in first["text"]
    assert "Rome" in second["text"]
    assert first["usage"]["cached_tokens"] == 0
    new_tokens = second["usage"]["prompt_tokens"] - second["usage"]["cached_tokens"]
    assert second["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    assert 0 < new_tokens < first["usage"]["prompt_tokens"]


def test_the_page_is_where_it_says(up: RunningUp) -> None:
    with urllib.request.urlopen(up.addresses["page"], timeout=30) as reply:
        assert "<title>Corolla</title>" in reply.read().decode()


def test_metrics_are_where_it_says(up: RunningUp) -> None:
    metrics = up.addresses["metrics"]
    assert metrics.keys() == {name for name in up.pids if name != "redis"}
    for url in metrics.values():
        with urllib.request.urlopen(url, timeout=30) as reply:
            assert "# TYPE corolla_" in reply.read().decode()


def test_a_refusal_is_one_sentence(up: RunningUp) -> None:
    server = up.addresses["client"]
    for arguments in (
        ["generate", "a", "--temperature", "-1"],
        ["generate", "a", "--top-p", "7"],
        ["generate", "a", "--model", "nobody"],
    ):
        done = corolla(*arguments, "--server", server)
        assert done.returncode == 1
        assert done.stdout.strip() == ""
        assert done.stderr.startswith("corolla: ")
        assert done.stderr.count("\n") == 1


def test_the_status_shows_every_block_covered(up: RunningUp) -> None:
    done = corolla("status", "--router", up.addresses["router"], "--json")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert [server["span"] for server in facts["servers"]] == [[0, 12], [12, 30]]
    assert [server["state"] for server in facts["servers"]] == ["ready", "ready"]
    assert facts["uncovered"] == []
    assert facts["without_standby"] == [[0, 12], [12, 30]]
    table = corolla("status", "--router", up.addresses["router"])
    assert f"{'1' * 30} 30 of 30 blocks" in table.stdout
    assert "none for 0:12, 12:30: no other server has these blocks" in table.stdout


async def test_the_router_takes_block_servers_of_the_stacks_model_only(up: RunningUp) -> None:
    router = up.addresses["router"]
    operator = tls_dir(router, Role.OPERATOR)
    assert operator is not None
    async with Network.from_folder(operator).open_channel(router) as channel:
        placement = await RouterServiceStub(channel).GetPlacement(router_pb2.GetPlacementRequest())
    server = placement.servers[0].server
    server.model, server.server_id, server.address = "another", "0" * 32, "127.0.0.1:1"
    async with Network.from_folder(operator.with_name("server-1")).open_channel(router) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await RouterServiceStub(channel).RegisterServer(router_pb2.RegisterServerRequest(server=server))
    assert from_rpc_error(refused.value).reason == SpanRefused.reason


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows titles")
def test_processes_show_role_span_and_port(up: RunningUp) -> None:
    shown = {name: " ".join(psutil.Process(pid).cmdline()).strip() for name, pid in up.pids.items()}
    client, router = (up.addresses[name].rpartition(":")[2] for name in ("client", "router"))
    assert shown["client"] == f"corolla client :{client}"
    assert shown["router"] == f"corolla router :{router}"
    assert re.fullmatch(r"corolla block-server 0:12 :\d+", shown["server-1"])
    assert re.search(r"(^|/)redis-server unixsocket:", shown["redis"])


def test_corolla_up_reports_a_dead_server_and_starts_it_again(up: RunningUp) -> None:
    os.kill(up.pids["server-2"], signal.SIGKILL)
    problem = up.wait_for(lambda event: event["event"] == "problem")
    assert problem["source"] == "server-2"
    assert "SIGKILL" in problem["text"]
    up.wait_for(lambda event: event["event"] == "recovered" and event["source"] == "server-2")
    give_up = time.monotonic() + 60
    while (done := corolla("generate", "One", "--max-tokens", "1", "--server", up.addresses["client"])).returncode:
        assert time.monotonic() < give_up, done.stderr


def test_ctrl_c_ends_everything(up: RunningUp) -> None:
    pids = {name: pid for name, pid in up.pids.items() if name != "server-2"}
    os.kill(up.pids["client"], signal.SIGTERM)
    up.wait_for(lambda event: event["event"] == "recovered" and event["source"] == "client")
    assert up.end() == 0
    assert all_gone(pids)
    assert (up.log_folder.parent / "errors").read_text() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
@pytest.mark.full
def test_every_process_ends_with_a_killed_parent(tmp_path: Path) -> None:
    running = RunningUp(tmp_path, "--servers", "1")
    assert set(running.pids) == {"redis", "router", "server-1", "client"}
    assert running.end(signal.SIGKILL) == -signal.SIGKILL
    assert all_gone(running.pids)


@pytest.mark.full
def test_corolla_up_shows_the_log_of_a_server_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COROLLA_PAGE_TOKENS", "a few")
    done = corolla("up", "--port", "0", "--router-port", "0", "--log-folder", str(tmp_path))
    assert done.returncode == 1
    assert "server-" in done.stderr
    assert "COROLLA_PAGE_TOKENS='a few'" in done.stderr


@pytest.mark.full
def test_the_demo_streams_an_answer_and_a_chat(tmp_path: Path) -> None:
    started = time.monotonic()
    done = corolla("demo", "--log-folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "30 of 30 blocks" in done.stdout
    assert "Paris" in done.stdout
    assert "prompt tokens cached" in done.stdout
    assert "tokens/s" in done.stdout
    assert time.monotonic() - started < 90
