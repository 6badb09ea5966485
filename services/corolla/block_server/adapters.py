"""Loads adapters when sessions ask for them, and unloads unused ones when other adapters need the memory.

The newest placement from a router says which adapters are registered. Loaded adapters stay usable while no router
answers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from corolla.chassis.errors import (
    AdapterDenied,
    AdapterError,
    AdapterNotFound,
    AdapterNotLoaded,
    CheckpointError,
    CorollaError,
    HubUnavailable,
    NoAdapterRoom,
    QueueFull,
)
from corolla.chassis.handlers import call_path
from corolla.chassis.tasks import TaskGroup
from corolla.models.adapters.file import adapter_folder
from corolla.models.adapters.loading import adapter_bytes, load_adapter
from corolla.models.adapters.products import AdapterStacks, SpanAdapter
from corolla.models.hub import Hub
from corolla.models.span_model import SpanModel
from corolla.v1 import router_pb2
from corolla.wire.adapter_version import AdapterVersion, still_registered

log = logging.getLogger(__name__)

_REMEMBERED_S: Final = 5.0
"""How long a failed load is remembered, so that a caller that stopped waiting gets the error when it asks again."""
_MOST_FETCHES: Final = 2
"""The most downloads from the hub at a time; each occupies a thread."""


@dataclass(eq=False, slots=True)
class LoadedAdapter:
    """An adapter that is loaded, and that sessions can use.

    Attributes:
        awaited_until_s: the event loop's time before which the adapter is not unloaded for other adapters, because the
            session that asked for it opens soon.
        is_removed: whether the adapter is no longer registered; sessions that use it then fail at their next step.
    """

    version: AdapterVersion
    products: SpanAdapter
    awaited_until_s: float
    is_removed: bool = field(default=False)

    def check(self) -> None:
        """Raises AdapterNotFound if the adapter is no longer registered."""
        if self.is_removed:
            raise AdapterNotFound("the adapter was removed", self.version.name)


@dataclass(eq=False, repr=False)
class Adapters:
    """The adapters of one span. All methods run on the event loop; threads read the files, one adapter at a time.

    Args:
        num_blocks: the number of blocks of the whole model.
        stacks: the tensors that hold weights of several adapters.
        max_bytes: the most bytes that all loaded adapters may take together; 0 loads none.
        folder: the folder below which adapters must lie that do not come from the hub; None allows any folder.
        ask_router: asks a router for the placement, which then comes to `on_placement`. May raise CorollaError.
        in_use: returns the adapters of sessions that may take steps.
        between_iterations: runs a change of the stacks while the compute thread does not read them.
        patience_s: how long a session waits for its adapter. It is shorter than the time that clients, and servers
            that leave, wait for an answer; they would otherwise treat a server that is still loading as lost.
    """

    model: SpanModel
    num_blocks: int
    stacks: AdapterStacks
    _: KW_ONLY
    max_bytes: int
    folder: Path | None
    hub: Hub
    ask_router: Callable[[], Awaitable[object]]
    in_use: Callable[[], Collection[LoadedAdapter]]
    between_iterations: Callable[[Callable[[], None]], None]
    tasks: TaskGroup
    patience_s: float = 2.0
    _registered: dict[AdapterVersion, router_pb2.RegisteredAdapter] = field(init=False, default_factory=dict)
    # Least recently used first.
    _loaded: dict[AdapterVersion, LoadedAdapter] = field(init=False, default_factory=dict)
    _loading: dict[AdapterVersion, asyncio.Task[CorollaError | None]] = field(init=False, default_factory=dict)
    # Maps adapters that could not be loaded to their registration, the error, and when the failure is forgotten.
    _failed: dict[AdapterVersion, tuple[router_pb2.RegisteredAdapter, CorollaError, float]] = field(
        init=False, default_factory=dict
    )
    _fetches: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(_MOST_FETCHES))
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    @property
    def nbytes(self) -> int:
        """Bytes of all loaded adapters together."""
        return sum(each.products.nbytes for each in self._loaded.values())

    @property
    def versions(self) -> tuple[AdapterVersion, ...]:
        """The versions of all loaded adapters, least recently used first."""
        return tuple(self._loaded)

    def take(self, version: AdapterVersion, tenant: str) -> LoadedAdapter:
        """Returns an adapter to a session that opens now. Must run while nothing is computed.

        Raises:
            AdapterDenied: the adapter is registered for other tenants only.
            AdapterNotFound: the adapter is no longer registered.
            QueueFull: the adapter is not loaded; other adapters may have needed its memory.
        """
        loaded = self._loaded.get(version)
        if loaded is None:
            raise QueueFull("a block server unloaded the adapter to make room for others, and is loading it again")
        loaded.check()
        self._check_tenant(version, tenant)
        self.model.take_adapters()
        self._loaded[version] = self._loaded.pop(version)
        loaded.awaited_until_s = 0.0
        return loaded

    def has(self, version: AdapterVersion) -> bool:
        return version in self._loaded

    async def load(self, version: AdapterVersion, tenant: str) -> None:
        """Returns when the adapter is loaded. A caller that stops waiting does not stop the loading.

        Raises:
            AdapterNotFound: the adapter is not registered, or its registered files differ.
            AdapterDenied: the adapter is registered for other tenants only.
            AdapterNotLoaded: this server cannot load the adapter.
            NoAdapterRoom: running sessions use the adapters that fill the memory.
            QueueFull: the adapter is still loading, or the hub or the routers do not answer now.
        """
        if version not in self._loaded:
            if version not in self._registered:
                await self._look(version)
            self._check_tenant(version, tenant)
            loading = self._loading.get(version)
            if loading is None:
                self._check_failed(version)
                loading = self.tasks.start(self._load_for(self._registered[version]), "loading of an adapter")
                self._loading[version] = loading
            try:
                async with asyncio.timeout(self.patience_s):
                    failure = await asyncio.shield(loading)
            except TimeoutError:
                raise QueueFull("a block server is still loading the adapter") from None
            if failure is not None:
                raise failure
        self._check_tenant(version, tenant)
        if version in self._loaded:
            self._loaded[version].awaited_until_s = self._awaited_until_s()

    def on_placement(self, placement: router_pb2.Placement) -> None:
        """Notes the registered adapters. Sessions whose adapter was removed or replaced fail at their next step."""
        known = still_registered(self._registered.values(), placement.adapters, placement.removed_adapters)
        self._registered = {_version(each): each for each in known}
        for version in self._loaded.keys() - self._registered.keys():
            self._unload(version, is_removed=True)

    def _awaited_until_s(self) -> float:
        return asyncio.get_running_loop().time() + self.patience_s

    async def _look(self, version: AdapterVersion) -> None:
        try:
            await self.ask_router()  # the answer arrives in `on_placement`
        except CorollaError:
            raise QueueFull("a block server cannot ask the router for the registered adapters now") from None
        if version not in self._registered:
            raise AdapterNotFound("the adapter is not registered", version.name)

    def _check_tenant(self, version: AdapterVersion, tenant: str) -> None:
        registered = self._registered.get(version)
        if registered is None:
            raise AdapterNotFound("the adapter was removed", version.name)
        if registered.tenants and tenant not in registered.tenants:
            raise AdapterDenied("the adapter is registered for other tenants only")

    def _check_failed(self, version: AdapterVersion) -> None:
        """Raises the error with which a recent load of the same registration failed, if one did."""
        now_s = asyncio.get_running_loop().time()
        self._failed = {each: failed for each, failed in self._failed.items() if now_s < failed[2]}
        failed = self._failed.get(version)
        if failed is not None and failed[0] == self._registered.get(version):
            raise failed[1]

    async def _load_for(self, registered: router_pb2.RegisteredAdapter) -> CorollaError | None:
        """Loads an adapter. Returns the error for every caller that waits for it; None: it is loaded."""
        version = _version(registered)
        try:
            await self._load(version, registered)
        except (AdapterNotLoaded, QueueFull) as error:
            self._failed[version] = registered, error, asyncio.get_running_loop().time() + _REMEMBERED_S
            return error
        except CorollaError as error:
            return error
        except Exception as failure:
            log.error("could not load an adapter", extra={"adapter": version.name, "where": call_path(failure)})
            return AdapterNotLoaded("a block server could not load the adapter")
        finally:
            del self._loading[version]
        return None

    async def _load(self, version: AdapterVersion, registered: router_pb2.RegisteredAdapter) -> None:
        began_s = asyncio.get_running_loop().time()
        try:
            folder = await self._fetch(registered)
            async with self._turn:
                num_bytes = await asyncio.to_thread(adapter_bytes, folder, self.model)
                self._make_room(num_bytes)

                def check_bytes(wanted: int) -> None:
                    if wanted != num_bytes:
                        raise AdapterNotLoaded("the adapter's files changed while they were read")

                products = await asyncio.to_thread(
                    load_adapter, folder, self.model, self.num_blocks, digest=version.digest, check_bytes=check_bytes
                )
        except AdapterError as failure:
            log.error("could not load an adapter", extra={"adapter": version.name, "cause": failure.message})
            raise AdapterNotLoaded(f"a block server cannot load the adapter: {failure.message}") from None
        except (CheckpointError, HubUnavailable) as failure:
            # The error's message names folders of this machine, so only operators see it.
            log.error(
                "could not fetch an adapter from the hub", extra={"adapter": version.name, "cause": failure.message}
            )
            if isinstance(failure, HubUnavailable):
                raise QueueFull("a block server cannot fetch the adapter from the hub now") from None
            raise AdapterNotLoaded("a block server cannot fetch the adapter from the hub") from None
        except OSError as failure:
            log.error("could not load an adapter", extra={"adapter": version.name, "where": call_path(failure)})
            raise AdapterNotLoaded("a block server cannot read the adapter's files") from None
        if version not in self._registered:
            raise AdapterNotFound("the adapter was removed", version.name)
        self._loaded[version] = LoadedAdapter(version, products, self._awaited_until_s())
        seconds = asyncio.get_running_loop().time() - began_s
        facts = {"adapter": version.name, "bytes": products.nbytes, "seconds": round(seconds, 3)}
        log.info("adapter loaded", extra=facts)

    async def _fetch(self, registered: router_pb2.RegisteredAdapter) -> Path:
        """Returns the adapter's complete folder. A download from the hub delays only other downloads from the hub."""
        async with self._fetches if registered.revision else contextlib.nullcontext():
            return await asyncio.to_thread(
                adapter_folder, registered.source, registered.revision, self.folder, self.hub
            )

    def _make_room(self, num_bytes: int) -> None:
        """Unloads adapters that no running session uses, least recently used first, until `num_bytes` fit."""
        used, now_s = set(self.in_use()), asyncio.get_running_loop().time()
        idle = [
            version
            for version, loaded in self._loaded.items()
            if loaded not in used and loaded.awaited_until_s <= now_s
        ]
        num_missing = self.nbytes + num_bytes - self.max_bytes
        if num_missing > sum(self._loaded[version].products.nbytes for version in idle):
            raise NoAdapterRoom(
                "a block server has too little memory for the adapter; the operator can raise COROLLA_ADAPTERS_MIB"
            )
        for version in idle:
            if num_missing <= 0:
                return
            num_missing -= self._loaded[version].products.nbytes
            self._unload(version)

    def _unload(self, version: AdapterVersion, *, is_removed: bool = False) -> None:
        loaded = self._loaded.pop(version)
        loaded.is_removed = is_removed
        self.between_iterations(partial(self.stacks.forget, loaded.products))
        log.info("adapter unloaded", extra={"adapter": version.name, "removed": is_removed})


def _version(registered: router_pb2.RegisteredAdapter) -> AdapterVersion:
    return AdapterVersion.from_proto(registered.version)
