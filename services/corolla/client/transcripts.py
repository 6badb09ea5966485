"""Stores conversations between their turns at the router, so that any client service can continue them."""

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
    """A running turn, with the session's record, which the turn changes and writes back."""

    def __init__(self, record: pb.SessionRecord, write_back: Callable[[pb.SessionRecord], Awaitable[None]]) -> None:
        self.record = record
        self.committed = False
        self._write_back = write_back

    async def commit(self) -> None:
        """Writes `record` back as the session's, and ends the turn.

        Raises RouterUnavailable or StoreUnavailable if that fails; the session is unchanged then.
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

        Raises QuotaExceeded if the tenant already has `max_sessions` sessions, `max_bytes` bytes in all sessions, or
        the router's own limit of either.
        """
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
        """The session's record. Raises SessionNotFound, also for another tenant's session."""
        model = self._control.model
        request = pb.GetSessionRecordRequest(model=model, session_id=_checked(session_id), tenant=tenant)
        return await self._control.call(self._control.stub.GetSessionRecord, request)

    async def delete(self, session_id: str, tenant: str) -> pb.SessionRecord:
        """Deletes a session and returns its record. Raises SessionNotFound, or SessionBusy while a turn runs."""
        model = self._control.model
        request = pb.DeleteSessionRecordRequest(model=model, session_id=_checked(session_id), tenant=tenant)
        return await self._control.call(self._control.stub.DeleteSessionRecord, request)

    @asynccontextmanager
    async def turn(
        self, session_id: str, tenant: str, name: str = "", max_bytes: int | None = None, num_new_bytes: int = 0
    ) -> AsyncIterator[Turn]:
        """Locks the session for one turn. A turn that is not committed leaves the session unchanged.

        Args:
            name: the turn's name; an earlier turn of the same name loses the lock.
            max_bytes: the most bytes that the tenant may have stored with this turn.
            num_new_bytes: the bytes that the turn may add; they count as stored until it ends.

        Raises:
            SessionNotFound, SessionBusy, QuotaExceeded, RouterUnavailable, StoreUnavailable
        """
        turn_id = f"{name}.{secrets.token_hex(15)}" if name else secrets.token_hex(16)
        record = await self._begin(_checked(session_id), tenant, turn_id, max_bytes or 0, num_new_bytes)
        turn = Turn(record, lambda changed: self._write_back(changed, turn_id))
        renewing = self._tasks.start_restartable(partial(self._keep_lock, session_id, turn_id), "turn_lock")
        try:
            yield turn
        except StaleEpoch:
            # A turn of the same name took the session over, or Redis lost the lock. The other turn has a higher epoch.
            raise SessionBusy("another turn of the session has begun") from None
        finally:
            self._tasks.cancel(renewing)
            if not turn.committed:
                # The lock is released even if the caller has left.
                await asyncio.shield(asyncio.ensure_future(self._discard(turn.record, turn_id)))

    async def close(self) -> None:
        await self._tasks.close()

    async def _begin(
        self, session_id: str, tenant: str, turn_id: str, max_bytes: int, num_new_bytes: int
    ) -> pb.SessionRecord:
        request = pb.BeginTurnRequest(
            model=self._control.model,
            session_id=session_id,
            tenant=tenant,
            turn_id=turn_id,
            lock_ms=_LOCK_MS,
            max_tenant_bytes=max_bytes,
            num_new_bytes=num_new_bytes,
        )
        beginning = asyncio.ensure_future(self._control.call(self._control.stub.BeginTurn, request))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            # The router may have given this turn the lock. Only the router's answer tells, so a task awaits it.
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
        """Ends a turn whose `BeginTurn` got no answer: a frozen store may still carry it out later."""
        record = pb.SessionRecord(session_id=session_id, tenant=tenant, model=self._control.model)
        for _ in range(_MAX_RELEASES):
            await asyncio.sleep(_RELEASE_INTERVAL_S)
            try:
                return await self._end(record, turn_id, discard=True)
            except (RouterUnavailable, StoreUnavailable):
                continue
            except CorollaError:
                return None  # the turn never began, or is over

    async def _write_back(self, record: pb.SessionRecord, turn_id: str) -> None:
        """Writes the record; retries while the router or the store is away, because the answer is already complete."""
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + _WRITE_PATIENCE_S
        while True:
            try:
                return await self._end(record, turn_id, discard=False)
            except (RouterUnavailable, StoreUnavailable):
                # Repeating the call is correct even if the first one was carried out.
                if clock() >= give_up_s:
                    raise
            await asyncio.sleep(_WRITE_RETRY_INTERVAL_S)

    async def _discard(self, record: pb.SessionRecord, turn_id: str) -> None:
        try:
            await self._end(record, turn_id, discard=True)
        except CorollaError as error:
            log.warning("could not release the lock of a turn; it will expire", extra={"reason": error.reason})

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
                log.warning("could not renew the lock of a turn", extra={"reason": error.reason})


def _checked(session_id: str) -> str:
    if len(session_id) != 32 or any(character not in "0123456789abcdef" for character in session_id):
        raise SessionNotFound("no such session")
    return session_id
