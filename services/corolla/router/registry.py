"""Registers block servers, renews their leases and reads the placement. All state is in the store."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from corolla.chassis.errors import (
    AdapterNotFound,
    AddressNotYours,
    InternalError,
    InvalidRequest,
    LeaseLost,
    LeaseTaken,
    StoreUnavailable,
)
from corolla.planning.spares import Takeover
from corolla.router.intervals import USUAL_INTERVALS
from corolla.router.layout import Layout
from corolla.router.mirror import Mirror, parsed
from corolla.router.rebalancing import Move
from corolla.router.roster import Roster
from corolla.router.settings import ExpectedModel
from corolla.router.store import Store
from corolla.router.validation import check_expected
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span

log = logging.getLogger(__name__)

MOST_ATTEMPTS: Final = 100
_LONGEST_PAUSE_S: Final = 0.01
_UNKNOWN: Final = 0
_TAKEN: Final = 2
_NOT_THEIRS: Final = 3
# The time that a moving server has to hand over, leave and register again, before other servers may move.
_MOVE_TTL_MS: Final = 60_000
_DOUBTED_MS: Final = 600_000
MOST_ADAPTERS: Final = 512
"""The greatest number of a model's adapters; each pushed placement contains all of them."""
_OTHER_AT_ADDRESS: Final = (
    "another server registered this address; give this server another address or stop the other one"
)


class Registry:
    """The placement in the store. Methods raise StoreUnavailable when Redis does not answer.

    Args:
        models: The only models whose servers may join; empty: any. Servers that have joined stay, so while a release
            changes from one model to another, servers of both are present.
        read_whole_s: How often to read a whole placement, not only what changed.
    """

    def __init__(
        self,
        store: Store,
        lease_ms: int,
        models: Mapping[str, ExpectedModel] = MappingProxyType({}),
        read_whole_s: float = USUAL_INTERVALS.read_whole_s,
    ) -> None:
        self._store = store
        self._lease_ms = lease_ms
        self._read_whole_s = read_whole_s
        self._mirrors: dict[str, Mirror] = {}
        self._models = models
        # The order of registrations, their number, and the layout with the last of them; by model.
        self._choosing: dict[str, asyncio.Lock] = {}
        self._num_joining = Counter[str]()
        self._layouts: dict[str, Layout] = {}

    async def register(self, server: pb.ServerDescription, wanted: Span | None, workload: str = "") -> Span:
        """Gives `server` a span and a lease; it replaces an earlier server at its address.

        The method chooses the span on a snapshot, and commits it only if no span or speed has changed since; else it
        chooses again. So two servers never get the same gap, even from different routers.

        Args:
            wanted: The span that the server asks for; None: the router chooses.
            workload: The caller's workload; empty if callers are not authenticated.

        Raises:
            SpanRefused: The wanted span does not fit, the number of blocks differs from that of the model's other
                servers, or `models` does not allow the server.
            AddressNotYours: Another workload has a lease at this address, or has this server's id.
        """
        lease = _lease(pb.SERVER_STATE_JOINING, pb.ServerLoad())
        return await self._place(server, wanted, lease, workload, replaces=True)

    async def _place(
        self, server: pb.ServerDescription, wanted: Span | None, lease: bytes, workload: str, *, replaces: bool
    ) -> Span:
        check_expected(server, self._models)
        await self._store.remember_model(server.model)
        # Registrations of a model at one router wait for each other; between routers, the store decides.
        self._num_joining[server.model] += 1
        try:
            async with self._choosing.setdefault(server.model, asyncio.Lock()):
                span = await self._place_now(server, wanted, lease, workload, replaces=replaces)
        finally:
            self._num_joining[server.model] -= 1
            if not self._num_joining[server.model]:
                # Loads change, and the next registration may come at any time.
                del self._num_joining[server.model]
                self._layouts.pop(server.model, None)
        # The model is remembered once more, because a router may have forgotten it while it had no server.
        await self._store.remember_model(server.model)
        return span

    async def _place_now(
        self, server: pb.ServerDescription, wanted: Span | None, lease: bytes, workload: str, *, replaces: bool
    ) -> Span:
        for attempt in range(MOST_ATTEMPTS):
            # If others have just joined, their layout needs no reading, unless the server replaces another one.
            layout = self._layouts.pop(server.model, None)
            if layout is None or layout.has(server):
                roster = await self.snapshot(server.model)
                if not replaces and roster.has_other_at_address(server):
                    raise LeaseTaken(_OTHER_AT_ADDRESS)
                layout = Layout(roster.without(server))
            span = layout.choose(server, wanted)
            if await self._commit(layout, server, span, lease, workload):
                self._layouts[server.model] = layout
                return span
            await asyncio.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, 0.001 * (attempt + 1))))
        raise StoreUnavailable("the placement changes too fast to register a server")

    async def _commit(
        self, layout: Layout, server: pb.ServerDescription, span: Span, lease: bytes, workload: str
    ) -> bool:
        description = pb.PlacedServer(server=server, span=span.to_message())
        reply = await self._store.call(
            "register", server.model, server.server_id, server.address, description.SerializeToString(), lease,
            server.num_model_blocks, workload, str(layout.version), layout.last_change,
        )  # fmt: skip
        _check_theirs(reply)
        if not reply:
            return False
        version, last_change = reply
        layout.add(server, span, int(version), last_change.decode())
        return True

    async def heartbeat(self, beat: pb.HeartbeatRequest, workload: str = "") -> pb.HeartbeatResponse:
        """Renews a server's lease. An unknown server that describes itself is registered with the span that it holds.

        Returns:
            The answer, with the span to which the server must move if a move is ordered.

        Raises:
            LeaseLost: The server is unknown and does not describe itself.
            LeaseTaken: Another server has its address.
            AddressNotYours: Another workload registered this server, or one at its address.
            SpanRefused: The model's other servers have another number of blocks, the span does not fit, or `models`
                does not allow the server.
        """
        lease = _lease(beat.state, beat.load)
        reply = await self._store.call(
            "heartbeat", beat.model, beat.server_id, beat.server.address, lease, self._lease_ms, workload
        )
        _check_theirs(reply)
        if reply == _TAKEN:
            raise LeaseTaken(_OTHER_AT_ADDRESS)
        if reply == _UNKNOWN:
            if not beat.HasField("server"):
                raise LeaseLost("this server has no lease; register again")
            await self._place(beat.server, Span.from_message(beat.span), lease, workload, replaces=False)
        if not isinstance(reply, list):
            return pb.HeartbeatResponse()
        ordered, at_once = reply
        span = parsed(self._store, "order", beat.model, b"", ordered, lambda data: Span.parse(data.decode()))
        if span is None:
            return pb.HeartbeatResponse()
        return pb.HeartbeatResponse(move_to=span.to_message(), at_once=at_once == b"1")

    async def order(self, roster: Roster, move: Move | Takeover, pause_ms: int = 0) -> bool:
        """Orders a server to move. Returns False if the placement has changed, another move runs or this one must wait.

        For a takeover, it also returns False until routers have listened for a lease, since Redis may have lost its
        data: then servers are missing that live.

        Args:
            roster: The placement on which the move was decided.
            pause_ms: How long moves that cover no uncovered block must wait after this one. The pause doubles with each
                such move while the servers stay the same.
        """
        covers, at_once, listened_ms = (
            (True, move.at_once, self._lease_ms) if isinstance(move, Takeover) else (move.covers, False, 0)
        )
        reply = await self._store.call(
            "order_move", roster.model, str(roster.version), move.server_id, str(move.span), _MOVE_TTL_MS, int(covers),
            pause_ms, int(at_once), listened_ms,
        )  # fmt: skip
        return bool(reply == 1)

    async def report(self, model: str, server_id: str, reporter: str) -> None:
        """Notes that a workload does not reach a server; it ignores an unknown server.

        Once a second workload says so within the time of a lease, and the server sent no heartbeat meanwhile, it is
        suspected until its next heartbeat.
        """
        await self._store.call("report", model, server_id, self._lease_ms, reporter)

    async def doubt(self, model: str, server_id: str) -> None:
        """Marks all servers at a server's host, present and later ones, as slower than they report.

        It ignores an unknown server, and the mark lasts ten minutes.
        """
        await self._store.call("doubt", model, server_id, _DOUBTED_MS)

    async def withhold(self, model: str, server_id: str, reason: str, ttl_ms: int) -> None:
        """Keeps sessions from a server that reports that it is ready; ignores an unknown server.

        Args:
            reason: `leaving`: the server counts as draining, and another reason does not change that. `unready`: chains
                avoid it if they can. Empty: it is ready again.
            ttl_ms: How long this lasts unless it is repeated.
        """
        await self._store.call("withhold", model, server_id, reason, ttl_ms)

    async def lead(self, task: str, router_id: str, ttl_ms: int) -> bool:
        """Makes this router the only one that does `task` for `ttl_ms`. Returns False if another router does it."""
        return bool(await self._store.call("lead", "", task, router_id, ttl_ms) == 1)

    async def deregister(self, model: str, server_id: str, workload: str = "") -> None:
        """Removes a server at once; ignores an unknown one. Raises AddressNotYours for another workload's server."""
        _check_theirs(await self._store.call("deregister", model, server_id, workload))

    async def snapshot(self, model: str) -> Roster:
        """Returns the servers with valid leases. It removes those whose leases have ended, which is a change."""
        # A model that the store does not know leaves nothing behind, because callers may ask for any name.
        mirror = self._mirrors.setdefault(model, Mirror(model, self._store, self._lease_ms, self._read_whole_s))
        try:
            return await mirror.read()
        finally:
            if not mirror.is_in_use and self._mirrors.get(model) is mirror:
                del self._mirrors[model]

    async def rosters(self, models: Iterable[str] | None = None) -> AsyncIterator[Roster]:
        """Yields the snapshot of each model, except those that cannot be read.

        Args:
            models: The names of the models; None: all.
        """
        for model in await self.models() if models is None else models:
            try:
                yield await self.snapshot(model)
            except InternalError:
                continue

    async def add_adapter(self, model: str, adapter: pb.RegisteredAdapter, *, is_lost: bool = False) -> None:
        """Registers an adapter; it replaces one with the same name and other bytes.

        Args:
            is_lost: Whether the store lost it with its data. It stays out if the store knows another one with its name,
                or knows that it was removed.

        Raises:
            InvalidRequest: The model has the greatest number of adapters already.
        """
        version = adapter.version
        reply = await self._store.call(
            "add_adapter", model, version.name, version.digest, adapter.SerializeToString(deterministic=True),
            MOST_ADAPTERS, int(is_lost),
        )  # fmt: skip
        if reply != 1:
            raise InvalidRequest("adapter", f"must not exceed {MOST_ADAPTERS} adapters of one model; remove one first")

    async def remove_adapter(self, model: str, name: str) -> None:
        """Removes an adapter. Raises AdapterNotFound if it is not registered."""
        if await self._store.call("remove_adapter", model, name) != 1:
            raise AdapterNotFound("the adapter is not registered", name)

    async def wait_for_change(self, roster: Roster, wait_s: float) -> None:
        """Returns once the placement differs from `roster`, or after `wait_s`; does not notice an expired lease."""
        await self._store.wait_for_change(roster.model, roster.last_change, wait_s)

    async def models(self) -> list[str]:
        return await self._store.models()

    async def forget(self, model: str) -> None:
        """Removes a model without servers from the list of models, unless a server registers at this moment."""
        await self._store.forget_model(model)
        if (await self.snapshot(model)).is_known:
            await self._store.remember_model(model)


def _check_theirs(reply: Any) -> None:
    if reply == _NOT_THEIRS:
        raise AddressNotYours("another workload registered this server, or one at its address")


def _lease(state: "pb.ServerState.ValueType", load: pb.ServerLoad) -> bytes:
    message: Any = pb.PlacedServer(state=state, load=load)
    return str(int(state)).encode() + bytes(message.SerializeToString())
