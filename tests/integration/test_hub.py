"""A chain with a model from the hub: each process fetches only its own files, and moves without a gap."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from corolla.block_server.process import BlockServerProcess
from corolla.block_server.settings import BlockServerSettings
from corolla.hf import AutoDistributedModelForCausalLM
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import edge_tensors
from corolla.router.intervals import RouterIntervals
from corolla.v1 import router_pb2
from tests.checkpoints import make_tiny_checkpoint
from tests.hub_server import REPOSITORY, HubServer
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.reference import Unsplit
from tests.tiers import quick

SERVICES = Path(__file__).parents[2] / "services"
PROMPT = "the thin man"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    folder = make_tiny_checkpoint("llama", tmp_path / "served", num_blocks=8)
    with HubServer(folder) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


def shards(checkpoint: Checkpoint, start: int, end: int) -> set[str]:
    """Those with the span's blocks and with what lies at its ends."""
    prefixes = tuple(f"model.layers.{block}." for block in range(start, end))
    names = {name for name in checkpoint.weight_index if name.startswith(prefixes)}
    names |= set(edge_tensors(checkpoint, has_embedding=start == 0, has_head=end == checkpoint.num_blocks).values())
    return {checkpoint.weight_index[name].name for name in names}


async def test_each_server_of_a_chain_fetches_its_own_files(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cache(name: str) -> Path:
        """Gives the following starts a cache of their own, as each pod has."""
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / name))
        return tmp_path / name

    local = Checkpoint.from_pretrained(str(hub.folder))
    async with Swarm(tmp_path, Path(REPOSITORY), [], num_clients=0) as swarm:
        held: dict[str, set[str]] = {}
        for number in range(2):
            folder = cache(f"server-{number}")
            await swarm.add_server("auto", capacity_blocks=4)
            held[f"server-{number}"] = {path.name for path in folder.rglob("*.safetensors")}
        spans = sorted((each.span.start, each.span.end) for each in (await swarm.placement(REPOSITORY)).servers)
        assert spans == [(0, 4), (4, 8)]
        assert sorted(held.values(), key=sorted) == sorted((shards(local, *span) for span in spans), key=sorted)
        folder = cache("client")
        await swarm.add_client()
        assert not list(folder.rglob("*.safetensors")), "a client service needs the tokenizer only"
        await swarm.until_ready()
        async with swarm.connect() as client:
            answer = await client.generate(PROMPT, max_tokens=24, ignore_eos=True)
        unsplit = Unsplit(hub.folder)
        prompt_ids = unsplit.tokenizer(PROMPT)["input_ids"]
        expected = unsplit.generate(prompt_ids, 24, ignore_eos=True).token_ids
        assert list(answer.token_ids) == expected

        folder = cache("library")
        library: Any = AutoDistributedModelForCausalLM
        model = await asyncio.to_thread(library.from_pretrained, REPOSITORY, router=swarm.router_address)
        ends = {local.weight_index[name].name for name in edge_tensors(local)}
        assert {path.name for path in folder.rglob("*.safetensors")} == ends
        output = await asyncio.to_thread(
            model.generate, torch.tensor([prompt_ids]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        assert output[0, len(prompt_ids) :].tolist() == expected[:8]
        await swarm.until_empty()


@pytest.mark.parametrize("is_withdrawn", quick([False, True], False), ids=["obeyed", "withdrawn"])
async def test_a_server_that_is_to_move_serves_until_it_has_fetched(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, is_withdrawn: bool
) -> None:
    may_send, was_asked = threading.Event(), threading.Event()
    may_send.set()

    def send(name: str, content: bytes) -> bytes:
        if name.endswith(".safetensors") and not may_send.is_set():
            was_asked.set()
            assert may_send.wait(60)
        return content

    hub.damage = send
    async with Swarm(
        tmp_path,
        Path(REPOSITORY),
        ["0:4", "4:8"],
        num_clients=0,
        router={"rebalance_min_gain": 10.0},
        intervals=RouterIntervals(settle_s=0.1),
    ) as swarm:
        given: dict[str, Any] = {
            "host": "127.0.0.1", "advertised_host": "127.0.0.1", "port": 0, "control_port": 0,
            "metrics_host": "127.0.0.1", "metrics_port": 0, "router": swarm.router_address,
            "model": REPOSITORY, "capacity_blocks": 4, "threads": 1, "grace_s": 0.5,
        }  # fmt: skip
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "mover"))
        process = BlockServerProcess(BlockServerSettings(**given))
        await process.start()

        async def spans() -> dict[str, tuple[int, int]]:
            """The ready servers, by address."""
            servers = (await swarm.placement(REPOSITORY)).servers
            ready = [each for each in servers if each.state == router_pb2.SERVER_STATE_READY]
            return {each.server.address: (each.span.start, each.span.end) for each in ready}

        first = process.incarnation
        assert first is not None
        address = first.address

        async def is_ready() -> bool:
            return address in await spans()

        await until(is_ready)
        before = (await spans())[address]
        other = {(0, 4): (4, 8), (4, 8): (0, 4)}[before]
        may_send.clear()
        leaver = swarm.servers.pop(1 if before == (0, 4) else 0)
        await leaver.stop()
        await until(lambda: asyncio.to_thread(was_asked.wait, 1))
        await asyncio.sleep(0.5)
        assert (await spans())[address] == before, "it serves while it fetches"
        if is_withdrawn:
            monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
            await swarm.add_server(f"{other[0]}:{other[1]}")
        may_send.set()

        async def has_moved() -> bool:
            return (await spans()).get(address) == other

        if is_withdrawn:
            await asyncio.sleep(2)
            assert (await spans())[address] == before
            assert process.incarnation is first
        else:
            await until(has_moved)
        await process.stop()


@pytest.mark.parametrize(
    "environment, status, sentence",
    [
        ({}, 401, "The hub refuses access to 'tests/tiny' (status 401); give an access token"),
        pytest.param(
            {"COROLLA_HUB_PATIENCE_S": "0"},
            503,
            "the hub cannot be reached or its answers break off; check the network",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"HF_HUB_OFFLINE": "1"},
            0,
            "and offline mode is on; fetch it where there is a network",
            marks=pytest.mark.full,
        ),
    ],
    ids=["refused", "away", "offline"],
)
def test_a_server_without_a_model_reports_it_and_ends(
    tmp_path: Path, hub: HubServer, environment: dict[str, str], status: int, sentence: str
) -> None:
    hub.status = status
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "COROLLA_"))}
    given = {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_verysecret", "PYTHONPATH": str(SERVICES),
        "COROLLA_MODEL": REPOSITORY, "COROLLA_LOG_LEVEL": "DEBUG",
        # The usual ports may be those of somebody's connection just now.
        "COROLLA_HOST": "127.0.0.1", "COROLLA_PORT": "0", "COROLLA_CONTROL_PORT": "0", "COROLLA_METRICS_PORT": "0",
        **environment,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "corolla.block_server"], env={**inherited, **given}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (last,) = [line for line in done.stderr.splitlines() if line.startswith("corolla: ")]
    assert sentence in last
    assert "Traceback" not in done.stderr
    assert "hf_verysecret" not in done.stdout + done.stderr
    assert hub.num_requests == (0 if "HF_HUB_OFFLINE" in environment else 1)
