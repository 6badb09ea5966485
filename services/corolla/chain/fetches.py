"""Gets the beginning of a text from a server that holds it, for a hop that would have to compute it."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from corolla.chain.beginnings import STRIDE_TOKENS
from corolla.chain.clock import time_s
from corolla.chain.identity import SessionIdentity
from corolla.chain.routes import Routes
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import CorollaError
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2

log = logging.getLogger(__name__)

_PATIENCE: Final = 4.0
"""A fetch takes at most so many times the time that computing takes on an idle server: a busy one is slow at both. That
goes for the whole, and after each part for what has arrived and one more part: what is too slow ends early."""

OpenOn = Callable[[common_pb2.Hop, int, bytes], Awaitable[pb.Opened]]
"""Opens the session on a server for so many tokens, as a standby with a transfer id unless that is empty."""


@dataclass(slots=True)
class _Arrival:
    """What has arrived of a fetch, and by when the next part has to.

    Args:
        filling_seconds: gives for a number of tokens how long the hop computes and how long it fetches them.
        limit: ends the fetch, at `until_s` or sooner.
    """

    filling_seconds: Callable[[int], tuple[float, float]]
    limit: asyncio.Timeout
    until_s: float
    is_over: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _began_s: float = field(init=False, default=0.0)
    _num_before: int = field(init=False, default=0)
    _num_tokens: int = field(init=False, default=0)

    def begin(self, num_tokens: int) -> None:
        """Notes that the hop has so many tokens, and that the first part is about to come."""
        self._began_s = time_s()
        self._num_before = self._num_tokens = num_tokens

    def heard(self, num_tokens: int | None) -> None:
        """Notes how many tokens the hop has after one more part; None: no part follows."""
        if num_tokens is None:
            self.is_over.set()
        elif not self.limit.expired():
            num_next = 2 * num_tokens - self._num_tokens - self._num_before
            self._num_tokens = num_tokens
            computing_s, fetching_s = self.filling_seconds(max(0, num_next))
            self.limit.reschedule(min(self.until_s, self._began_s + _PATIENCE * computing_s + fetching_s))


@dataclass(frozen=True, slots=True)
class Fetches:
    """Fetches beginnings of one session's text.

    The session is opened on the server that holds the text, which finds the pages in its prefix cache, and on the hop
    as a standby. So the pages come to the hop as tokens come to any standby.
    """

    routes: Routes
    plane: DataPlane
    # A server holds one run of blocks of a session, so it gives to one hop.
    _holders: set[str] = field(init=False, default_factory=set)

    async def fetch(
        self,
        hop: common_pb2.Hop,
        chain: common_pb2.Chain,
        identity: SessionIdentity,
        held: Mapping[str, int],
        open_on: OpenOn,
        until_s: float,
    ) -> bool:
        """Fetches what another server holds of a session's text, if that is faster than to compute it.

        The hop computes what has not arrived in time (`_PATIENCE`, `until_s`), or until the other server was lost.

        Args:
            held: how many of the text's first tokens servers may hold, by id.
            until_s: when the request ends, by the event loop's clock.

        Returns:
            Whether the hop holds the session, with what has arrived, so that it can be opened there to resume.
        """
        taken = self._holders.union((each.server_id for each in chain.hops), self.routes.apart_from([hop.server_id]))
        holder = self.routes.holder_for(hop, taken, held)
        if holder is None:
            return False
        num_held = held[holder.server_id]
        computing_s, fetching_s = self.routes.filling_seconds(hop, num_held - held.get(hop.server_id, 0))
        if computing_s <= fetching_s:
            return False
        self._holders.add(holder.server_id)
        key = identity.session_id, holder.address
        until_s = min(until_s, time_s() + _PATIENCE * computing_s)
        limit = asyncio.timeout_at(until_s)
        arrival = _Arrival(partial(self.routes.filling_seconds, hop), limit, until_s)
        self.plane.fetching[key] = arrival.heard
        is_standby = False
        try:
            async with limit:
                for server in (holder, hop):
                    if not (await self.plane.connect(server.address)).takes_standbys:
                        return False
                transfer_id = secrets.token_bytes(16)
                there = await open_on(holder, num_held, b"")
                here = await open_on(hop, num_held, transfer_id)
                is_standby = True
                num_missing = there.num_cached_tokens - here.num_cached_tokens
                computing_s, fetching_s = self.routes.filling_seconds(hop, max(0, num_missing))
                # A hop does not tell of a standby that gets less than one part of a copy.
                if num_missing >= STRIDE_TOKENS and fetching_s < computing_s:
                    named = pb.Standby(
                        session_id=identity.session_id, epoch=identity.epoch, hop=hop, transfer_id=transfer_id,
                        num_tokens=here.num_cached_tokens, after_each_part=True,
                    )  # fmt: skip
                    arrival.begin(here.num_cached_tokens)
                    self.plane.notify(holder.address, named)
                    await arrival.is_over.wait()
        except (CorollaError, TimeoutError) as failure:
            reason = failure.reason if isinstance(failure, CorollaError) else "DEADLINE_EXCEEDED"
            log.info("the beginning of a text was not fetched, or not as a whole", extra={"reason": reason})
        except BaseException:
            is_standby = False
            raise
        finally:
            self.plane.fetching.pop(key, None)
            self.plane.close_session([holder] if is_standby else [holder, hop], identity)
        return is_standby
