"""Which adapters a server has, for whom, and what becomes of those that it cannot have now."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from corolla.block_server import adapters
from corolla.block_server.adapters import Adapters, LoadedAdapter
from corolla.block_server.metrics import BlockServerMetrics
from corolla.chassis import errors
from corolla.chassis.tasks import TaskGroup
from corolla.models.adapters.file import digest_of
from corolla.models.adapters.loading import adapter_bytes
from corolla.models.adapters.products import AdapterStacks
from corolla.models.checkpoint import Checkpoint
from corolla.models.hub import Hub
from corolla.models.span_model import SpanModel, load_span
from corolla.v1 import router_pb2
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.span import Span
from tests.adapters import make_adapter
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.waiting import until

NUM_BLOCKS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("model"), num_blocks=NUM_BLOCKS)


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters."""
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(checkpoint, root / f"{seed}", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def span(checkpoint: Path) -> SpanModel:
    return load_span(Checkpoint.from_pretrained(str(checkpoint)), Span(0, 2), dtype=torch.float32)


def version_of(folder: Path, name: str = "legal") -> AdapterVersion:
    return AdapterVersion(name, digest_of(folder))


def registered(version: AdapterVersion, folder: Path, *tenants: str) -> router_pb2.RegisteredAdapter:
    return router_pb2.RegisteredAdapter(version=version.to_message(), source=str(folder), tenants=tenants)


@dataclass
class Harness:
    """A server's adapters, and what a router says of them."""

    span: SpanModel
    max_bytes: int = 1 << 20
    patience_s: float = 10.0
    placement: router_pb2.Placement = field(default_factory=router_pb2.Placement)
    failure: errors.CorollaError | None = None
    in_use: set[LoadedAdapter] = field(default_factory=set)
    stacks: AdapterStacks = field(default_factory=AdapterStacks)
    commands: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.subject = Adapters(
            self.span, NUM_BLOCKS, self.stacks, max_bytes=self.max_bytes, folder=None, hub=Hub(),
            registered=self.ask, in_use=lambda: self.in_use,
            between_iterations=self.commands.append, tasks=TaskGroup(),
            metrics=BlockServerMetrics(CollectorRegistry()), patience_s=self.patience_s,
        )  # fmt: skip

    async def ask(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.subject.on_placement(self.placement)

    async def load_in_the_end(self, version: AdapterVersion) -> None:
        """Asks again and again, as a client does, until the adapter is loaded."""

        async def is_loaded() -> bool:
            with contextlib.suppress(errors.QueueFull, errors.NoAdapterRoom):
                await self.subject.load(version, "acme")
            return self.subject.has(version)

        await until(is_loaded)

    def push(self, *known: router_pb2.RegisteredAdapter, removed: AdapterVersion | None = None) -> None:
        """A router says that these are registered."""
        gone = [] if removed is None else [removed.to_message()]
        self.placement = router_pb2.Placement(adapters=known, removed_adapters=gone)
        self.subject.on_placement(self.placement)


@pytest.fixture
def harness(span: SpanModel) -> Harness:
    return Harness(span)


async def test_a_loaded_adapter_stays_private_when_the_store_has_lost_its_registration(
    harness: Harness, folders: list[Path]
) -> None:
    version = version_of(folders[0])
    harness.push(registered(version, folders[0], "acme"))
    await harness.subject.load(version, "acme")
    harness.push()
    harness.subject.take(version, "acme")
    with pytest.raises(errors.AdapterDenied):
        harness.subject.take(version, "mallory")
    with pytest.raises(errors.AdapterDenied):
        await harness.subject.load(version, "mallory")


async def test_who_may_use_a_loaded_adapter_is_what_was_said_last(harness: Harness, folders: list[Path]) -> None:
    version = version_of(folders[0])
    harness.push(registered(version, folders[0]))
    await harness.subject.load(version, "mallory")
    harness.push(registered(version, folders[0], "acme"))
    harness.push()
    with pytest.raises(errors.AdapterDenied):
        harness.subject.take(version, "mallory")


@pytest.fixture
def opened_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What comes from the hub comes once this is set."""
    is_open = threading.Event()

    def fetch(source: str, revision: str, *_: object) -> Path:
        if revision:
            assert is_open.wait(30)
        return Path(source)

    monkeypatch.setattr(adapters, "adapter_folder", fetch)
    yield is_open
    is_open.set()


async def test_who_waits_too_long_is_sent_away_and_the_loading_goes_on(
    span: SpanModel, folders: list[Path], opened_hub: threading.Event
) -> None:
    harness = Harness(span, patience_s=0.1)
    slow, quick = version_of(folders[0], "slow"), version_of(folders[1], "quick")
    from_hub = registered(slow, folders[0])
    from_hub.revision = "main"
    harness.push(from_hub, registered(quick, folders[1]))
    with pytest.raises(errors.QueueFull, match="still loading"):
        await harness.subject.load(slow, "acme")
    await harness.load_in_the_end(quick)
    assert not harness.subject.has(slow)
    opened_hub.set()
    await harness.load_in_the_end(slow)


async def test_a_failure_is_remembered_for_a_while_and_until_it_is_registered_otherwise(
    harness: Harness, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = version_of(folders[0])
    harness.push(registered(version, folders[1]))
    with pytest.raises(errors.CorollaError, match="registered"):
        await harness.subject.load(version, "acme")
    monkeypatch.setattr(adapters, "adapter_folder", None)
    with pytest.raises(errors.CorollaError, match="registered"):
        await harness.subject.load(version, "acme")
    monkeypatch.undo()
    harness.push(registered(version, folders[0]))
    await harness.load_in_the_end(version)


async def test_a_lost_memory_of_the_store_takes_no_adapter_out(harness: Harness, folders: list[Path]) -> None:
    old, new = version_of(folders[0]), version_of(folders[1])
    harness.push(registered(old, folders[0]))
    harness.push()
    await harness.subject.load(old, "acme")
    loaded = harness.subject.take(old, "acme")
    harness.push(registered(new, folders[1]))
    with pytest.raises(errors.AdapterNotFound):
        loaded.check()
    with pytest.raises(errors.AdapterNotFound):
        await harness.subject.load(old, "acme")
    harness.push(removed=new)
    with pytest.raises(errors.AdapterNotFound):
        await harness.subject.load(new, "acme")


async def test_stacks_change_only_between_iterations(harness: Harness, folders: list[Path]) -> None:
    versions = [version_of(folder, f"adapter{number}") for number, folder in enumerate(folders)]
    known = [registered(version, folder) for version, folder in zip(versions, folders, strict=True)]
    harness.push(*known)
    for version in versions:
        await harness.subject.load(version, "acme")
    both = [harness.subject.take(version, "acme").products for version in versions]
    stack = harness.stacks.of(both)
    harness.push(known[1], removed=versions[0])
    assert harness.stacks.of(both) is stack
    (command,) = harness.commands
    command()
    assert harness.stacks.of(both) is not stack


async def test_what_was_loaded_for_a_session_stays_until_it_opens(span: SpanModel, folders: list[Path]) -> None:
    versions = [version_of(folder, f"adapter{number}") for number, folder in enumerate(folders)]
    known = [registered(version, folder) for version, folder in zip(versions, folders, strict=True)]
    harness = Harness(span, max_bytes=adapter_bytes(folders[0], span))
    harness.push(*known)
    await harness.subject.load(versions[0], "acme")
    with pytest.raises(errors.NoAdapterRoom):
        await harness.subject.load(versions[1], "acme")
    harness.subject.take(versions[0], "acme")
    await harness.subject.load(versions[1], "acme")
    with pytest.raises(errors.QueueFull):
        harness.subject.take(versions[0], "acme")


async def test_what_was_loaded_for_a_session_that_never_opens_gives_way(span: SpanModel, folders: list[Path]) -> None:
    versions = [version_of(folder, f"adapter{number}") for number, folder in enumerate(folders)]
    harness = Harness(span, max_bytes=adapter_bytes(folders[0], span), patience_s=1.0)
    harness.push(*(registered(version, folder) for version, folder in zip(versions, folders, strict=True)))
    await harness.load_in_the_end(versions[0])
    await harness.load_in_the_end(versions[1])


async def test_a_router_or_hub_that_does_not_answer_is_no_fault_of_the_adapter(
    harness: Harness, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = version_of(folders[0])
    harness.failure = errors.RouterUnavailable("no router answers")
    with pytest.raises(errors.QueueFull, match="ask the router for the registered adapters"):
        await harness.subject.load(version, "acme")

    def fetch(*_: object) -> Path:
        raise errors.HubUnavailable("the hub does not answer")

    monkeypatch.setattr(adapters, "adapter_folder", fetch)
    harness.push(registered(version, folders[0]))
    for _ in range(2):
        with pytest.raises(errors.QueueFull, match="hub"):
            await harness.subject.load(version, "acme")
        monkeypatch.setattr(adapters, "adapter_folder", None)
