"""One session on this hop: what was asked for it, where it stands, and the table of how that may change. Pure."""

from collections.abc import Mapping, Sequence
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
"""How long a session that another server handed over, or began to, waits for the rest or for its client."""

AnyCache = TypeVar("AnyCache", bound=SessionPages)


class SessionState(Enum):
    """Where a session on a hop stands. docs/architecture.md shows the states as a picture."""

    NEW = "new"
    """It was made just now and holds nothing; no table has it yet."""
    ARRIVING = "arriving"
    """Another server hands it over. What is here cannot be used yet."""
    UNCLAIMED = "unclaimed"
    """All of it has arrived in mid-answer. Its client should open it here at any moment."""
    RUNNING = "running"
    """Its client opened it. It takes steps, as in no other state."""
    PARKED = "parked"
    """Its turn is over, or its client took the open back."""
    ORPHANED = "orphaned"
    """The stream on which its client opened it has ended. The client, if it lives, has to open it again."""
    LEAVING = "leaving"
    """The last part of it was read for another server while its client was in mid-answer."""
    LEAVING_PARKED = "leaving, parked"
    """The last part of it was read for another server between two turns."""
    GONE = "gone"
    """This hop holds nothing of it any more."""


class SessionEvent(Enum):
    """What happens to a session on a hop."""

    OPENED = "opened"
    OFFERED = "offered"
    """Another server begins to hand it over."""
    ARRIVED = "arrived"
    """The last part is here, of a session in mid-answer."""
    ARRIVED_PARKED = "arrived, parked"
    """The last part is here, of a session between two turns."""
    TURN_ENDED = "turn ended"
    STREAM_ENDED = "stream ended"
    """Of its client, which may live or not."""
    LAST_PART_READ = "last part read"
    """For the server that takes it over."""
    STAYS = "stays"
    """The other server did not take it, or a turn began before the router knew of the move."""
    FREED = "freed"
    """Closed, expired or evicted."""


_S, _E = SessionState, SessionEvent

TRANSITIONS: Final[Mapping[SessionState, Mapping[SessionEvent, SessionState]]] = MappingProxyType(
    {
        _S.NEW: {_E.OPENED: _S.RUNNING, _E.OFFERED: _S.ARRIVING},
        _S.ARRIVING: {
            _E.OPENED: _S.RUNNING, _E.ARRIVED: _S.UNCLAIMED, _E.ARRIVED_PARKED: _S.PARKED,
            # The server that sends it knows, and says with the last part, how it stands.
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
            # A part that arrived damaged is read again.
            _E.LAST_PART_READ: _S.LEAVING, _E.STAYS: _S.RUNNING,
            _E.TURN_ENDED: _S.LEAVING_PARKED, _E.STREAM_ENDED: _S.LEAVING_PARKED, _E.FREED: _S.GONE,
        },
        _S.LEAVING_PARKED: {
            # Whether its client's stream still stands is not remembered; to be opened again is right in both cases.
            _E.LAST_PART_READ: _S.LEAVING_PARKED, _E.STAYS: _S.ORPHANED,
            _E.TURN_ENDED: _S.LEAVING_PARKED, _E.STREAM_ENDED: _S.LEAVING_PARKED, _E.FREED: _S.GONE,
        },
        _S.GONE: {},
    }
)  # fmt: skip
"""What follows on an event in a state. What is not listed cannot happen."""


_WITHOUT_SAMPLER: Final = frozenset((_S.PARKED, _S.ORPHANED, _S.LEAVING_PARKED, _S.GONE))
"""Only an open takes a session out of these, and brings sampler and adapter; the old ones may hold much memory."""


class ForbiddenTransition(RuntimeError):
    """A mistake of this server: an event that the table does not have in this state."""

    def __init__(self, state: SessionState, event: SessionEvent) -> None:
        super().__init__(f"a session that is {state.value} cannot be: {event.value}")


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What a client service asks of this hop. See `Open` in blocks.proto.

    Keys and values of a session with `prompts` are its own: no other text has them, however it begins.

    Attributes:
        owner: whose session it is; empty where nobody is asked.
        capability: by which its owner opened it; None where nobody is asked.
        sampler: who chooses its tokens, where this is the last hop and is to do that.
        stream: number of that on which it was asked; 0 where another server hands the session over.
        sender: the server that hands it over; empty where its client opens it, or nobody is asked.
        trace: the span that the session is used for; None where that is not traced.
        adapter_version: with which all that it holds is computed; None: with none.
        adapter: the same, loaded; only of sessions that may take steps.
        long_factors: whether all that it holds has the long factors of a longrope embedding, or the short ones.
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

    def agrees_with(self, other: "OpenRequest") -> bool:
        """Whether a session that was computed under one request can continue under the other."""
        if (self.adapter_version, self.long_factors) != (other.adapter_version, other.long_factors):
            return False
        return self.blocks == other.blocks and (self.prompts is None) == (other.prompts is None)


@dataclass(slots=True)
class RingPlace:
    """Where a session's tokens go round, as the step says by which its client began.

    Attributes:
        first_address: of the first hop.
        route: the hops behind this one.
        max_step_tokens: of one step, draft tokens included.
        credit_end: steps may begin at positions below this.
        held_row: what the next step begins with, while it waits for credit; on the last hop only.
        route_key: equal where all of this is that a microbatch has in common.
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
    def of(cls, step: pb.Step) -> Self:
        """As a client's step says."""
        ring = step.ring
        return cls(ring.first_address, tuple(step.route), ring.max_step_tokens, ring.credit_end)


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A snapshot of a session.

    Attributes:
        num_tokens: whose keys and values are held.
        num_pages: that were promised to it.
    """

    session_id: bytes
    state: SessionState
    epoch: int
    version: int
    num_tokens: int
    num_pages: int


class HopSession(Generic[AnyCache]):
    """One session on this hop.

    Attributes:
        version: another one for each open or offer of any session of this hop. Whoever goes on with a session later
            names the version that it means.
        transfer_id: of the handover that fills it, while it arrives.
        newest_step_id: of the steps that came from its client.
        newest_ring_position: where the newest step of its ring began, since it was opened; -1 before the first.
        ring: how its tokens go round; None while they do not.
        last_used_s: when it was used last.
    """

    __slots__ = (
        "_state", "cache", "last_used_s", "newest_ring_position", "newest_step_id", "request", "ring", "transfer_id",
        "version",
    )  # fmt: skip

    def __init__(self, request: OpenRequest, cache: AnyCache) -> None:
        self.request = request
        self.cache = cache
        self.version = 0
        self.transfer_id = b""
        self.newest_step_id = 0
        self.newest_ring_position = -1
        self.ring: RingPlace | None = None
        self.last_used_s = 0.0
        self._state = SessionState.NEW

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def facts(self) -> SessionFacts:
        request, cache = self.request, self.cache
        return SessionFacts(
            request.session_id, self._state, request.epoch, self.version, cache.num_tokens, cache.num_pages
        )

    def apply(self, event: SessionEvent) -> None:
        """Takes the state that follows; nothing else changes it. Raises ForbiddenTransition."""
        following = TRANSITIONS[self._state].get(event)
        if following is None:
            raise ForbiddenTransition(self._state, event)
        self._state = following
        if following in _WITHOUT_SAMPLER:
            self.ring = None
            if self.request.sampler is not None or self.request.adapter is not None:
                self.request = replace(self.request, sampler=None, adapter=None)

    def check_open(self, request: OpenRequest) -> None:
        """Whether it may be opened, or offered, once more.

        Its client may do so in the same epoch. A client takes an open back, before any step, when another hop of its
        chain refuses; then it tries again. As good as taken back is what it opened on a stream that has broken since,
        or on a server that left.

        Raises:
            HopLeaving: another server has it, or gets it now.
            HopSessionLost: it belongs to another tenant, or somebody else opened it.
            StaleEpoch: it was opened with a higher epoch before, or with this one and not taken back.
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
        """Whether it takes a step.

        An epoch ends with its turn: a step that was forwarded by another hop may come after the client's own word that
        the turn is over, and must not wake the session.

        Raises:
            HopLeaving: another server has it, or gets it now.
            HopSessionLost: it is another client's, was opened for other blocks, or its client has to open it again.
            StaleEpoch: the step is of another epoch, or of a turn that is over.
            AdapterNotFound: its adapter was taken out.
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
        """Whether a step comes for the first time: a session's steps have rising ids.

        One that comes again must not be computed: it would forget what was computed since. Of another epoch or client,
        `check_step` refuses it.
        """
        if not self.is_open_as(epoch, client_id):
            return True
        is_new = step_id > self.newest_step_id
        self.newest_step_id = max(self.newest_step_id, step_id)
        return is_new

    def note_ring_step(self, epoch: int, client_id: bytes, position: int) -> bool:
        """As `note_step` of a step that goes round: in one epoch these begin at rising positions."""
        if not self.is_open_as(epoch, client_id):
            return True
        if position <= self.newest_ring_position:
            return False
        self.newest_ring_position = position
        return True

    def is_open_as(self, epoch: int, client_id: bytes) -> bool:
        """Whether its client opened it in this epoch."""
        return self.request.epoch == epoch and self.request.client_id == client_id

    def is_filled_by(self, epoch: int, transfer_id: bytes) -> bool:
        """Whether the parts of this handover belong here."""
        is_same = (self.request.epoch, self.transfer_id) == (epoch, transfer_id)
        return self._state is SessionState.ARRIVING and is_same

    @property
    def is_idle(self) -> bool:
        """Not in mid-answer: it may be evicted when other sessions need its pages."""
        return self._state in (SessionState.PARKED, SessionState.ORPHANED, SessionState.LEAVING_PARKED)

    @property
    def has_turn_ended(self) -> bool:
        """Its client has said so, and may begin another one."""
        return self._state is SessionState.PARKED or self._state is SessionState.LEAVING_PARKED

    @property
    def is_leaving(self) -> bool:
        """Another server gets it, or has it already; until that is settled it can be neither opened nor used here."""
        return self._state in (SessionState.LEAVING, SessionState.LEAVING_PARKED)

    @property
    def is_unclaimed(self) -> bool:
        """Handed over by another server, wholly or in part, and its client has not opened it here."""
        return self._state in (SessionState.ARRIVING, SessionState.UNCLAIMED)

    @property
    def lease_deadline_s(self) -> float:
        lease_s = self.request.lease_s
        return self.last_used_s + (min(lease_s, UNCLAIMED_LEASE_S) if self.is_unclaimed else lease_s)

    @property
    def num_pages(self) -> int:
        """Pages that it was promised."""
        return self.cache.num_pages
