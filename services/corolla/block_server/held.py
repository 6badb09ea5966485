"""What a client service asks of this hop for one session, and what this hop knows of it."""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from corolla.block_server.kv.prefixes import ExpectedText
from corolla.block_server.kv.session_pages import SessionPages
from corolla.block_server.prompts import BlockPrompts
from corolla.wire.span import Span

UNCLAIMED_LEASE_S: Final = 30.0
"""How long a session that another server handed over, or began to, waits for the rest or for its client."""

AnyCache = TypeVar("AnyCache", bound=SessionPages)


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What a client service asks of this hop. See `Open` in blocks.proto.

    Keys and values of a session with `prompts` are its own: no other text has them, however it begins.

    Attributes:
        stream: number of that on which it was asked; 0 where another server hands the session over.
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
    keep_outputs: bool = False
    prompts: BlockPrompts | None = None
    text: ExpectedText | None = None
    stream: int = 0

    def agrees_with(self, other: "OpenRequest") -> bool:
        """Whether what was computed under one request can go on under the other."""
        return self.blocks == other.blocks and (self.prompts is None) == (other.prompts is None)


@dataclass(slots=True)
class HopSession(Generic[AnyCache]):
    """One session on this hop."""

    request: OpenRequest
    cache: AnyCache
    touched_s: float
    is_idle: bool = False
    transfer_id: bytes = b""
    """Of the handover that fills it: what is here cannot be used yet. Empty: it is whole."""
    is_copy: bool = False
    """Another server handed it over, and no client has opened it here since."""
    is_forsaken: bool = False
    """Its client's stream ended. The client, if it lives, has to open it again."""
    is_leaving: bool = False
    """It is being handed over to another server, or was, and takes no steps."""

    def makes_way_for(self, request: OpenRequest) -> bool:
        """Whether its client may open it once more in the same epoch.

        A client takes an open back, before any step, when another hop of its chain refuses; then it tries again. As
        good as taken back is what it opened on a stream that has broken since, or on a server that left.
        """
        is_over = self.is_idle or self.is_copy or 0 < self.request.stream < request.stream
        return is_over and (self.request.epoch, self.request.client_id) == (request.epoch, request.client_id)

    @property
    def is_arriving(self) -> bool:
        return bool(self.transfer_id)

    @property
    def is_unclaimed(self) -> bool:
        """Somebody is in the middle of an answer, and should open it here at any moment."""
        return self.is_copy and not self.is_idle

    @property
    def lease_deadline_s(self) -> float:
        lease_s = self.request.lease_s
        return self.touched_s + (min(lease_s, UNCLAIMED_LEASE_S) if self.is_unclaimed else lease_s)

    @property
    def num_pages(self) -> int:
        """Pages that it was promised."""
        return self.cache.num_pages
