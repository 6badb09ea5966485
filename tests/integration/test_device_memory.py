"""A server takes as many blocks and pages as its device has memory for."""

from pathlib import Path

import pytest
import torch

from corolla.block_server import service, span_loader
from corolla.chassis.errors import StartupError
from corolla.compute.device_memory import DeviceMemory
from corolla.compute.sizes import model_size
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.v1 import router_pb2
from corolla.wire.span import Span
from tests.integration.swarm import Swarm

GIB = 1 << 30


def pretend(monkeypatch: pytest.MonkeyPatch, num_free: int) -> None:
    """The device of this machine, a CPU, is a GPU with so much memory for what this process allocates."""

    def memory_of(device: torch.device) -> DeviceMemory:
        assert device == torch.device("cpu")
        return DeviceMemory(num_free, num_free)

    for module in (service, span_loader):
        monkeypatch.setattr(module, "memory_of", memory_of)


async def test_pages_fill_the_device_and_a_full_device_ends_the_start_with_what_to_change(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 3 * GIB)
    expected = DeviceMemory(3 * GIB, 3 * GIB)
    async with Swarm(tmp_path, model, ["auto"]) as swarm:
        (status,) = await swarm.statuses()
        runner = swarm.servers[0].engine.runner
        assert isinstance(runner, SpanRunner)
        page_bytes = runner.store.page_bytes
        checkpoint = Checkpoint.from_pretrained(str(model))
        plan = model_size(checkpoint, torch.float32, "none", "auto")
        layout = plan.cache_layout(Span(0, checkpoint.num_blocks), runner.store.pool.page_tokens, 512)
        step = plan.step.num_bytes(512, has_head=True)
        assert page_bytes == layout.page_bytes
        assert status.num_pages == layout.num_pages(expected.for_pages(step, 512 << 20))
        (placed,) = (await swarm.placement()).servers
        assert placed.server.weight_blocks * 1000 < expected.for_weights(None, step, 512 << 20)
        assert placed.server.weight_blocks > placed.server.num_model_blocks
        assert placed.state == router_pb2.SERVER_STATE_READY

        pretend(monkeypatch, GIB)
        with pytest.raises(StartupError, match=r"1024 MiB free, .*end other processes"):
            await swarm.add_server("auto")
        with pytest.raises(
            StartupError, match=r"weights and steps leave 0 bytes for keys and values.*COROLLA_KV_CACHE_MIB"
        ):
            await swarm.add_server("0:5")
        # Pages of a fixed size leave too little for a step of the largest size.
        pretend(monkeypatch, 1 << 20)
        with pytest.raises(StartupError, match=r"the largest step takes .* MiB of cpu are free.*COROLLA_MAX_BATCH_TOK"):
            await swarm.add_server("0:5", kv_cache_mib=64)
