"""The ready servers of a placement, as plans need them. Pure.

Placements of large fleets change several times a second, most often in a few servers. So what plans need is kept from
one placement to the next one, and made anew only for servers that have changed.
"""

from collections.abc import Mapping

from corolla.planning.apart import ALL_TOGETHER, Apart, pairs_apart
from corolla.planning.candidates import Candidates
from corolla.planning.planner import Candidate
from corolla.planning.replicas import Replicas
from corolla.v1 import router_pb2 as pb


class ReadyServers:
    """The servers of one placement.

    Args:
        fingerprint: Only servers with these weights may be in a chain; empty: any.

    Attributes:
        placed: All servers by id.
        ids: The ids of the ready ones by address.
        replicas: The ready ones in groups.
        apart: The servers that do not reach each other.
    """

    def __init__(self, fingerprint: str = "") -> None:
        self.placed: Mapping[str, pb.PlacedServer] = {}
        self.ids: Mapping[str, str] = {}
        self.replicas = Replicas()
        self.apart: Apart = ALL_TOGETHER
        self._candidates = Candidates(fingerprint)
        self._reporters: set[str] = set()

    @property
    def by_id(self) -> Mapping[str, Candidate]:
        """The ready servers by id, without booked loads, in the order in which equal ones are chosen."""
        return self.replicas.by_id

    def take(self, placed: Mapping[str, pb.PlacedServer], turn: float) -> None:
        """Takes the next placement.

        Args:
            placed: All servers by id. They must not be changed later.
            turn: Where this planner begins among equal servers; see `in_turn`.
        """
        news = [server_id for server_id, each in placed.items() if self.placed.get(server_id) is not each]
        self.placed = placed
        changed = self._candidates.take(placed, news)
        self.replicas.update(changed, turn)
        if changed:
            self.ids = {each.address: each.server_id for each in self.by_id.values()}
        self._reporters = {server_id for server_id in self._reporters.difference(news) if server_id in placed}
        self._reporters.update(server_id for server_id in news if placed[server_id].load.unreachable)
        self.apart = Apart(pairs_apart(placed.values())) if self._reporters else ALL_TOGETHER
