"""Names standbys for open sessions, so that the loss of a hop costs a session the computation of few tokens only."""

import logging
import secrets
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from corolla.chain.reservations import ChainBinding, Reservations
from corolla.chain.rewinds import without_taken_back
from corolla.chain.routes import Routes
from corolla.chain.standby_hops import TOKENS_BETWEEN_LOOKS, StandbyHop
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import CorollaError, HopUnavailable
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.page_hashes import TextDigests

log = logging.getLogger(__name__)

LONGEST_REPLAY_S: Final = 0.15
"""In the mode `auto`, a hop gets a standby once computing its part of the text again would take longer than this."""
_MOST_BETWEEN_LOOKS: Final = 4096


class Standbys:
    """Names the standbys of all sessions of this process.

    In the mode `all` a session has standbys if servers can be found; `auto`: if its text is long; `off`: never.
    """

    def __init__(self, routes: Routes, reservations: Reservations, plane: DataPlane, tasks: TaskGroup) -> None:
        self._routes = routes
        self._reservations = reservations
        self._plane = plane
        self._tasks = tasks
        self._bindings: dict[bytes, ChainBinding] = {}
        plane.on_standby = self._on_word

    def cover(self, binding: ChainBinding, texts: Sequence[TextDigests], position: int) -> None:
        """Starts to name standbys for the hops that need one and have none, unless that is under way.

        Args:
            texts: the known texts of the binding's sessions; empty if these have no token ids.
            position: how many tokens the sessions have together, or are about to have.
        """
        standbys = binding.standbys
        if position < standbys.due_at or standbys.are_over:
            return
        mode = binding.open_options.standby
        if mode == "off":
            standbys.due_at = sys.maxsize
            return
        standbys.due_at = position + standbys.pause
        needing = list[common_pb2.Hop]()
        for hop in binding.chain.hops:
            held = standbys.by_hop.get(hop.server_id)
            if held is not None and held.is_named and self._routes.may_use(held.hop):
                continue
            least = 0 if mode == "all" else self._routes.tokens_in(LONGEST_REPLAY_S, hop)
            if position >= least:
                needing.append(hop)
            else:
                standbys.due_at = min(standbys.due_at, least)
        if needing:
            # A search that finds no server looks through all of them.
            standbys.pause = min(2 * standbys.pause, _MOST_BETWEEN_LOOKS)
            self._bindings |= dict.fromkeys((each.session_id for each in binding.identities), binding)
            for hop in needing:  # at once: a server that does not answer holds up the standby of no other hop
                self._tasks.start(self._name(binding, texts, hop), "standby of a hop")

    def drop(self, binding: ChainBinding, kept: Collection[common_pb2.Hop] = ()) -> None:
        """Frees the sessions on standbys, whose tokens are of no use any more.

        Args:
            kept: hops that keep the sessions, since one that left handed them over.
        """
        self._reservations.give_back(binding.identities, [each for each in binding.standbys.hops if each not in kept])
        binding.standbys.clear()
        for identity in binding.identities:
            self._bindings.pop(identity.session_id, None)

    async def _name(self, binding: ChainBinding, texts: Sequence[TextDigests], hop: common_pb2.Hop) -> None:
        """Names a standby for one hop: opens the sessions there, and then tells the hop."""
        standbys, identities = binding.standbys, binding.identities
        if standbys.are_over or identities != binding.open_identities or hop not in binding.chain.hops:
            return
        held = self._held_or_chosen(binding, hop)
        if held is None:
            return
        num_trusted = held.num_trusted
        transfer_ids = [secrets.token_bytes(16) for _ in identities]
        replies: Sequence[pb.Opened] = ()
        try:
            for server in (hop, held.hop):
                if not (await self._plane.connect(server.address)).takes_standbys:
                    raise HopUnavailable("a server does not stand by for sessions", server.address)
            if binding.identities is identities and standbys.by_hop.get(hop.server_id) is held:
                options = replace(binding.open_options, texts=texts)
                replies = await self._reservations.open_copy(
                    held.hop, hop, identities, options, binding.chain, transfer_ids
                )
        except CorollaError as failure:
            log.info("a server cannot stand by for a session", extra={"reason": failure.reason})
        if standbys.by_hop.get(hop.server_id) is not held:
            self._reservations.give_back(identities, [held.hop])
        elif binding.identities is not identities:
            # The sessions are opened again, maybe on this server: to give them back in their new epoch would free them
            # where they go on. The next look names the standby.
            return
        elif not replies:
            self._refuse(binding, hop)
        else:
            self._tell(binding, hop, held, replies, transfer_ids, num_trusted)

    def _tell(
        self,
        binding: ChainBinding,
        hop: common_pb2.Hop,
        held: StandbyHop,
        replies: Sequence[pb.Opened],
        transfer_ids: Sequence[bytes],
        num_trusted: Mapping[bytes, int] | None,
    ) -> None:
        """Names a standby that has opened the sessions to its hop, which copies there from now on."""
        identities = binding.identities
        if num_trusted is not None:
            self._reservations.truncate(identities, [held.hop], num_trusted)
        for identity, reply, transfer_id in zip(identities, replies, transfer_ids, strict=True):
            num_held = without_taken_back(reply, identity, binding.rewinds).num_cached_tokens
            if num_trusted is not None:
                num_held = min(num_held, num_trusted.get(identity.session_id, 0))
            named = pb.Standby(
                session_id=identity.session_id, epoch=identity.epoch, hop=held.hop, transfer_id=transfer_id,
                num_tokens=num_held, step_id=self._plane.newest_step_id,
            )  # fmt: skip
            self._plane.notify(hop.address, named)
        held.is_named, held.num_trusted, binding.standbys.pause = True, None, TOKENS_BETWEEN_LOOKS

    def _held_or_chosen(self, binding: ChainBinding, hop: common_pb2.Hop) -> StandbyHop | None:
        """The standby that a hop has, or had in an earlier epoch; else the best one that it may have."""
        standbys = binding.standbys
        held = standbys.by_hop.get(hop.server_id)
        if held is not None and self._routes.may_use(held.hop):
            return held
        if held is not None:
            self._refuse(binding, hop)
        chain = {each.server_id for each in binding.chain.hops}
        # The hop sends it tokens, and it is to take the hop's place among the others.
        apart = self._routes.apart_from(chain)
        excluded = chain.union((each.server_id for each in standbys.hops), standbys.refused, apart)
        num_tokens = binding.open_options.max_tokens * len(binding.identities)
        chosen = self._routes.standby_for(hop, excluded, num_tokens, standbys.num_placed)
        if chosen is None:
            return None
        held = StandbyHop(chosen)
        standbys.add(hop.server_id, held)
        return held

    def _refuse(self, binding: ChainBinding, hop: common_pb2.Hop) -> None:
        """Gives up a hop's standby; the sessions will not be copied to that server again."""
        standby = binding.standbys.remove(hop.server_id)
        binding.standbys.refused.add(standby.server_id)
        self._reservations.give_back(binding.identities, [standby])

    def _on_word(self, session_id: bytes, address: str, num_tokens: int) -> None:
        """Takes a hop's word that its standby holds nearly all that is settled of a session, or has lost it.

        In the second case, or if the hop cannot copy it, the session gets another standby soon.
        """
        binding = self._bindings.get(session_id)
        if binding is None:
            return
        for hop in binding.chain.hops:
            held = binding.standbys.by_hop.get(hop.server_id)
            if hop.address == address and held is not None and held.is_named:
                held.is_filled = num_tokens > 0
                if not held.is_filled:
                    self._refuse(binding, hop)
                    binding.standbys.due_at = 0
