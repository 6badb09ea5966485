"""Which adapters a block server has loaded: within its memory, for whom they are, until they are taken out."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from corolla.block_server.adapters import Adapters, LoadedAdapter
from corolla.block_server.metrics import BlockServerMetrics
from corolla.chassis.errors import AdapterDenied, AdapterNotFound, NoAdapterRoom, QueueFull, RouterUnavailable
from corolla.chassis.tasks import TaskGroup
from corolla.models.adapters.file import digest_of
from corolla.models.adapters.products import AdapterStacks
from corolla.models.checkpoint import Checkpoint
from corolla.models.hub import Hub
from corolla.models.span_model import SpanModel, load_span
from corolla.v1 import router_pb2
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.span import Span
from tests.adapters import make_adapter
from tests.checkpoints import make_tiny_checkpoint

NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    checkpoint = make_tiny_checkpoint("llama", root / "model", num_blocks=2)
    return {name: make_adapter(checkpoint, root / name, seed=seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> SpanModel:
    checkpoint = Checkpoint.from_pretrained(str(folders["one"].parent / "model"))
    return load_span(checkpoint, Span(0, 2), dtype=torch.float32)


def version_of(folders: dict[str, Path], name: str) -> AdapterVersion:
    return AdapterVersion(name, digest_of(folders[name]))


class Harness:
    """Adapters, and a router that says what `placement` says."""

    def __init__(self, model: SpanModel, folders: dict[str, Path], *, num_fitting: int = 3) -> None:
        self.in_use: set[LoadedAdapter] = set()
        self.placement = router_pb2.Placement()
        self.is_away = False
        self.num_asked = 0
        self.versions = {name: version_of(folders, name) for name in folders}
        for name, folder in folders.items():
            self.placement.adapters.add(version=self.versions[name].to_message(), source=str(folder))
        # Each takes as much as any other one.
        sizes = sum(each.numel() for each in _tensors(folders["one"])) * 4
        self.adapters = Adapters(
            model, 2, AdapterStacks(), max_bytes=sizes * num_fitting, folder=None, hub=Hub(offline=True),
            registered=self._ask, in_use=lambda: self.in_use, tasks=TaskGroup(),
            between_iterations=lambda command: command(),
            metrics=BlockServerMetrics(CollectorRegistry()),
        )  # fmt: skip

    async def _ask(self) -> Sequence[object]:
        self.num_asked += 1
        if self.is_away:
            raise RouterUnavailable("it is away")
        self.adapters.on_placement(self.placement)
        return ()

    async def load(self, name: str, tenant: str = "acme") -> LoadedAdapter:
        await self.adapters.load(self.versions[name], tenant)
        return self.adapters.take(self.versions[name], tenant)

    @property
    def loaded(self) -> list[str]:
        return [version.name for version in self.adapters.versions]


def _tensors(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return [*load_file(folder / "adapter_model.safetensors").values()]


async def test_who_asks_together_waits_for_one_load(model: SpanModel, folders: dict[str, Path]) -> None:
    harness = Harness(model, folders)
    first, second = await asyncio.gather(harness.load("one"), harness.load("one"))
    assert first is second
    assert harness.loaded == ["one"]


async def test_the_least_recently_used_one_gives_way(model: SpanModel, folders: dict[str, Path]) -> None:
    harness = Harness(model, folders, num_fitting=2)
    await harness.load("one")
    await harness.load("two")
    await harness.load("one")
    await harness.load("three")
    assert harness.loaded == ["one", "three"]
    with pytest.raises(QueueFull):
        harness.adapters.take(harness.versions["two"], "acme")


async def test_what_running_sessions_use_stays(model: SpanModel, folders: dict[str, Path]) -> None:
    harness = Harness(model, folders, num_fitting=1)
    harness.in_use = {await harness.load("one")}
    with pytest.raises(NoAdapterRoom):
        await harness.load("two")
    assert harness.loaded == ["one"]
    harness.in_use = set()
    await harness.load("two")
    assert harness.loaded == ["two"]


async def test_one_that_is_taken_out_is_used_no_more(model: SpanModel, folders: dict[str, Path]) -> None:
    harness = Harness(model, folders)
    used = await harness.load("one")
    used.check()
    removed = harness.placement.adapters.pop(0)
    harness.placement.removed_adapters.append(removed.version)
    harness.adapters.on_placement(harness.placement)
    with pytest.raises(AdapterNotFound):
        used.check()
    with pytest.raises(AdapterNotFound):
        await harness.load("one")


async def test_a_store_that_has_lost_its_memory_ends_nothing(model: SpanModel, folders: dict[str, Path]) -> None:
    harness = Harness(model, folders)
    harness.placement.adapters[0].tenants.append("acme")
    used = await harness.load("one")
    harness.adapters.on_placement(router_pb2.Placement())
    used.check()
    assert await harness.load("one") is used
    with pytest.raises(AdapterDenied):
        await harness.load("one", "beta")


async def test_others_tenants_are_denied(model: SpanModel, folders: dict[str, Path]) -> None:
    harness = Harness(model, folders)
    harness.placement.adapters[0].tenants.append("acme")
    with pytest.raises(AdapterDenied):
        await harness.load("one", "beta")
    assert harness.loaded == []
    await harness.load("one")
    with pytest.raises(AdapterDenied):
        harness.adapters.take(harness.versions["one"], "beta")


async def test_what_is_loaded_needs_no_router(model: SpanModel, folders: dict[str, Path]) -> None:
    harness = Harness(model, folders)
    await harness.load("one")
    harness.is_away = True
    await harness.load("one")
    await harness.load("two")  # it was registered when a router was asked last
    unknown = AdapterVersion("four", "0" * 64)
    with pytest.raises(QueueFull, match="cannot ask"):
        await harness.adapters.load(unknown, "acme")
    harness.is_away = False
    with pytest.raises(AdapterNotFound):
        await harness.adapters.load(unknown, "acme")
