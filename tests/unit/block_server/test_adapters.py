"""Which adapters a block server has loaded: within its memory, for whom they are, until they are taken out."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from corolla.block_server import adapters
from corolla.block_server.adapters import Adapters, LoadedAdapter
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

NAMES = ("one", "two", "three")
NUM_BLOCKS = 3

Folders = Mapping[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("adapters")
    checkpoint = make_tiny_checkpoint("llama", root / "model", num_blocks=NUM_BLOCKS)
    return {name: make_adapter(checkpoint, root / name, seed=seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def span(folders: Folders) -> SpanModel:
    checkpoint = Checkpoint.from_pretrained(str(folders["one"].parent / "model"))
    return load_span(checkpoint, Span(0, 2), dtype=torch.float32)


class Harness:
    """A server's adapters, and a router that has registered all of them for everybody.

    Attributes:
        failure: what asking the router raises.
        in_use: what running sessions use.
        commands: changes that wait for the end of an iteration.
    """

    def __init__(
        self, span: SpanModel, folders: Folders, *, num_fitting: int = len(NAMES), patience_s: float = 10.0
    ) -> None:
        self.failure: errors.CorollaError | None = None
        self.in_use: set[LoadedAdapter] = set()
        self.stacks = AdapterStacks()
        self.commands: list[Callable[[], None]] = []
        self.versions = {name: AdapterVersion(name, digest_of(folder)) for name, folder in folders.items()}
        self._folders = folders
        self.placement = router_pb2.Placement(adapters=[self.registered(name) for name in NAMES])
        self.subject = Adapters(
            # Each adapter takes as much as any other one.
            span, NUM_BLOCKS, self.stacks, max_bytes=num_fitting * adapter_bytes(folders["one"], span), folder=None,
            hub=Hub(offline=True), ask_router=self._ask, in_use=lambda: self.in_use,
            between_iterations=self.commands.append, tasks=TaskGroup(),
            patience_s=patience_s,
        )  # fmt: skip

    def registered(self, name: str, *tenants: str, source: str = "") -> router_pb2.RegisteredAdapter:
        """The registration of an adapter; `source` names the one whose files it has."""
        version, folder = self.versions[name].to_message(), self._folders[source or name]
        return router_pb2.RegisteredAdapter(version=version, source=str(folder), tenants=tenants)

    def push(self, *known: router_pb2.RegisteredAdapter, removed: str = "") -> None:
        """The router says that these are registered; none: its store has lost its memory."""
        gone = [self.versions[removed].to_message()] if removed else []
        self.placement = router_pb2.Placement(adapters=known, removed_adapters=gone)
        self.subject.on_placement(self.placement)

    async def load(self, name: str, tenant: str = "acme") -> None:
        await self.subject.load(self.versions[name], tenant)

    def take(self, name: str, tenant: str = "acme") -> LoadedAdapter:
        return self.subject.take(self.versions[name], tenant)

    async def use(self, name: str) -> LoadedAdapter:
        """What a session does when it opens."""
        await self.load(name)
        return self.take(name)

    async def load_in_the_end(self, name: str) -> None:
        """Asks again and again, as a client does, until the adapter is loaded."""

        async def is_loaded() -> bool:
            with contextlib.suppress(errors.QueueFull, errors.NoAdapterRoom):
                await self.load(name)
            return self.subject.has(self.versions[name])

        await until(is_loaded)

    @property
    def loaded(self) -> list[str]:
        return [version.name for version in self.subject.versions]

    async def _ask(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.subject.on_placement(self.placement)


@pytest.fixture
def harness(span: SpanModel, folders: Folders) -> Harness:
    return Harness(span, folders)


# --- memory -------------------------------------------------------------------------------------------------------


async def test_who_asks_together_waits_for_one_load(harness: Harness) -> None:
    first, second = await asyncio.gather(harness.use("one"), harness.use("one"))
    assert first is second
    assert harness.loaded == ["one"]


async def test_the_least_recently_used_one_gives_way(span: SpanModel, folders: Folders) -> None:
    harness = Harness(span, folders, num_fitting=2)
    for name in ("one", "two", "one", "three"):
        await harness.use(name)
    assert harness.loaded == ["one", "three"]
    with pytest.raises(errors.QueueFull):
        harness.take("two")


async def test_what_running_sessions_use_stays(span: SpanModel, folders: Folders) -> None:
    harness = Harness(span, folders, num_fitting=1)
    harness.in_use = {await harness.use("one")}
    with pytest.raises(errors.NoAdapterRoom):
        await harness.load("two")
    assert harness.loaded == ["one"]
    harness.in_use = set()
    await harness.load("two")
    assert harness.loaded == ["two"]


async def test_what_was_loaded_for_a_session_stays_until_it_opens(span: SpanModel, folders: Folders) -> None:
    harness = Harness(span, folders, num_fitting=1)
    await harness.load("one")
    with pytest.raises(errors.NoAdapterRoom):
        await harness.load("two")
    harness.take("one")
    await harness.load("two")


async def test_what_was_loaded_for_a_session_that_never_opens_gives_way(span: SpanModel, folders: Folders) -> None:
    harness = Harness(span, folders, num_fitting=1, patience_s=1.0)
    await harness.load_in_the_end("one")
    await harness.load_in_the_end("two")


async def test_stacks_change_only_between_iterations(harness: Harness) -> None:
    both = [(await harness.use(name)).products for name in ("one", "two")]
    stack = harness.stacks.stack_of(both)
    harness.push(harness.registered("two"), removed="one")
    assert harness.stacks.stack_of(both) is stack
    (command,) = harness.commands
    command()
    assert harness.stacks.stack_of(both) is not stack


# --- for whom, and for how long -----------------------------------------------------------------------------------


async def test_others_tenants_are_denied(harness: Harness) -> None:
    harness.push(harness.registered("one", "acme"))
    with pytest.raises(errors.AdapterDenied):
        await harness.load("one", "mallory")
    assert harness.loaded == []
    await harness.load("one")
    with pytest.raises(errors.AdapterDenied):
        harness.take("one", "mallory")


async def test_a_store_that_has_lost_its_memory_ends_nothing_and_opens_nothing(harness: Harness) -> None:
    harness.push(harness.registered("one", "acme"))
    used = await harness.use("one")
    harness.push()
    used.check()
    assert await harness.use("one") is used
    with pytest.raises(errors.AdapterDenied):
        harness.take("one", "mallory")
    with pytest.raises(errors.AdapterDenied):
        await harness.load("one", "mallory")


async def test_who_may_use_a_loaded_adapter_is_what_was_said_last(harness: Harness) -> None:
    await harness.load("one", "mallory")
    harness.push(harness.registered("one", "acme"))
    harness.push()
    with pytest.raises(errors.AdapterDenied):
        harness.take("one", "mallory")


async def test_one_that_is_taken_out_is_used_no_more(harness: Harness) -> None:
    used = await harness.use("one")
    used.check()
    harness.push(harness.registered("two"), removed="one")
    with pytest.raises(errors.AdapterNotFound):
        used.check()
    with pytest.raises(errors.AdapterNotFound):
        await harness.load("one")


async def test_one_that_is_registered_with_other_files_replaces_it_even_before_it_is_loaded(harness: Harness) -> None:
    harness.versions["two"] = AdapterVersion("one", harness.versions["two"].digest)
    harness.push(harness.registered("one"))
    harness.push()
    used = await harness.use("one")
    harness.push(harness.registered("two"))
    with pytest.raises(errors.AdapterNotFound):
        used.check()
    with pytest.raises(errors.AdapterNotFound):
        await harness.load("one")
    harness.push(removed="two")
    with pytest.raises(errors.AdapterNotFound):
        await harness.load("two")


# --- what does not answer -----------------------------------------------------------------------------------------


async def test_what_is_loaded_needs_no_router(harness: Harness) -> None:
    await harness.load("one")
    harness.failure = errors.RouterUnavailable("no router answers")
    await harness.load("one")
    await harness.load("two")  # it was registered when a router was asked last
    unknown = AdapterVersion("four", "0" * 64)
    with pytest.raises(errors.QueueFull, match="ask the router for the registered adapters"):
        await harness.subject.load(unknown, "acme")
    harness.failure = None
    with pytest.raises(errors.AdapterNotFound):
        await harness.subject.load(unknown, "acme")


async def test_a_hub_that_does_not_answer_is_no_fault_of_the_adapter(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: object) -> Path:
        raise errors.HubUnavailable("the hub does not answer")

    monkeypatch.setattr(adapters, "adapter_folder", fetch)
    for _ in range(2):
        with pytest.raises(errors.QueueFull, match="hub"):
            await harness.load("one")
        monkeypatch.setattr(adapters, "adapter_folder", None)


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
    span: SpanModel, folders: Folders, opened_hub: threading.Event
) -> None:
    harness = Harness(span, folders, patience_s=0.1)
    from_hub = harness.registered("one")
    from_hub.revision = "main"
    harness.push(from_hub, harness.registered("two"))
    with pytest.raises(errors.QueueFull, match="still loading"):
        await harness.load("one")
    await harness.load_in_the_end("two")
    assert harness.loaded == ["two"]
    opened_hub.set()
    await harness.load_in_the_end("one")


async def test_a_failure_is_remembered_for_a_while_and_until_it_is_registered_otherwise(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.push(harness.registered("one", source="two"))
    with pytest.raises(errors.CorollaError, match="registered"):
        await harness.load("one")
    monkeypatch.setattr(adapters, "adapter_folder", None)
    with pytest.raises(errors.CorollaError, match="registered"):
        await harness.load("one")
    monkeypatch.undo()
    harness.push(harness.registered("one"))
    await harness.load_in_the_end("one")
