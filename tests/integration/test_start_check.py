"""`corolla block-server --check` does what a start does, joins nothing, and says what would fail."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from tests.checkpoints import make_tiny_checkpoint
from tests.integration.swarm import Swarm


async def checked(model: Path | str, *arguments: str, **environment: str) -> tuple[int, dict[str, str]]:
    """The exit status, and the verdicts of all parts in order, a failed one with the reason."""
    ports = {f"COROLLA_{name}": "0" for name in ("PORT", "CONTROL_PORT", "METRICS_PORT")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "corolla", "block-server", "--check", "--model", str(model), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COROLLA_HOST": "127.0.0.1", "COLUMNS": "300", "COROLLA_PRODUCTS": "library", **ports,
             **environment},
    )  # fmt: skip
    text, _ = await process.communicate()
    rows = re.findall(r"^ *(\S+(?: \S+)*?)  +(ok|failed) +[\d.]+ s ?(.*?) *$", text.decode(), re.M)
    assert process.returncode is not None
    return process.returncode, {name: verdict if verdict == "ok" else found for name, verdict, found in rows}


PARTS = [
    "settings", "router", "ports", "device", "model", "kernels", "place", "weights", "keys and values", "step",
    "serving",
]  # fmt: skip


async def test_a_server_that_would_start_joins_nothing(tmp_path: Path, model: Path) -> None:
    async with Swarm(tmp_path, model, ["0:5"]) as swarm:
        status, parts = await checked(model, "--router", swarm.router_address, "--blocks", "1:3")
        assert (status, parts) == (0, dict.fromkeys(PARTS, "ok"))
        assert list(parts) == PARTS
        assert len(await swarm.statuses()) == 1


@pytest.mark.full
async def test_what_would_fail_is_said_and_the_router_is_asked_whatever_else_fails(tmp_path: Path, model: Path) -> None:
    without_router = ("--router", "127.0.0.1:1")
    status, parts = await checked(model, *without_router)
    assert status == 1
    assert "no router answers at COROLLA_ROUTER=127.0.0.1:1" in parts.pop("router")
    assert parts == {name: "ok" for name in PARTS if name != "router"}
    status, parts = await checked(model, *without_router, "--device", "mps:7")
    assert status == 1
    assert list(parts) == PARTS[:4]
    assert "COROLLA_DEVICE=mps:7 cannot be used" in parts["device"]
    status, parts = await checked(tmp_path / "nothing", *without_router)
    assert (status, list(parts)) == (1, PARTS[:5])
    assert "nothing" in parts["model"]
    shard = next(make_tiny_checkpoint("llama", tmp_path / "cut").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-10])
    status, parts = await checked(tmp_path / "cut", *without_router)
    assert status == 1
    assert "cut short" in parts["model"]


@pytest.mark.full
async def test_a_place_of_memory_that_is_too_small_and_bad_settings_are_failures(model: Path) -> None:
    status, parts = await checked(model, "--router", "127.0.0.1:1", "--kv-cache-mib", "1", COROLLA_PAGE_TOKENS="4096")
    assert status == 1
    assert "COROLLA_KV_CACHE_MIB=1 is less than one page" in parts["keys and values"]
    assert list(parts) == PARTS[:9]
    status, parts = await checked(model, COROLLA_DTYPE="float8")
    assert status == 1
    assert list(parts) == ["settings"]
    assert "COROLLA_DTYPE" in parts["settings"]
