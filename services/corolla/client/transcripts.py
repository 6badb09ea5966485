"""Conversations between their turns, in the router's keeping, so that any client service can continue them."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from corolla.chain.control import ControlPlane
from corolla.chassis import failpoints
from corolla.chassis.errors import (
    CorollaError,
    RouterUnavailable,
    SessionBusy,
    SessionNotFound,
    StaleEpoch,
    StoreUnavailable,
)
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import router_pb2 as pb
from corolla.wire.adapter_version import AdapterVersion

log = logging.getLogger(__name__)

_LOCK_MS: Final = 15_000
_RENEW_INTERVAL_S: Final = 5.0
_WRITE_PATIENCE_S: Final = 30.0
_WRITE_RETRY_INTERVAL_S: Final = 0.5
_RELEASE_INTERVAL_S: Final = 0.5
_MAX_RELEASES: Final = round(_LOCK_MS / 1000 / _RELEASE_INTERVAL_S)


class Turn:
    """A turn that is running: the record as it was, and as it will be written back."""

    def __init__(self, record: pb.SessionRecord, write_back: Callable[[pb.SessionRecord], Awaitable[None]]) -> None:
        self.record = record
        self.committed = False
        self._write_back = write_back

    async def commit(self) -> None:
        """Makes what `record` holds the session's, and ends the turn.

        Raises RouterUnavailable or StoreUnavailable where it could not be written; the session stays as it was.
        """
        failpoints.passed("before_commit")
        await self._write_back(self.record)
        failpoints.passed("after_commit")
        self.committed = True


class Transcripts:
    """Creates, locks and writes session records; an idle conversation is kept for `session_ttl_s` seconds."""

    def __init__(self, control: ControlPlane, session_ttl_s: float, tasks: TaskGroup) -> None:
        self._control = control
        self.ttl_ms = round(session_ttl_s * 1000)
        self._tasks = tasks

    async def create(
        self,
        tenant: str,
        max_sessions: int | None = None,
        max_bytes: int | None = None,
        adapter: AdapterVersion | None = None,
    ) -> pb.SessionRecord:
        """Makes a session whose turns are computed with `adapter`.

        Raises QuotaExceeded where the tenant has `max_sessions`, `max_bytes`, or what the router allows anybody."""
        record = pb.SessionRecord(session_id=secrets.token_hex(16), tenant=tenant, model=self._control.model)
        if adapter is not None:
            record.adapter.CopyFrom(adapter.to_message())
        request = pb.CreateSessionRecordRequest(
            record=record,
            ttl_ms=self.ttl_ms,
            max_tenant_sessions=max_sessions or 0,
            max_tenant_bytes=max_bytes or 0,
        )
        return await self._control.call(self._control.stub.CreateSessionRecord, request)

    async def get(self, session_id: str, tenant: str) -> pb.SessionRecord:
        """Raises SessionNotFound, also for another tenant's."""
        model = self._control.model
        request = pb.GetSessionRecordRequest(model=model, session_id=_checked(session_id), tenant=tenant)
        return await self._control.call(self._control.stub.GetSessionRecord, request)

    async def delete(self, session_id: str, tenant: str) -> pb.SessionRecord:
        """The record that was there. Raises SessionNotFound, or SessionBusy while a turn runs."""
        model = self._control.model
        request = pb.DeleteSessionRecordRequest(model=model, session_id=_checked(session_id), tenant=tenant)
        return await self._control.call(self._control.stub.DeleteSessionRecord, request)

    @asynccontextmanager
    async def turn(
        self, session_id: str, tenant: str, name: str = "", max_bytes: int | None = None
    ) -> AsyncIterator[Turn]:
        """Locks the session for one turn. A turn that is not committed leaves it as it was.

        Args:
            name: a turn of the same name that still holds the lock loses it.
            max_bytes: that the tenant may have stored before it begins another turn.

        Raises:
            SessionNotFound, SessionBusy, QuotaExceeded, RouterUnavailable, StoreUnavailable
        """
        turn_id = f"{name}.{secrets.token_hex(15)}" if name else secrets.token_hex(16)
        record = await self._begin(_checked(session_id), tenant, turn_id, max_bytes or 0)
        turn = Turn(record, lambda changed: self._write_back(changed, turn_id))
        renewing = self._tasks.start_restartable(partial(self._keep_lock, session_id, turn_id), "turn_lock")
        try:
            yield turn
        except StaleEpoch:
            # A turn of the same name took the session over, or Redis lost it. The next turn has a higher epoch.
            raise SessionBusy("block servers have opened the session for a later turn") from None
        finally:
            self._tasks.cancel(renewing)
            if not turn.committed:
                # The lock must go also when the caller is gone.
                await asyncio.shield(asyncio.ensure_future(self._discard(turn.record, turn_id)))

    async def close(self) -> None:
        await self._tasks.close()

    async def _begin(self, session_id: str, tenant: str, turn_id: str, max_bytes: int) -> pb.SessionRecord:
        request = pb.BeginTurnRequest(
            model=self._control.model,
            session_id=session_id,
            tenant=tenant,
            turn_id=turn_id,
            lock_ms=_LOCK_MS,
            max_tenant_bytes=max_bytes,
        )
        beginning = asyncio.ensure_future(self._control.call(self._control.stub.BeginTurn, request))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            # The router may hold the lock for us by now; only its answer tells, so it is waited for all the same.
            await asyncio.shield(asyncio.ensure_future(self._end_unused(beginning, turn_id)))
            raise
        except (RouterUnavailable, StoreUnavailable):
            self._tasks.start(self._release(session_id, tenant, turn_id), "release of a turn")
            raise

    async def _end_unused(self, beginning: asyncio.Future[pb.SessionRecord], turn_id: str) -> None:
        try:
            record = await beginning
        except CorollaError:
            return
        await self._discard(record, turn_id)

    async def _release(self, session_id: str, tenant: str, turn_id: str) -> None:
        """Takes back a begin that nobody answered: a store that was frozen may do it when it wakes up."""
        record = pb.SessionRecord(session_id=session_id, tenant=tenant, model=self._control.model)
        for _ in range(_MAX_RELEASES):
            await asyncio.sleep(_RELEASE_INTERVAL_S)
            try:
                return await self._end(record, turn_id, discard=True)
            except (RouterUnavailable, StoreUnavailable):
                continue
            except CorollaError:
                return None  # it never began, or is over

    async def _write_back(self, record: pb.SessionRecord, turn_id: str) -> None:
        """Waits for a router or a store that is away: the answer is there, and so is its caller."""
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + _WRITE_PATIENCE_S
        while True:
            try:
                return await self._end(record, turn_id, discard=False)
            except (RouterUnavailable, StoreUnavailable):
                # The same call again is no error, should the first one have got through.
                if clock() >= give_up_s:
                    raise
            await asyncio.sleep(_WRITE_RETRY_INTERVAL_S)

    async def _discard(self, record: pb.SessionRecord, turn_id: str) -> None:
        try:
            await self._end(record, turn_id, discard=True)
        except CorollaError as error:
            log.warning("turn lock not given back; it will run out", extra={"reason": error.reason})

    async def _end(self, record: pb.SessionRecord, turn_id: str, *, discard: bool) -> None:
        request = pb.EndTurnRequest(record=record, turn_id=turn_id, ttl_ms=self.ttl_ms, discard=discard)
        await self._control.call(self._control.stub.EndTurn, request)

    async def _keep_lock(self, session_id: str, turn_id: str) -> None:
        model = self._control.model
        request = pb.RenewTurnRequest(model=model, session_id=session_id, turn_id=turn_id, lock_ms=_LOCK_MS)
        while True:
            await asyncio.sleep(_RENEW_INTERVAL_S)
            try:
                await self._control.call(self._control.stub.RenewTurn, request)
            except CorollaError as error:
                log.warning("turn lock not renewed", extra={"reason": error.reason})


def _checked(session_id: str) -> str:
    if len(session_id) != 32 or any(character not in "0123456789abcdef" for character in session_id):
        raise SessionNotFound("no such session")
    return session_id
