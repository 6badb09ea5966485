"""Sessions that hops handed to others. Their clients follow between two steps, or when a step is refused for it."""

import asyncio
from collections.abc import Iterable
from typing import Final

from corolla.client.chain.identity import SessionIdentity
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2

_NUM_REMEMBERED: Final = 4096
_PATIENCE_S: Final = 5.0


class Moves:
    """What hops told of sessions that were not opened again since."""

    def __init__(self) -> None:
        # By session and address of the hop that told it, the oldest first.
        self._told: dict[tuple[bytes, str], pb.Moved] = {}
        self._news = asyncio.Event()
        self._gone: set[str] = set()

    def told(self, moved: pb.Moved, address: str) -> None:
        """A hop says who has the session now; without a hop, that it kept it after all."""
        self._told.pop((moved.session_id, address), None)
        self._told[moved.session_id, address] = moved
        if len(self._told) > _NUM_REMEMBERED:
            del self._told[next(iter(self._told))]
        self._news.set()
        self._news = asyncio.Event()

    def concerns(self, chain: common_pb2.Chain, identity: SessionIdentity) -> bool:
        """Whether a hop of the chain handed the session over."""
        return bool(self._told) and any(self._hop(hop.address, identity) is not None for hop in chain.hops)

    async def settled(self, address: str, identities: Iterable[SessionIdentity]) -> None:
        """Waits, not for ever, until the hop has said what became of all these sessions."""
        waiting = {(identity.session_id, address) for identity in identities}
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while not waiting <= self._told.keys() and address not in self._gone:
                    await self._news.wait()
        except TimeoutError:
            return  # the server has other things to do, or is gone; they are looked for elsewhere

    def reachable(self, address: str, *, is_so: bool) -> None:
        """A server that is gone says nothing any more."""
        if is_so:
            self._gone.discard(address)
            return
        self._gone.add(address)
        self._news.set()
        self._news = asyncio.Event()

    def followed(self, chain: common_pb2.Chain, identities: Iterable[SessionIdentity]) -> common_pb2.Chain:
        """The chain with those hops in place that have the sessions now."""
        identities = tuple(identities)
        hops = []
        for hop in chain.hops:
            # Sessions that travel together are handed over one by one; what is elsewhere is replayed.
            hops.append(next((found for each in identities if (found := self._hop(hop.address, each))), hop))
        return common_pb2.Chain(hops=hops, fingerprint=chain.fingerprint)

    def forget(self, identities: Iterable[SessionIdentity]) -> None:
        """The sessions were opened anew: what was told of them before counts no longer."""
        gone = {identity.session_id for identity in identities}
        for key in [key for key in self._told if key[0] in gone]:
            del self._told[key]

    def _hop(self, address: str, identity: SessionIdentity) -> common_pb2.Hop | None:
        moved = self._told.get((identity.session_id, address))
        is_known = moved is not None and moved.HasField("hop") and moved.epoch <= identity.epoch
        return moved.hop if moved is not None and is_known else None
