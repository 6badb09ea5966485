"""Who is there: registration, leases and snapshots of the placement. Keeps nothing of its own."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import DecodeError

from corolla.chassis.errors import (
    AdapterNotFound,
    AddressNotYours,
    InternalError,
    InvalidRequest,
    LeaseLost,
    LeaseTaken,
    SpanRefused,
    StoreUnavailable,
)
from corolla.router.placement import choose_span
from corolla.router.rebalancing import Move
from corolla.router.roster import Roster, end_blocks_of, memory_of, sort_servers
from corolla.router.settings import ExpectedModel
from corolla.router.store import Store
from corolla.router.validation import check_adapter, check_expected, check_placed
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.span import Span

log = logging.getLogger(__name__)

MOST_ATTEMPTS: Final = 100
_LONGEST_PAUSE_S: Final = 0.01
_UNKNOWN: Final = 0
_TAKEN: Final = 2
_NOT_THEIRS: Final = 3
# In which a server hands over, leaves and registers again; then others may move.
_MOVE_TTL_MS: Final = 60_000
_DOUBTED_MS: Final = 600_000
MOST_ADAPTERS: Final = 512
"""Of a model: all of them are in each placement that is pushed."""
_DIGEST_CHARS: Final = 64


class Registry:
    """The placement in the store. Methods raise StoreUnavailable when Redis does not answer.

    Args:
        models: the only ones that servers may join with; none: any. Those that have joined stay: while a release goes
            from one model to another, the servers of both are there.
    """

    def __init__(self, store: Store, lease_ms: int, models: Mapping[str, ExpectedModel] = MappingProxyType({})) -> None:
        self._store = store
        self._lease_ms = lease_ms
        self._models = models
        self._choosing: dict[str, asyncio.Lock] = {}

    async def register(self, server: pb.ServerDescription, wanted: Span | None, workload: str = "") -> Span:
        """Gives `server` a span and a lease; it replaces whoever had its address.

        The span is chosen on a snapshot and committed only if the placement has not changed since, else chosen anew: no
        two servers get the same gap, whichever routers they ask.

        Args:
            workload: who asks; empty where nobody is asked.

        Raises:
            SpanRefused: the wanted span does not fit, the model's number of blocks is not that of the others, or the
                model is not one of `models`.
            AddressNotYours: another workload has the address and a lease, or this server's id.
        """
        lease = _lease(pb.SERVER_STATE_JOINING, pb.ServerLoad())
        return await self._place(server, wanted, lease, workload, replaces=True)

    async def _place(
        self, server: pb.ServerDescription, wanted: Span | None, lease: bytes, workload: str, *, replaces: bool
    ) -> Span:
        check_expected(server, self._models)
        await self._store.remember_model(server.model)
        # Within one process they queue up; between routers the version decides.
        async with self._choosing.setdefault(server.model, asyncio.Lock()):
            for attempt in range(MOST_ATTEMPTS):
                roster = await self.snapshot(server.model)
                if not replaces and roster.has_other_at_address(server):
                    raise LeaseTaken("another server has this one's address")
                roster = roster.without(server)
                span = _choose(roster, server, wanted)
                if await self._commit(roster, server, span, lease, workload):
                    # Again: as long as nobody was there, it may have been forgotten.
                    await self._store.remember_model(server.model)
                    return span
                await asyncio.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, 0.001 * (attempt + 1))))
        raise StoreUnavailable("the placement changes too fast to take part in it")

    async def _commit(
        self, roster: Roster, server: pb.ServerDescription, span: Span, lease: bytes, workload: str
    ) -> bool:
        description = pb.PlacedServer(server=server, span=span.to_message())
        reply = await self._store.call(
            "register",
            server.model,
            str(roster.version),
            server.server_id,
            server.address,
            description.SerializeToString(),
            lease,
            server.num_model_blocks,
            workload,
        )
        _check_theirs(reply)
        return bool(reply == 1)

    async def heartbeat(self, beat: pb.HeartbeatRequest, workload: str = "") -> Span | None:
        """Renews the lease. A server that is not known, but describes itself, is registered as it is.

        Returns:
            The span that the server is ordered to move to, if any.

        Raises:
            LeaseLost: it is not known and does not say what it is.
            LeaseTaken: another server has its address.
            AddressNotYours: another workload registered it.
            SpanRefused: the other servers' model has another number of blocks by now, or is not one of `models`.
        """
        lease = _lease(beat.state, beat.load)
        reply = await self._store.call(
            "heartbeat", beat.model, beat.server_id, beat.server.address, lease, self._lease_ms, workload
        )
        _check_theirs(reply)
        if reply == _TAKEN:
            raise LeaseTaken("another server has this one's address")
        if reply == _UNKNOWN:
            if not beat.HasField("server"):
                raise LeaseLost("this server has no lease; register again")
            await self._place(beat.server, Span.of(beat.span), lease, workload, replaces=False)
        if not isinstance(reply, bytes):
            return None
        try:
            return Span.parse(reply.decode())
        except ValueError:
            self._store.skip("order", beat.model, "")
            return None

    async def order(self, roster: Roster, move: Move, pause_ms: int) -> bool:
        """Has a server ordered to move; False if the placement is another one by now, or a move is under way.

        Args:
            pause_ms: for which moves that give no block its only server have to wait after this one; it doubles with
                each further one among the same servers.
        """
        covers = int(move.covers)
        reply = await self._store.call(
            "order_move", roster.model, str(roster.version), move.server_id, str(move.span), _MOVE_TTL_MS, covers,
            pause_ms,
        )  # fmt: skip
        return bool(reply == 1)

    async def report(self, model: str, server_id: str) -> None:
        """Suspects a server until its next heartbeat; an unknown one is no error."""
        await self._store.call("report", model, server_id, self._lease_ms)

    async def doubt(self, model: str, server_id: str) -> None:
        """Servers at its host are slower than they say, whatever they register as; an unknown one is no error."""
        await self._store.call("doubt", model, server_id, _DOUBTED_MS)

    async def withhold(self, model: str, server_id: str, reason: str, ttl_ms: int) -> None:
        """Keeps sessions from a server that says it is ready; an unknown one is no error.

        Args:
            reason: `leaving`: it counts as draining, and nothing takes that back. `unready`: chains avoid it where they
                can. Empty: it is no longer unready.
            ttl_ms: how long that holds unless it is said again.
        """
        await self._store.call("withhold", model, server_id, reason, ttl_ms)

    async def lead(self, task: str, router_id: str, ttl_ms: int) -> bool:
        """Whether this router, alone among all, does `task` for the next `ttl_ms`."""
        return bool(await self._store.call("lead", "", task, router_id, ttl_ms) == 1)

    async def deregister(self, model: str, server_id: str, workload: str = "") -> None:
        """Takes a server out at once; an unknown one is no error. Raises AddressNotYours: it is another workload's."""
        _check_theirs(await self._store.call("deregister", model, server_id, workload))

    async def snapshot(self, model: str, *, with_adapters: bool = False) -> Roster:
        """The servers whose leases run now. One that has just lost its lease is taken out, as a change.

        Args:
            with_adapters: there may be many, and no chain depends on them.
        """
        roster, _ = await self.snapshot_for(model, "", with_adapters=with_adapters)
        return roster

    async def snapshot_for(
        self, model: str, session_id: str, *, with_adapters: bool = False
    ) -> tuple[Roster, common_pb2.Chain | None]:
        """The servers, and in the same moment the chain that a session is pinned to."""
        version, num_blocks, last_change, records, pinned, adapters, removed = await self._store.call(
            "snapshot", model, session_id, self._lease_ms, int(with_adapters)
        )
        servers = [
            server
            for server_id, record in zip(records[::2], records[1::2], strict=True)
            if (server := self._placed(model, server_id, record)) is not None
        ]
        if not num_blocks.isdigit() or len(num_blocks) > 4:
            num_blocks = 0
        # No less than what servers hold, whatever the store says.
        num_blocks = max([int(num_blocks), *(each.server.num_model_blocks for each in servers)])
        roster = Roster(
            model, int(version), num_blocks, sort_servers(servers), last_change.decode(),
            tuple(sorted(self._adapters(model, adapters), key=lambda each: each.version.name)),
            tuple(self._removed_adapters(model, removed)),
        )  # fmt: skip
        return roster, self._chain(model, session_id, pinned)

    async def rosters(self) -> AsyncIterator[Roster]:
        """The snapshot of each model, save those that cannot be read."""
        for model in await self.models():
            try:
                yield await self.snapshot(model)
            except InternalError:
                continue

    def _placed(self, model: str, server_id: bytes, record: bytes) -> pb.PlacedServer | None:
        try:
            return check_placed(pb.PlacedServer.FromString(record))
        except (DecodeError, InvalidRequest):
            self._store.skip("server", model, server_id.decode(errors="replace"))
            return None

    async def add_adapter(self, model: str, adapter: pb.RegisteredAdapter) -> None:
        """Registers an adapter; one of the same name and other bytes is taken out by that.

        Raises:
            InvalidRequest: the model has as many as it may.
        """
        version = adapter.version
        reply = await self._store.call(
            "add_adapter", model, version.name, version.digest, adapter.SerializeToString(deterministic=True),
            MOST_ADAPTERS,
        )  # fmt: skip
        if reply != 1:
            raise InvalidRequest("adapter", f"would be one too many: a model has at most {MOST_ADAPTERS}")

    async def restore_adapters(self, model: str, adapters: Iterable[pb.RegisteredAdapter]) -> None:
        """Registers again what the store has lost with its memory, unless it knows another under the name, or that
        somebody took it out."""
        for adapter in adapters:
            version = adapter.version
            await self._store.call(
                "restore_adapter", model, version.name, version.digest, adapter.SerializeToString(deterministic=True)
            )

    async def remove_adapter(self, model: str, name: str) -> None:
        """Takes an adapter out. Raises AdapterNotFound: there is none."""
        if await self._store.call("remove_adapter", model, name) != 1:
            raise AdapterNotFound("no such adapter is registered", name)

    def _adapters(self, model: str, entries: Sequence[bytes]) -> Iterator[pb.RegisteredAdapter]:
        for name, entry in zip(entries[::2], entries[1::2], strict=True):
            try:
                yield check_adapter(pb.RegisteredAdapter.FromString(entry[_DIGEST_CHARS:]))
            except (DecodeError, InvalidRequest):
                self._store.skip("adapter", model, name.decode(errors="replace"))

    def _removed_adapters(self, model: str, entries: Sequence[bytes]) -> Iterator[common_pb2.AdapterVersion]:
        for entry in sorted(entries[::2]):
            name, _, digest = entry.decode(errors="replace").partition(" ")
            try:
                yield AdapterVersion(name, digest).to_message()
            except ValueError:
                self._store.skip("adapter", model, name)

    def _chain(self, model: str, session_id: str, pinned: bytes | None) -> common_pb2.Chain | None:
        try:
            return common_pb2.Chain.FromString(pinned) if pinned else None
        except DecodeError:
            self._store.skip("chain", model, "")
            return None

    async def wait_for_change(self, roster: Roster, wait_s: float) -> None:
        """Returns once the placement is no longer that of `roster`, or after `wait_s`. An expired lease is no event."""
        await self._store.wait_for_change(roster.model, roster.last_change, wait_s)

    async def models(self) -> list[str]:
        return await self._store.models()

    async def forget(self, model: str) -> None:
        """No longer lists a model that the store does not know, unless a server came in this moment."""
        await self._store.forget_model(model)
        if (await self.snapshot(model)).is_known:
            await self._store.remember_model(model)


def _choose(roster: Roster, server: pb.ServerDescription, wanted: Span | None) -> Span:
    num_blocks = server.num_model_blocks
    if roster.servers and roster.num_blocks != num_blocks:
        raise SpanRefused(
            f"the servers of this model have {roster.num_blocks} blocks, this one has {num_blocks}; "
            "give it another model name or the same checkpoint"
        )
    if wanted is None:
        hosted = roster.hosted(server.fingerprint)
        return choose_span(
            hosted, num_blocks, server.capacity_blocks, roster.speed_with(server), end_blocks_of(server),
            memory_of(server),
        )  # fmt: skip
    if wanted.end > num_blocks:
        raise SpanRefused(f"span {wanted} reaches beyond the model's {num_blocks} blocks")
    if len(wanted) > server.capacity_blocks:
        raise SpanRefused(f"span {wanted} has {len(wanted)} blocks; the server has room for {server.capacity_blocks}")
    return wanted


def _check_theirs(reply: Any) -> None:
    if reply == _NOT_THEIRS:
        raise AddressNotYours("another workload registered this server, or one at its address")


def _lease(state: "pb.ServerState.ValueType", load: pb.ServerLoad) -> bytes:
    message: Any = pb.PlacedServer(state=state, load=load)
    return str(int(state)).encode() + bytes(message.SerializeToString())
