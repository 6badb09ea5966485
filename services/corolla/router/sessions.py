"""Session records in the store: owner, chain, token log, and the lock of the running turn."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from google.protobuf.message import DecodeError

from corolla.chassis.errors import (
    InternalError,
    InvalidRequest,
    QuotaExceeded,
    SessionBusy,
    SessionNotFound,
    StoreUnavailable,
)
from corolla.planning.numerics import continued
from corolla.router.store import Store
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb


@dataclass(frozen=True, slots=True)
class SessionBounds:
    """How much may be stored at a time; 0: any number.

    Attributes:
        tenant_sessions: The sessions of one tenant.
        tenant_bytes: The bytes of one tenant's sessions.
        all_bytes: The bytes of all sessions of a model.
    """

    tenant_sessions: int = 0
    tenant_bytes: int = 0
    all_bytes: int = 0


class SessionRecords:
    """The session records in the store.

    Methods raise StoreUnavailable when Redis does not answer, and SessionNotFound for a session that is unknown,
    expired or of another tenant. A repeated call gets the same answer, since the first answer may be lost.
    """

    def __init__(self, store: Store, bounds: SessionBounds = SessionBounds()) -> None:
        self._store = store
        self._bounds = bounds

    async def create(self, request: pb.CreateSessionRecordRequest, ttl_ms: int) -> pb.SessionRecord:
        """Stores a new session. A bound of 0 does not apply.

        Raises:
            InvalidRequest: The id is taken.
            QuotaExceeded: The tenant has reached its number of sessions or of bytes.
            StoreUnavailable: All tenants together have reached their number of bytes.
        """
        record = request.record
        reply = await self._store.call(
            "create_session", record.model, record.session_id, record.tenant, *_stored(record), ttl_ms,
            _least(self._bounds.tenant_sessions, request.max_tenant_sessions),
            _least(self._bounds.tenant_bytes, request.max_tenant_bytes), self._bounds.all_bytes,
        )  # fmt: skip
        if reply[0] == b"taken":
            raise InvalidRequest("record.session_id", "is taken; draw another one")
        return _record(reply)

    async def get(self, model: str, session_id: str, tenant: str) -> pb.SessionRecord:
        return _record(await self._store.call("get_session", model, session_id, tenant))

    async def begin_turn(self, request: pb.BeginTurnRequest, lock_ms: int) -> pb.SessionRecord:
        """Locks the session for a turn, and returns its record. A bound of 0 does not apply.

        Raises:
            SessionBusy: Another turn holds the lock.
            QuotaExceeded: The tenant has reached its number of bytes.
            StoreUnavailable: All tenants together have reached their number of bytes.
        """
        most = _least(self._bounds.tenant_bytes, request.max_tenant_bytes)
        reply = await self._store.call(
            "begin_turn", request.model, request.session_id, request.tenant, request.turn_id, lock_ms, most,
            self._bounds.all_bytes, request.num_new_bytes,
        )  # fmt: skip
        return _record(reply)

    async def renew_turn(self, request: pb.RenewTurnRequest, lock_ms: int) -> None:
        """Extends the lock of a turn. Raises SessionBusy when the turn no longer holds the session."""
        reply = await self._store.call("renew_turn", request.model, request.session_id, request.turn_id, lock_ms)
        _checked(reply)

    async def end_turn(self, request: pb.EndTurnRequest, ttl_ms: int) -> None:
        """Writes the record, unless discarded, and unlocks the session. A session lost by the store is written anew.

        Raises:
            SessionBusy: The turn no longer holds the session, and another one may have begun.
        """
        record = request.record
        reply = await self._store.call(
            "end_turn", record.model, record.session_id, record.tenant, request.turn_id, ttl_ms, record.epoch,
            record.store_id, *(() if request.discard else _stored(record)),
        )  # fmt: skip
        _checked(reply)

    async def move(
        self,
        model: str,
        session_id: str,
        tenant: str,
        server_id: str,
        hop: common_pb2.Hop,
        placed: Mapping[str, pb.PlacedServer] = MappingProxyType({}),
    ) -> None:
        """Puts `hop` into the recorded chain, in place of the hop on `server_id` with the same blocks.

        Args:
            hop: The hop that has the session now.
            placed: The servers of the placement by id, whose numerics the chain is to name.

        Raises:
            SessionBusy: A turn is running, or has ended just now.
            SessionNotFound: The session or the hop on `server_id` does not exist, or the server of `hop` already holds
                other blocks of the session.
        """
        record = await self.get(model, session_id, tenant)
        before, _ = _stored(record)
        if hop in record.chain.hops:
            return
        if any(each.server_id == hop.server_id for each in record.chain.hops):
            raise SessionNotFound("the session has other blocks on that server")
        left = common_pb2.Chain()
        left.CopyFrom(record.chain)
        for each in record.chain.hops:
            if each.server_id == server_id and each.span == hop.span:
                each.CopyFrom(hop)
                break
        else:
            raise SessionNotFound("the session has no such hop")
        record.chain.CopyFrom(continued(left, record.chain, placed))
        _checked(await self._store.call("move_session", model, session_id, tenant, before, *_stored(record)))

    async def delete(self, model: str, session_id: str, tenant: str) -> pb.SessionRecord:
        """Deletes a session, and returns its chain and epoch, which name the hops to free. Raises SessionBusy."""
        call = secrets.token_hex(16)
        _, chain, epoch = _checked(await self._store.call("delete_session", model, session_id, tenant, call))
        try:
            hops = common_pb2.Chain.FromString(chain)
        except DecodeError:
            raise InternalError("the store holds a record that cannot be read") from None
        return pb.SessionRecord(
            session_id=session_id, tenant=tenant, model=model, epoch=int(epoch), chain=hops if hops.hops else None
        )

    async def count(self, model: str) -> int:
        return int(await self._store.call("count_sessions", model))


def _least(*bounds: int) -> int:
    return min((each for each in bounds if each), default=0)


def _stored(record: pb.SessionRecord) -> tuple[bytes, bytes]:
    """Returns record and chain as bytes, without the fields that reading fills in. Planning reads only the chain."""
    kept = pb.SessionRecord()
    kept.CopyFrom(record)
    kept.ClearField("epoch")
    kept.ClearField("busy")
    kept.ClearField("expires_in_ms")
    kept.ClearField("store_id")
    return kept.SerializeToString(deterministic=True), record.chain.SerializeToString(deterministic=True)


def _checked(reply: list[Any]) -> list[Any]:
    match reply[0]:
        case b"missing":
            raise SessionNotFound("there is no such session")
        case b"busy":
            raise SessionBusy("another turn is running on the session")
        case b"lost":
            raise SessionBusy("this turn no longer holds the session; another one may have begun")
        case b"full":
            raise StoreUnavailable(
                "the sessions of all tenants fill the store's room for them; it is free again when some expire"
            )
        case b"quota":
            raise QuotaExceeded(
                "the tenant has stored as much as it may; delete some sessions, or let them expire",
                metadata={"quota": reply[1].decode()},
            )
    return reply


def _record(reply: list[Any]) -> pb.SessionRecord:
    _, data, busy, expires_in_ms, epoch, store_id = _checked(reply)
    try:
        record = pb.SessionRecord.FromString(data)
    except DecodeError:
        raise InternalError("the store holds a record that cannot be read") from None
    record.epoch = int(epoch)
    record.busy = bool(busy)
    record.expires_in_ms = max(0, expires_in_ms)
    record.store_id = store_id.decode()
    return record
