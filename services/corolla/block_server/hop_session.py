"""One session on this hop: its request, its state, and the table of state transitions. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

from corolla.cache.prefixes import ExpectedText
from corolla.cache.session_pages import SessionPages
from corolla.chassis.errors import HopLeaving, HopSessionLost, StaleEpoch
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.span import Span

if TYPE_CHECKING:
    from corolla.block_server.adapters import LoadedAdapter
    from corolla.block_server.row_sampling import SessionSampler
    from corolla.chassis.tracing.carriers import TraceParent
    from corolla.compute.prompts import BlockPrompts

UNCLAIMED_LEASE_S: Final = 30.0
"""How long a session that another server hands over waits for its next part or for its client."""

AnyCache = TypeVar("AnyCache", bound=SessionPages)


class SessionState(Enum):
    """The state of a session on a hop. docs/architecture.md shows the states as a picture."""

    NEW = "new"
    """The session was just made and holds nothing; no table contains it yet."""
    ARRIVING = "arriving"
    """Another server hands the session over. The part that has arrived cannot be used yet."""
    STANDBY = "standby"
    """Another hop copies its session here while the answer goes on. It takes no steps until its client opens it."""
    UNCLAIMED = "unclaimed"
    """The whole session has arrived in mid-answer. Its client should open it here soon."""
    RUNNING = "running"
    """The client has opened the session. Only a running session takes steps."""
    PARKED = "parked"
    """The session's turn is over, or its client took the open back."""
    ORPHANED = "orphaned"
    """The stream on which the client opened the session has ended. To continue, the client has to open it again."""
    LEAVING = "leaving"
    """The last part of the session was read for another server while its client was in mid-answer."""
    LEAVING_PARKED = "leaving, parked"
    """The last part of the session was read for another server between two turns."""
    GONE = "gone"
    """This hop holds nothing of the session any more."""


class SessionEvent(Enum):
    """An event that changes the state of a session on a hop."""

    OPENED = "opened"
    NAMED_STANDBY = "named standby"
    """The client makes the session here the standby of another hop."""
    OFFERED = "offered"
    """Another server begins to hand the session over."""
    ARRIVED = "arrived"
    """The last part of a session in mid-answer has arrived."""
    ARRIVED_PARKED = "arrived, parked"
    """The last part of a session between two turns has arrived."""
    TURN_ENDED = "turn ended"
    STREAM_ENDED = "stream ended"
    """The stream of the session's client ended; the client may still live."""
    LAST_PART_READ = "last part read"
    """The last part was read for the server that takes the session over."""
    STAYS = "stays"
    """The session stays: the other server did not take it, or a turn began before the router knew of the move."""
    FREED = "freed"
    """The session was closed, expired or evicted."""


_S, _E = SessionState, SessionEvent

TRANSITIONS: Final[Mapping[SessionState, Mapping[SessionEvent, SessionState]]] = MappingProxyType(
    {
        _S.NEW: {_E.OPENED: _S.RUNNING, _E.OFFERED: _S.ARRIVING, _E.NAMED_STANDBY: _S.STANDBY},
        _S.STANDBY: {
            # The hop that it stands by for hands the session over: only the rest has to arrive.
            _E.OFFERED: _S.ARRIVING,
            _E.OPENED: _S.RUNNING, _E.NAMED_STANDBY: _S.STANDBY, _E.TURN_ENDED: _S.STANDBY,
            _E.STREAM_ENDED: _S.STANDBY, _E.FREED: _S.GONE,
        },
        _S.ARRIVING: {
            _E.OPENED: _S.RUNNING, _E.ARRIVED: _S.UNCLAIMED, _E.ARRIVED_PARKED: _S.PARKED,
            # The sending server says with the last part whether the session is idle.
            _E.TURN_ENDED: _S.ARRIVING, _E.STREAM_ENDED: _S.ARRIVING,
            _E.FREED: _S.GONE,
        },
        _S.UNCLAIMED: {
            _E.OPENED: _S.RUNNING, _E.TURN_ENDED: _S.PARKED, _E.STREAM_ENDED: _S.ORPHANED, _E.FREED: _S.GONE,
        },
        _S.RUNNING: {
            _E.OPENED: _S.RUNNING, _E.OFFERED: _S.ARRIVING, _E.TURN_ENDED: _S.PARKED, _E.STREAM_ENDED: _S.ORPHANED,
            _E.LAST_PART_READ: _S.LEAVING, _E.FREED: _S.GONE,
        },
        _S.PARKED: {
            _E.OPENED: _S.RUNNING, _E.OFFERED: _S.ARRIVING, _E.TURN_ENDED: _S.PARKED, _E.STREAM_ENDED: _S.ORPHANED,
            _E.LAST_PART_READ: _S.LEAVING_PARKED, _E.FREED: _S.GONE,
        },
        _S.ORPHANED: {
            _E.OPENED: _S.RUNNING, _E.OFFERED: _S.ARRIVING, _E.TURN_ENDED: _S.ORPHANED, _E.STREAM_ENDED: _S.ORPHANED,
            _E.LAST_PART_READ: _S.LEAVING_PARKED, _E.FREED: _S.GONE,
        },
        _S.LEAVING: {
            # A last part that arrived damaged is read again.
            _E.LAST_PART_READ: _S.LEAVING, _E.STAYS: _S.RUNNING,
            _E.TURN_ENDED: _S.LEAVING_PARKED, _E.STREAM_ENDED: _S.LEAVING_PARKED, _E.FREED: _S.GONE,
        },
        _S.LEAVING_PARKED: {
            # The table does not remember whether the client's stream has ended; ORPHANED is right in both cases.
            _E.LAST_PART_READ: _S.LEAVING_PARKED, _E.STAYS: _S.ORPHANED,
            _E.TURN_ENDED: _S.LEAVING_PARKED, _E.STREAM_ENDED: _S.LEAVING_PARKED, _E.FREED: _S.GONE,
        },
        _S.GONE: {},
    }
)  # fmt: skip
"""The state that follows an event in a state. An event that is not listed cannot happen in that state."""


_IDLE: Final = frozenset((_S.STANDBY, _S.PARKED, _S.ORPHANED, _S.LEAVING_PARKED))
_WITHOUT_SAMPLER: Final = _IDLE | {_S.GONE}
"""Sessions in these states keep no sampler and no adapter, which may be large; the next open brings new ones."""


class ForbiddenTransition(RuntimeError):
    """A bug of this server: an event that TRANSITIONS does not list for the session's state."""

    def __init__(self, state: SessionState, event: SessionEvent) -> None:
        super().__init__(f"a session that is {state.value} cannot be: {event.value}")


def nothing() -> None:
    """Does nothing about a change of a session."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The request to open a session on this hop. See `Open` in blocks.proto.

    A session with `prompts` shares its keys and values with no other session, whatever its text.

    Attributes:
        owner: the owner of the session; empty without mutual TLS.
        capability: the signed capability with which the owner opened the session; None without mutual TLS.
        sampler: chooses the session's tokens if this is the last hop and the client asks for that.
        stream: the number of the client's stream that opened it; 0 if another server hands the session over.
        sender: the server that hands the session over; empty if its client opens it, or without mutual TLS.
        trace: the trace span of the request that uses the session; None if the request is not traced.
        adapter_version: the adapter with which all held tokens are computed; None for the plain model.
        adapter: the same adapter, loaded; only for sessions that may take steps.
        long_factors: whether all held tokens use the long factors of a longrope embedding, not the short ones.
        standby_transfer_id: the transfer id of the tokens that fill the session, if this server is only a standby.
        write_start: the session writes to no position before this one until it is opened again.
        only_cached: whether the session holds just what the prefix cache has of its text, and takes no steps.
    """

    session_id: bytes
    epoch: int
    tenant: str
    client_id: bytes
    resume: bool
    max_tokens: int
    blocks: Span
    lease_s: float
    transient: bool
    keep_activations: bool = False
    prompts: "BlockPrompts | None" = None
    text: ExpectedText | None = None
    sampler: "SessionSampler | None" = None
    stream: int = 0
    owner: str = ""
    capability: pb.SignedCapability | None = None
    sender: str = ""
    trace: "TraceParent | None" = None
    adapter_version: AdapterVersion | None = None
    adapter: "LoadedAdapter | None" = None
    long_factors: bool = False
    standby_transfer_id: bytes = b""
    write_start: int = 0
    only_cached: bool = False

    def agrees_with(self, other: "OpenRequest") -> bool:
        """The tokens that were computed under one request are valid under the other."""
        if (self.adapter_version, self.long_factors) != (other.adapter_version, other.long_factors):
            return False
        return self.blocks == other.blocks and (self.prompts is None) == (other.prompts is None)


@dataclass(slots=True)
class RingPlace:
    """The ring on which the tokens of a session go round, as the client's first step described it.

    Attributes:
        first_address: the address of the first hop.
        route: the hops after this one.
        max_step_tokens: the most tokens of one step, draft tokens included.
        credit_end: steps may begin at positions below this.
        held_row: the row of the next step, while it waits for credit; on the last hop only.
        route_key: a key that is equal for two sessions whose rows may share a microbatch.
    """

    first_address: str
    route: Sequence[common_pb2.Hop]
    max_step_tokens: int
    credit_end: int
    held_row: pb.StepRow | None = None
    route_key: bytes = field(init=False)

    def __post_init__(self) -> None:
        ring = pb.Ring(first_address=self.first_address, max_step_tokens=self.max_step_tokens)
        self.route_key = pb.Step(route=self.route, ring=ring).SerializeToString(deterministic=True)

    @classmethod
    def from_step(cls, step: pb.Step) -> Self:
        """Reads the ring from a client's step."""
        ring = step.ring
        return cls(ring.first_address, tuple(step.route), ring.max_step_tokens, ring.credit_end)


@dataclass(eq=False, repr=False, slots=True)
class HopSession(Generic[AnyCache]):
    """One session on this hop.

    Attributes:
        version: a number that changes with each open or offer. Code that continues with a session later names the
            version that it means.
        transfer_id: the id of the transfer that fills the session, while it arrives or is a standby.
        newest_step_id: the highest id of the steps that came from its client.
        applied_step_id: the id of the newest of these steps that what is held follows from. If a step is refused, or is
            not here yet, the session may still hold tokens that its client has taken back.
        rewound_step_id: the id of the newest of these steps that took tokens back.
        newest_ring_position: the position at which the newest step of its ring began; -1 if it had none since it was
            opened.
        ring: the ring on which its tokens go round; None while they do not.
        num_settled_tokens: how many of its tokens the answer keeps, whatever becomes of the drafts after them.
        on_change: is called after each step and after each event, in the event loop or in the compute thread, for what
            copies the session elsewhere meanwhile.
        unsent_before: for each group of layers with a sliding window, the tokens before this one may lack on a standby.
        last_used_s: the time at which the session was last used.
    """

    request: OpenRequest
    cache: AnyCache
    version: int = 0
    transfer_id: bytes = b""
    newest_step_id: int = 0
    applied_step_id: int = 0
    rewound_step_id: int = 0
    newest_ring_position: int = -1
    ring: RingPlace | None = None
    num_settled_tokens: int = 0
    on_change: Callable[[], None] = field(init=False, default=nothing)
    unsent_before: dict[int, int] = field(init=False, default_factory=dict)
    last_used_s: float = 0.0
    _state: SessionState = field(init=False, default=SessionState.NEW)

    @property
    def state(self) -> SessionState:
        return self._state

    def apply(self, event: SessionEvent) -> None:
        """Enters the state that follows the event; only this method changes the state. Raises ForbiddenTransition."""
        following = TRANSITIONS[self._state].get(event)
        if following is None:
            raise ForbiddenTransition(self._state, event)
        self._state = following
        if following is not SessionState.GONE:
            # Pages that only idle sessions hold in common become available when these are evicted.
            self.cache.charge_to(None if self.is_idle else self.request.tenant)
        if following in _WITHOUT_SAMPLER:
            self.ring = None
            if self.request.sampler is not None or self.request.adapter is not None:
                self.request = replace(self.request, sampler=None, adapter=None)
        self.on_change()

    def check_open(self, request: OpenRequest) -> None:
        """Checks whether the session may be opened, or offered, again.

        The same client may open it again in the same epoch if it took the first open back. A client does that before
        any step, when another hop of its chain refuses. An open also counts as taken back if its stream has broken
        since, or if it was made on a server that handed the session over to this one.

        Raises:
            HopLeaving: another server has the session, or is getting it.
            HopSessionLost: the session belongs to another tenant or another owner.
            StaleEpoch: it was opened with a higher epoch before, or with this epoch and not taken back.
        """
        if self.is_leaving:
            raise HopLeaving("the session is handed over to another block server")
        if self.request.tenant != request.tenant or self.request.owner not in ("", request.owner):
            raise HopSessionLost("the session is not held here")
        is_over = self._state is not SessionState.RUNNING or 0 < self.request.stream < request.stream
        is_repeated = (self.request.epoch, self.request.client_id) == (request.epoch, request.client_id)
        if self.request.epoch >= request.epoch and not (is_over and is_repeated):
            raise StaleEpoch("the session was opened with this epoch or a later one")

    def check_step(self, epoch: int, client_id: bytes, blocks: Span) -> None:
        """Checks whether the session takes a step.

        An epoch ends with its turn. A step that another hop forwarded may arrive after the client's message that the
        turn is over, and must not run the session again.

        Raises:
            HopLeaving: another server has the session, or is getting it.
            HopSessionLost: another client has opened it, it was opened for other blocks, or its client has to open it
                again.
            StaleEpoch: the step belongs to another epoch, or to a turn that is over.
            AdapterNotFound: the session's adapter is no longer registered.
        """
        request, state = self.request, self._state
        if request.client_id != client_id or request.blocks != blocks:
            raise HopSessionLost("the session is not held here")
        if state is SessionState.RUNNING and request.epoch == epoch:
            if request.adapter is not None:
                request.adapter.check()
            return
        if self.is_leaving:
            raise HopLeaving("the session is handed over to another block server")
        if state is SessionState.ORPHANED and request.epoch == epoch:
            raise HopSessionLost("the stream on which the session was opened has ended")
        raise StaleEpoch("the session was opened with another epoch, or its turn is over")

    def note_step(self, epoch: int, client_id: bytes, step_id: int) -> bool:
        """Notes a step, and returns whether it comes for the first time: a session's steps have rising ids.

        A repeated step must not be computed, because that would forget the tokens of later steps. A step of another
        epoch or client counts as new here, and `check_step` refuses it.
        """
        if not self.is_open_as(epoch, client_id):
            return True
        is_new = step_id > self.newest_step_id
        self.newest_step_id = max(self.newest_step_id, step_id)
        return is_new

    def note_ring_step(self, epoch: int, client_id: bytes, position: int) -> bool:
        """Does for a step of a ring what `note_step` does: these steps begin at rising positions within one epoch."""
        if not self.is_open_as(epoch, client_id):
            return True
        if position <= self.newest_ring_position:
            return False
        self.newest_ring_position = position
        return True

    def is_open_as(self, epoch: int, client_id: bytes) -> bool:
        """This client opened the session in this epoch."""
        return self.request.epoch == epoch and self.request.client_id == client_id

    def is_filled_by(self, epoch: int, transfer_id: bytes) -> bool:
        is_same = (self.request.epoch, self.transfer_id) == (epoch, transfer_id)
        return self._state in (SessionState.ARRIVING, SessionState.STANDBY) and is_same

    @property
    def is_idle(self) -> bool:
        """The session is not in mid-answer, so that it may be evicted when other sessions need its pages."""
        return self._state in _IDLE

    @property
    def has_turn_ended(self) -> bool:
        """Its client has ended the turn, and may begin another one."""
        return self._state is SessionState.PARKED or self._state is SessionState.LEAVING_PARKED

    @property
    def is_leaving(self) -> bool:
        """Another server is getting the session or has it, so that it cannot be opened or used here."""
        return self._state in (SessionState.LEAVING, SessionState.LEAVING_PARKED)

    @property
    def is_unclaimed(self) -> bool:
        """Another server is handing the session over, or did so, and its client has not opened it here yet."""
        return self._state in (SessionState.ARRIVING, SessionState.UNCLAIMED)

    @property
    def lease_deadline_s(self) -> float:
        lease_s = self.request.lease_s
        return self.last_used_s + (min(lease_s, UNCLAIMED_LEASE_S) if self.is_unclaimed else lease_s)

    @property
    def num_pages(self) -> int:
        """The number of pages that the session was promised."""
        return self.cache.num_pages
