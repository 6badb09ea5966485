"""Mistakes that a change could make, each as a patch of the real code. The simulation must find every one of them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar
from unittest.mock import patch

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.handover import receiver
from corolla.block_server.handover.sender import HandoverSender
from corolla.block_server.handover.standbys import Standbys as CopiesToStandbys
from corolla.block_server.hop_session import HopSession, OpenRequest, SessionEvent
from corolla.block_server.ring.last_hop import LastHop
from corolla.block_server.sessions import SessionTable
from corolla.cache.prefixes import PrefixPages
from corolla.cache.store import SessionCache
from corolla.cache.transfer import CheckedCopy
from corolla.chain import recovery_plan
from corolla.chain.recovery import Recovery
from corolla.chain.recovery_plan import ReplaySegment
from corolla.chain.replay import Replayer
from corolla.chain.reservations import ChainBinding
from corolla.chain.routes import Routes
from corolla.chain.session import ChainSession
from corolla.chain.standby_hops import StandbyHops
from corolla.chain.streams import DataPlane
from corolla.chain.token_stream import RoundTokens, TokenStream
from corolla.chassis.errors import HopLate, HopSessionLost, NoChain
from corolla.decoding.sampler_record import SamplerRecord
from corolla.v1 import blocks_pb2 as pb

MUTANTS: Final[dict[str, list[tuple[Any, str, Callable[..., Any]]]]] = {}
"""Which methods each mutant replaces, by the mutants' names."""
Wrong = TypeVar("Wrong", bound=Callable[..., Any])


def _mutant(name: str, owner: Any, method: str) -> Callable[[Wrong], Wrong]:
    """What follows takes the place of a class's method, or of a module's function; it gets the right one first."""

    def note(wrong: Wrong) -> Wrong:
        MUTANTS.setdefault(name, []).append((owner, method, wrong))
        return wrong

    return note


def _bound(wrong: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **options: wrong(right, self, *args, **options)


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Makes the mistake for as long as the context lasts."""
    with ExitStack() as stack:
        for owner, method, wrong in MUTANTS[name]:
            stack.enter_context(patch.object(owner, method, _bound(wrong, getattr(owner, method))))
        yield


@_mutant("no fence", TokenStream, "push")
def _no_fence(_right: Any, self: TokenStream, row: pb.StepRow, sampled: pb.SampledRow) -> bool:
    """A client accepts a result of any step of the session, of any epoch and position."""
    self._rounds.append(RoundTokens(row.num_result_tokens - 1, sampled))
    self._wake()
    return True


@_mutant("stale epoch", SessionTable, "for_step")
def _stale_epoch(right: Any, self: Any, session_id: bytes, epoch: int, *args: Any, **options: Any) -> Any:
    """A hop computes steps of epochs that are over."""
    held = self.get(session_id)
    return right(self, session_id, held.request.epoch if held is not None else epoch, *args, **options)


@_mutant("stale epoch", SessionTable, "has_ended")
def _never_ended(_right: Any, self: Any, session_id: bytes, epoch: int) -> bool:
    return False


@_mutant("step again", SessionTable, "note_step")
def _step_again(_right: Any, self: Any, *_step: Any) -> bool:
    """A hop computes a step as often as it comes."""
    return True


@_mutant("round again", HopSession, "note_ring_step")
def _round_again(right: Any, self: HopSession[Any], *step: Any) -> bool:
    """A token goes round as often as it comes."""
    right(self, *step)
    self.newest_ring_position = -1
    return True


@_mutant("credit forgotten", LastHop, "on_credit")
def _credit_forgotten(_right: Any, self: LastHop, credit: Any, peer: Any) -> None:
    """The last hop does not take in what a client grants."""


_FIRST_ADDRESSES: Final[dict[bytes, str]] = {}


@_mutant("first hop of before", LastHop, "send_next")
def _first_hop_of_before(right: Any, self: LastHop, step: pb.Step, rows: Sequence[pb.StepRow]) -> None:
    """A session that is opened anew goes round to the first hop that it had before."""
    for row in rows:
        step.ring.first_address = _FIRST_ADDRESSES.setdefault(row.session_id, step.ring.first_address)
    right(self, step, rows)


@_mutant("position zero", recovery_plan, "start_for")
def _position_zero(_right: Any, _opened: pb.Opened, position: int) -> int:
    """A hop that was opened again is taken to hold everything, though it begins at nothing."""
    return position


@_mutant("not closed", ChainSession, "close")
def _not_closed(_right: Any, self: ChainSession) -> None:
    """Sessions are not closed at the end of an answer."""


@_mutant("pages not freed", SessionTable, "_free")
def _pages_not_freed(_right: Any, self: Any, held: Any) -> None:
    """A session that is freed keeps its pages."""
    del self._sessions[held.request.session_id]
    self._on_forget(held.request.session_id)


@_mutant("leases for ever", SessionTable, "expire")
def _leases_for_ever(_right: Any, self: Any, now_s: float) -> int:
    """Leases do not end."""
    return 0


@_mutant("token twice", ChainSession, "decode")
async def _token_twice(right: Any, self: Any, reader: Any) -> Any:
    """A step that came back is written into the history twice."""
    recovered, newest_id = self._budget.num_attempts, self._newest_id
    taken = await right(self, reader)
    if self._budget.num_attempts > recovered:
        self._history.append([newest_id], is_prompt=False)
    return taken


@_mutant("replay too short", Replayer, "_steps")
def _replay_too_short(right: Any, self: Replayer, binding: Any, sequence: Any, segment: ReplaySegment) -> Any:
    """A replay leaves its first token out."""
    return right(self, binding, sequence, replace(segment, start=segment.start + 1))


@_mutant("no quarantine", Routes, "_replace_now")
def _no_quarantine(right: Any, self: Routes, chain: Any, lost: Any, *args: Any, **options: Any) -> Any:
    """Servers that failed are not left out: a recovery goes back to the one that it lost."""
    return right(self, chain, (), *args, **options)


@_mutant("others' prefix", PrefixPages, "find")
def _others_prefix(right: Any, self: PrefixPages, key: Any) -> int | None:
    """The beginning of any text is taken for that of any other."""
    found: int | None = right(self, key)
    others = (entry.pages[0] for known, entry in self._entries.items() if known.group == key.group)
    return found if found is not None else next(others, None)


@_mutant("boundary activations shifted", BoundaryActivations, "read")
def _boundary_activations_shifted(
    right: Any, self: BoundaryActivations, session_id: bytes, start: int, end: int
) -> Any:
    """A hop sends boundary activations of the wrong positions again."""
    shift = 1 if start > self.range(session_id)[0] else 0
    return right(self, session_id, start - shift, end - shift)


@_mutant("always stays", SessionTable, "cancel_leaving")
def _always_stays(_right: Any, self: Any, session_id: bytes, version: int) -> None:
    """A session whose handover failed always stays, in any state."""
    held = self.get(session_id)
    if held is not None:
        held.apply(SessionEvent.STAYS)


@_mutant("sampler one token off", SamplerRecord, "message")
def _sampler_one_token_off(right: Any, self: SamplerRecord, max_tokens: int | None = None) -> pb.Sampler:
    """A hop that makes a sampler anew stands one token too early."""
    sampler: pb.Sampler = right(self, max_tokens)
    sampler.position = max(0, sampler.position - 1)
    return sampler


@_mutant("sampler kept", SessionTable, "open")
def _sampler_kept(right: Any, self: Any, request: OpenRequest, now_s: float) -> Any:
    """A hop that opens a session once more goes on with the sampler that it has."""
    held = self.get(request.session_id)
    if held is not None and held.request.sampler is not None:
        request = replace(request, sampler=held.request.sampler)
    return right(self, request, now_s)


@_mutant("answer forgotten by penalties", SamplerRecord, "message")
def _answer_forgotten_by_penalties(right: Any, self: SamplerRecord, max_tokens: int | None = None) -> pb.Sampler:
    """A sampler that is made anew does not know what the answer has so far."""
    sampler: pb.Sampler = right(self, max_tokens)
    del sampler.token_ids[sampler.num_prompt_tokens :]
    return sampler


@_mutant("growth forgotten", Recovery, "grow")
async def _growth_forgotten(right: Any, self: Recovery, binding: Any, *args: Any) -> None:
    """A session forgets for how many tokens it has got room while it grew."""
    held = binding.open_options
    await right(self, binding, *args)
    binding.open_options = held


@_mutant("late is silent", DataPlane, "late_hop")
def _late_is_silent(_right: Any, self: DataPlane, addresses: Iterable[str]) -> HopLate | None:
    """A hop loses a session whose token is late although it answers."""
    return next((HopLate("late", address) for address in addresses), None)


@_mutant("drafts settled", SessionTable, "for_step")
def _drafts_settled(right: Any, self: Any, *args: Any, num_drafts: int = 0, **options: Any) -> Any:
    """A hop copies drafts to a standby as if the answer kept them."""
    return right(self, *args, **options)


@_mutant("part not written", receiver, "write_tokens")
def _part_not_written(_right: Any, cache: SessionCache, checked: CheckedCopy) -> None:
    """A part counts that was not written to the end."""
    copy = checked.copy
    cache.truncate(copy.position)
    if copy.num_tokens:
        cache.prepare(copy.position, copy.num_tokens)
        cache.commit_copied(copy.end)


_EVICTED: Final[dict[bytes, HopSession[Any]]] = {}


@_mutant("evicted standby filled", SessionTable, "get_arriving")
def _evicted_standby_filled(right: Any, self: Any, session_id: bytes, *args: Any) -> HopSession[Any]:
    """A part is written for a standby that was evicted."""
    try:
        _EVICTED[session_id] = right(self, session_id, *args)
    except HopSessionLost:
        if session_id not in _EVICTED:
            raise
    return _EVICTED[session_id]


# The following mistakes change no token, but what a loss costs.


@_mutant("standby never filled", HandoverSender, "copy_settled")
async def _standby_never_filled(_right: Any, self: HandoverSender, *_copy: Any) -> int:
    """A hop has a standby and copies nothing there."""
    await asyncio.Event().wait()
    return 0


@_mutant("push stops", CopiesToStandbys, "_until_due")
async def _push_stops(_right: Any, self: CopiesToStandbys, *_session: Any) -> None:
    """A hop stops copying once its standby has caught up."""
    await asyncio.Event().wait()


@_mutant("another replacement", Routes, "replace_lost")
async def _another_replacement(right: Any, self: Routes, *args: Any, **options: Any) -> Any:
    """A hop that is lost is replaced as if it had no standby."""
    return await right(self, *args, **{**options, "standbys": {}})


@_mutant("text computed again", recovery_plan, "start_for")
def _text_computed_again(_right: Any, opened: pb.Opened, position: int) -> int:
    """A hop that lacks some tokens gets the whole text again."""
    return position if opened.num_cached_tokens >= position >= opened.min_position else 0


_STANDBYS: Final[set[str]] = set()


@_mutant("standby taken for filled", ChainBinding, "rebind")
def _standby_taken_for_filled(right: Any, self: ChainBinding, opened: ChainBinding) -> None:
    """A standby that is behind is treated as filled, and what it lacks is not computed."""
    _STANDBYS.update(each.server_id for each in self.standbys.hops)
    right(self, opened)
    for hop, on_hop in zip(self.chain.hops, self.open_replies, strict=True):
        for number, reply in enumerate(on_hop if hop.server_id in _STANDBYS else ()):
            reply.num_cached_tokens = max(each[number].num_cached_tokens for each in self.open_replies)


@_mutant("both lost", Recovery, "_open_again")
async def _both_lost(right: Any, self: Recovery, job: Any) -> None:
    """A session ends that loses a hop together with its standby."""
    by_hop = job.binding.standbys.by_hop
    if any(server_id in job.lost and each.hop.server_id in job.lost for server_id, each in by_hop.items()):
        raise NoChain("a hop and its standby were lost")
    await right(self, job)


@_mutant("standby not named again", StandbyHops, "distrust")
def _standby_not_named_again(right: Any, self: StandbyHops, positions: Any) -> None:
    """After a loss or a move, standbys count as named, though no hop copies to them in the new epoch."""
    right(self, positions)
    for each in self.by_hop.values():
        each.is_named = True


@_mutant("standby stays behind", StandbyHops, "settle")
def _standby_stays_behind(right: Any, self: StandbyHops, chain: Any) -> Any:
    """After a loss or a move, a session has a standby again only when it looks for one the next time."""
    yield from right(self, chain)
    self.due_at = 64
