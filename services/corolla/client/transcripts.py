"""Conversations between their turns, in the router's keeping, so that any client service can continue them."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from corolla.chassis.errors import CorollaError, SessionNotFound
from corolla.client.chain.control import ControlPlane
from corolla.v1 import router_pb2 as pb

log = logging.getLogger(__name__)

_LOCK_MS: Final = 15_000
_RENEW_INTERVAL_S: Final = 5.0


class Turn:
    """A turn that is running: the record as it was, and as it will be written back."""

    def __init__(self, record: pb.SessionRecord) -> None:
        self.record = record
        self.committed = False

    def commit(self) -> None:
        """What `record` holds now is what the session becomes."""
        self.committed = True


class Transcripts:
    """Creates, locks and writes session records.

    Args:
        session_ttl_s: how long an idle conversation is kept.
    """

    def __init__(self, control: ControlPlane, session_ttl_s: float) -> None:
        self._control = control
        self._ttl_ms = round(session_ttl_s * 1000)

    @property
    def ttl_ms(self) -> int:
        return self._ttl_ms

    async def create(self, tenant: str) -> pb.SessionRecord:
        record = pb.SessionRecord(session_id=secrets.token_hex(16), tenant=tenant, model=self._control.model)
        return await self._control.create_session(record, self._ttl_ms)

    async def get(self, session_id: str, tenant: str) -> pb.SessionRecord:
        """Raises SessionNotFound, also for another tenant's."""
        return await self._control.get_session(_checked(session_id), tenant)

    async def delete(self, session_id: str, tenant: str) -> pb.SessionRecord:
        """The record that was there. Raises SessionNotFound, or SessionBusy while a turn runs."""
        return await self._control.delete_session(_checked(session_id), tenant)

    @asynccontextmanager
    async def turn(self, session_id: str, tenant: str) -> AsyncIterator[Turn]:
        """Locks the session for one turn. A turn that is not committed leaves it as it was.

        Raises:
            SessionNotFound, SessionBusy, RouterUnavailable, StoreUnavailable
        """
        turn_id = secrets.token_hex(16)
        turn = Turn(await self._begin(_checked(session_id), tenant, turn_id))
        renewing = asyncio.create_task(self._keep_lock(session_id, turn_id))
        try:
            yield turn
        finally:
            renewing.cancel()
            # The lock must go also when the caller is gone.
            ending = asyncio.ensure_future(self._end(turn, turn_id))
            await asyncio.shield(ending)

    async def _begin(self, session_id: str, tenant: str, turn_id: str) -> pb.SessionRecord:
        beginning = asyncio.ensure_future(self._control.begin_turn(session_id, tenant, turn_id, _LOCK_MS))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            # The router may hold the lock for us by now; only its answer tells, so it is waited for all the same.
            await asyncio.shield(asyncio.ensure_future(self._end_unused(beginning, turn_id)))
            raise

    async def _end_unused(self, beginning: asyncio.Future[pb.SessionRecord], turn_id: str) -> None:
        try:
            record = await beginning
        except CorollaError:
            return
        await self._end(Turn(record), turn_id)

    async def _end(self, turn: Turn, turn_id: str) -> None:
        try:
            await self._control.end_turn(turn.record, turn_id, self._ttl_ms, discard=not turn.committed)
        except CorollaError as error:
            log.warning("turn not written back", extra={"reason": error.reason})

    async def _keep_lock(self, session_id: str, turn_id: str) -> None:
        while True:
            await asyncio.sleep(_RENEW_INTERVAL_S)
            try:
                await self._control.renew_turn(session_id, turn_id, _LOCK_MS)
            except CorollaError as error:
                log.warning("turn lock not renewed", extra={"reason": error.reason})


def _checked(session_id: str) -> str:
    if len(session_id) != 32 or any(character not in "0123456789abcdef" for character in session_id):
        raise SessionNotFound("no such session")
    return session_id
