"""What a client service asks of this hop for one session, and what this hop knows of it."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from corolla.block_server.kv.prefixes import ExpectedText
from corolla.block_server.kv.session_pages import SessionPages
from corolla.block_server.prompts import BlockPrompts
from corolla.wire.span import Span

AnyCache = TypeVar("AnyCache", bound=SessionPages)


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What a client service asks of this hop. See `Open` in blocks.proto.

    Keys and values of a session with `prompts` are its own: no other text has them, however it begins.
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


@dataclass(slots=True)
class HopSession(Generic[AnyCache]):
    """One session on this hop."""

    request: OpenRequest
    cache: AnyCache
    lease_deadline_s: float
    is_idle: bool = False
    is_arriving: bool = False
    """Another server is handing it over, and is not done: what is here cannot be used yet."""
    is_copy: bool = False
    """Another server handed it over, and no client has opened it here."""
    is_leaving: bool = False
    """It is being handed over to another server, or was, and takes no steps."""

    @property
    def num_pages(self) -> int:
        """Pages that it was promised."""
        return self.cache.num_pages
