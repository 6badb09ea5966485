"""Remembers the sessions that hops handed over. Clients follow them between two steps, or after a refused step."""

import asyncio
import contextlib
from collections.abc import Callable, Container, Iterable
from typing import Final

from corolla.chain.identity import SessionIdentity
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2

_NUM_REMEMBERED: Final = 4096
_PATIENCE_S: Final = 5.0
# When a server dies, another hop's fault may arrive a moment before this process notices its own broken stream.
_MOMENT_S: Final = 0.25


class Handovers:
    """The handovers that hops reported.

    A report counts only while the session is open on that hop in the epoch that the report names. Nothing was computed
    elsewhere in that epoch, so the other server holds exactly what that hop held.

    Args:
        connected: the addresses of the servers that have a stream; `on_news` tells of one that has lost it.
    """

    def __init__(self, connected: Container[str]) -> None:
        self._connected = connected
        # The reports by session id and address of the hop that sent them, the oldest first.
        self._notices: dict[tuple[bytes, str], pb.Moved] = {}
        self._news = asyncio.Event()

    def on_moved(self, moved: pb.Moved, address: str) -> None:
        """Records a hop's report: another server has a session now, or the hop has kept the session after all."""
        self._notices.pop((moved.session_id, address), None)
        self._notices[moved.session_id, address] = moved
        if len(self._notices) > _NUM_REMEMBERED:
            del self._notices[next(iter(self._notices))]
        self.on_news()

    def on_step_refused(self, address: str) -> None:
        """Forgets a hop's reports of kept sessions: it refused a step, so it hands a session over and reports later."""
        for key in [key for key, moved in self._notices.items() if key[1] == address and not moved.HasField("hop")]:
            del self._notices[key]

    async def is_disconnected(self, address: str) -> bool:
        """The stream to a server is broken, or breaks within a fraction of a second."""
        await self._wait(lambda: address not in self._connected, _MOMENT_S)
        return address not in self._connected

    async def wait_until_settled(self, address: str, identities: Iterable[SessionIdentity]) -> None:
        """Waits, for a few seconds at most, until the hop has reported the outcome for all these sessions."""
        waiting = {(identity.session_id, address) for identity in identities}
        # A server that stays silent is busy or gone: the sessions recover elsewhere.
        await self._wait(lambda: waiting <= self._notices.keys() or address not in self._connected, _PATIENCE_S)

    async def _wait(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    await self._news.wait()

    def affect(self, chain: common_pb2.Chain, identities: Iterable[SessionIdentity]) -> bool:
        """A hop of the chain handed one of these sessions over."""
        if not self._notices:
            return False
        return any(self._hop(hop, each) is not None for each in identities for hop in chain.hops)

    def redirect(self, chain: common_pb2.Chain, identities: Iterable[SessionIdentity]) -> common_pb2.Chain:
        """Returns the chain with each hop that handed a session over replaced by the hop that has the session now.

        The sessions `identities` are open on `chain`. A hop hands the sessions of a batch over one by one, maybe to
        different servers; the chain then follows one of them, and the others are replayed. A server holds one run of
        blocks of a session, so a server that is in the chain already does not get a second hop.
        """
        identities = tuple(identities)
        taken = {hop.server_id for hop in chain.hops}
        hops: list[common_pb2.Hop] = []
        for hop in chain.hops:
            found = next((found for each in identities if (found := self._hop(hop, each))), hop)
            hops.append(hop if found.server_id in taken else found)
            taken.add(found.server_id)
        redirected = common_pb2.Chain()
        redirected.CopyFrom(chain)
        redirected.ClearField("hops")
        redirected.hops.extend(hops)
        return redirected

    def hops_holding(self, chain: common_pb2.Chain, identity: SessionIdentity) -> list[common_pb2.Hop]:
        """All hops that may hold a session: its chain's, and servers that took it over from them."""
        return [*chain.hops, *(moved for hop in chain.hops if (moved := self._hop(hop, identity)) is not None)]

    def forget(self, identities: Iterable[SessionIdentity]) -> None:
        """Drops the reports about sessions that were opened again or have ended."""
        gone = {identity.session_id for identity in identities}
        for key in [key for key in self._notices if key[0] in gone]:
            del self._notices[key]

    def _hop(self, hop: common_pb2.Hop, identity: SessionIdentity) -> common_pb2.Hop | None:
        moved = self._notices.get((identity.session_id, hop.address))
        if moved is None or not moved.HasField("hop") or moved.epoch != identity.epoch or moved.hop.span != hop.span:
            return None
        return moved.hop

    def on_news(self) -> None:
        """Wakes the tasks that wait for a server's report or its end."""
        self._news.set()
        self._news = asyncio.Event()
