"""The placement that a router pushed last. It stays in use when the router is gone."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from corolla.chain.clock import time_s
from corolla.chain.control import ControlPlane
from corolla.chassis.errors import AdapterDenied, AdapterNotFound, CorollaError
from corolla.chassis.status import from_rpc_error
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.adapter_version import AdapterVersion, still_registered

log = logging.getLogger(__name__)

_RETRY_INTERVAL_S: Final = 0.5
_LOOK_INTERVAL_S: Final = 0.05
SETTLING_S: Final = 5.0
"""How long servers that a store has forgotten may take to register again."""
MOST_DRAINED: Final = 4096
"""After so many servers that drained, the oldest ones are past remembering."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The servers that a router pushed, by id, and whether they have a chain over all blocks."""

    by_id: Mapping[str, pb.PlacedServer]
    is_complete: bool


class PlacementWatch:
    """Follows the router's pushes and remembers the newest snapshot.

    A snapshot that lacks servers for some blocks may come from a store that has just lost its data. So the servers of
    the last complete snapshot count, too, for SETTLING_S, in which servers register again. If one of them is gone, a
    request that tries it loses only an attempt.

    Attributes:
        num_updates: how many snapshots a router has pushed.
        turn: the place among equal servers where this process's sessions begin, from 0 to 1. A router spreads its
            watchers evenly.
        drained: the ids of servers that drained when a router named them last, also if they are gone since.
        on_beginnings: takes the beginnings of texts that a server announces, given its id.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._snapshot: _Snapshot | None = None
        self._complete: _Snapshot | None = None
        self._adapters: Sequence[pb.RegisteredAdapter] = ()
        self._incomplete_since_s = 0.0
        self._next_look_s = 0.0
        self._look: asyncio.Future[Sequence[pb.RegisteredAdapter]] | None = None
        self._published = asyncio.Event()
        self.num_updates = 0
        self.turn = random.random()
        self.drained: dict[str, None] = {}
        self.on_beginnings: Callable[[str, bytes], None] = lambda server_id, announced: None

    @property
    def is_complete(self) -> bool:
        """The newest snapshot has a chain over all blocks."""
        return self._snapshot is not None and self._snapshot.is_complete

    @property
    def by_id(self) -> Mapping[str, pb.PlacedServer]:
        """All servers that are known to be registered, or that may register again after their store lost its data."""
        if self._snapshot is None:
            return {}
        by_id = self._snapshot.by_id
        if self._complete is None or not self.is_settling:
            return by_id
        listed = {each.server.address for each in by_id.values()}
        unlisted = {name: each for name, each in self._complete.by_id.items() if each.server.address not in listed}
        return {**by_id, **unlisted}

    @property
    def servers(self) -> Sequence[pb.PlacedServer]:
        """The servers of `by_id`."""
        return list(self.by_id.values())

    def adapters_for(self, tenant: str) -> list[str]:
        """The names of the adapters that a tenant may use."""
        return [each.version.name for each in self._adapters if _is_for(each, tenant)]

    async def adapter(self, name: str, tenant: str) -> AdapterVersion:
        """The adapter version that is registered under a name.

        A name that is unknown here is looked up at the router, since it may have been registered just now.

        Raises:
            AdapterNotFound: no adapter has this name.
            AdapterDenied: the adapter is registered for other tenants only.
        """
        found = _adapter(self._adapters, name) or _adapter(await self._registered_now(), name)
        if found is None:
            raise AdapterNotFound("the model has no such adapter", name[:256])
        if not _is_for(found, tenant):
            raise AdapterDenied("this adapter is for other tenants")
        return AdapterVersion.from_proto(found.version)

    async def _registered_now(self) -> Sequence[pb.RegisteredAdapter]:
        """Asks a router for the registered adapters; returns none if no router answers.

        The router answers after this call began, so the answer has each adapter that was registered before. Calls that
        begin before the router is asked share one answer.
        """

        async def look() -> Sequence[pb.RegisteredAdapter]:
            now_s = time_s()
            # The pause bounds the router's load when a client asks for many names that do not exist.
            await asyncio.sleep(max(0.0, self._next_look_s - now_s))
            self._next_look_s = time_s() + _LOOK_INTERVAL_S
            with contextlib.suppress(CorollaError):
                return (await self._control.get_placement()).adapters
            return ()

        if self._look is not None and not self._look.done():
            # The answer under way may be older than an adapter that the caller has just registered.
            await asyncio.shield(self._look)
        if self._look is None or self._look.done():
            self._look = asyncio.ensure_future(look())
        return await asyncio.shield(self._look)

    def has_hop(self, hop: common_pb2.Hop) -> bool:
        """`servers` has the hop's server at the hop's address."""
        placed = self.by_id.get(hop.server_id)
        return placed is not None and placed.server.address == hop.address

    async def will_name(self, hop: common_pb2.Hop) -> bool:
        """Like `names`, but asks the router: a server that has just joined may not have been pushed yet."""
        try:
            servers = (await self._control.get_placement()).servers
        except CorollaError:
            return False
        return any((each.server.server_id, each.server.address) == (hop.server_id, hop.address) for each in servers)

    @property
    def is_settling(self) -> bool:
        """The placement became incomplete less than SETTLING_S ago, so that lost servers may register again."""
        if self._snapshot is None or self._snapshot is self._complete:
            return False
        return time_s() < self._incomplete_since_s + SETTLING_S

    async def wait_for_update(self, timeout_s: float) -> None:
        """Returns when a router has pushed the next snapshot, at the latest after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._published.wait()

    async def run(self) -> None:
        """Watches the router's pushes until the task is cancelled."""
        has_logged = False
        while True:
            try:
                request = pb.WatchPlacementRequest(model=self._control.model, takes_changes=True)
                async for placement in self._control.stub.WatchPlacement(request):
                    self.take(placement)
                    has_logged = False
            except grpc.RpcError as failure:
                if not has_logged:
                    log.warning(
                        "the router does not answer; continuing with its last placement",
                        extra={"reason": from_rpc_error(failure).reason},
                    )
                has_logged = True
            await asyncio.sleep(_RETRY_INTERVAL_S)

    def take(self, placement: pb.Placement) -> None:
        """Takes a router's push: a whole placement, or what changed since the last one."""
        was_complete = self._snapshot is self._complete
        if placement.HasField("turn") and 0 <= placement.turn <= 1:
            self.turn = placement.turn
        is_complete = placement.HasField("cheapest_chain")
        if placement.HasField("change"):
            by_id = {} if self._snapshot is None else dict(self._snapshot.by_id)
            _change(by_id, placement)
        else:
            by_id = {each.server.server_id: each for each in placement.servers}
        self._snapshot = _Snapshot(by_id, is_complete)
        for each in placement.servers:
            self._note_state(each)
            if each.load.beginnings:
                self.on_beginnings(each.server.server_id, each.load.beginnings)
        self.num_updates += 1
        if not placement.change.same_adapters:
            self._adapters = still_registered(self._adapters, placement.adapters, placement.removed_adapters)
        if is_complete:
            self._complete = self._snapshot
        elif was_complete:
            self._incomplete_since_s = time_s()
        published, self._published = self._published, asyncio.Event()
        published.set()

    def _note_state(self, placed: pb.PlacedServer) -> None:
        self.drained.pop(placed.server.server_id, None)
        if placed.state == pb.SERVER_STATE_DRAINING:
            self.drained[placed.server.server_id] = None
            if len(self.drained) > MOST_DRAINED:
                del self.drained[next(iter(self.drained))]


def _change(servers: dict[str, pb.PlacedServer], placement: pb.Placement) -> None:
    """Applies what a router says has changed to the servers by id."""
    for server_id in placement.change.gone_server_ids:
        servers.pop(server_id, None)
    for each in placement.servers:
        if each.HasField("span"):
            servers[each.server.server_id] = each
        elif (before := servers.get(each.server.server_id)) is not None:
            servers[each.server.server_id] = pb.PlacedServer(
                server=before.server, span=before.span, state=each.state, load=each.load, suspected=each.suspected,
                doubted=each.doubted,
            )  # fmt: skip


def _adapter(adapters: Sequence[pb.RegisteredAdapter], name: str) -> pb.RegisteredAdapter | None:
    return next((each for each in adapters if each.version.name == name), None)


def _is_for(registered: pb.RegisteredAdapter, tenant: str) -> bool:
    return not registered.tenants or tenant in registered.tenants
