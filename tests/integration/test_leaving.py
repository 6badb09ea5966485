"""How a block server's process ends: the first request drains it, the second one ends it at once."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from corolla.cli.app import main
from corolla.local.ports import Ports
from tests.architecture.sources import ROOT
from tests.integration.gates import held_up
from tests.integration.metrics import sample, until_sample
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

OPTIONS: dict[str, Any] = {"max_tokens": 800, "ignore_eos": True}


@contextmanager
def block_server(swarm: Swarm, model: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """One of the blocks 2:5, in a process of its own."""
    command = [sys.executable, "-m", "tests.patience", "block-server", "--model", str(model), "--blocks", "2:5"]
    command += ["--port", "0", "--control-port", "0", "--host", "127.0.0.1", "--advertised-host", "127.0.0.1"]
    command += ["--router", swarm.router_address, "--threads", "1"]
    variables = {**os.environ, "COROLLA_METRICS_HOST": "127.0.0.1", **environment}
    process = subprocess.Popen(command, cwd=ROOT, env=variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit status."""
    return await asyncio.to_thread(process.wait, 30)


@pytest.mark.full
async def test_a_drain_request_returns_when_the_drain_is_done(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    admin_port = Ports().free()
    async with Swarm(tmp_path, model, ["0:2", "2:5"]) as swarm, swarm.connect() as client:
        await swarm.servers.pop().stop()
        await until_uncovered(swarm)
        with block_server(swarm, model, COROLLA_ADMIN_PORT=str(admin_port)) as process:
            await swarm.until_ready(120)
            answer = asyncio.create_task(client.generate("the thin man", **OPTIONS))
            await until_generating(swarm)
            with held_up(swarm.servers[0]):
                await swarm.add_server("2:5")
            assert await asyncio.to_thread(main, ["drain", f"127.0.0.1:{admin_port}"]) == 0
            assert capsys.readouterr().out == "drained\n"
            assert await ended(process) == 0
            given = await answer
            assert given.usage.recoveries == 1
            assert await sample(swarm.clients[0].metrics_port, "corolla_recomputed_tokens_total") == 0
            assert given.token_ids == (await client.generate("the thin man", **OPTIONS)).token_ids
        assert await asyncio.to_thread(main, ["drain", f"127.0.0.1:{admin_port}"]) == 1


@pytest.mark.full
async def test_an_interrupt_drains_a_block_server_and_a_second_one_ends_it_at_once(tmp_path: Path, model: Path) -> None:
    async with Swarm(tmp_path, model, ["0:2", "2:5"]) as swarm, swarm.connect() as client:
        undisturbed = (await client.generate("the thin man", **OPTIONS)).token_ids
        await swarm.servers.pop().stop()
        await until_uncovered(swarm)
        with block_server(swarm, model) as process:
            await swarm.until_ready(120)
            answer = asyncio.create_task(client.generate("the thin man", **OPTIONS))
            await until_generating(swarm)
            process.send_signal(signal.SIGINT)
            # No other server could serve the answer: this one serves it to its end.
            assert (await answer).token_ids == undisturbed
            assert (await answer).usage.recoveries == 0
            assert await ended(process) == 0
        await until_uncovered(swarm)
        with block_server(swarm, model) as process:
            await swarm.until_ready(120)
            answer = asyncio.create_task(client.generate("the thin man", **OPTIONS))
            await until_generating(swarm)
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.2)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert await ended(process) == -signal.SIGINT
            assert not answer.done()
            await swarm.add_server("2:5")
            assert (await answer).token_ids == undisturbed
            assert (await answer).usage.recoveries >= 1


async def until_generating(swarm: Swarm) -> None:
    before = await sample(swarm.clients[0].metrics_port, "corolla_generation_tokens_total")
    await until_sample(
        swarm.clients[0].metrics_port, "corolla_generation_tokens_total", lambda value: value > before + 5
    )


async def until_uncovered(swarm: Swarm) -> None:
    async def is_uncovered() -> bool:
        async with swarm.connect() as client:
            return not (await client.models())[0].ready

    await until(is_uncovered)
