"""Timeouts and limits of a client service that are the same in every deployment."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ClientBounds:
    """Limits for callers, block servers, routers and the issuer of tokens.

    Attributes:
        ping_after_s: seconds of silence after which a block server is pinged.
        silence_s: seconds of silence after which a block server counts as lost. A frozen server delays answers by that
            long.
        open_timeout_s: seconds that a live block server may take to open a session before it is avoided; a server that
            first finishes a long step needs far less.
        http_read_timeout_s: seconds until the head of an HTTP request must have arrived, and again for its body.
        farewell_s: how many seconds before a call's deadline the service stops waiting for a chain, so that the error
            still reaches the caller.
        reader_timeout_s: seconds after which an answer ends because its caller reads nothing and all buffers are full.
        quota_timeout_s: seconds that a router may take to count quotas; then the client service counts its own share.
        max_watchers: callers that may watch the placement at a time; where there are several tenants, each may have a
            quarter of these. All watchers get the same events, so the limit bounds connections, not work.
        token_skew_s: seconds by which the clocks of the issuer and of this service may differ.
        issuer_refresh_s: seconds until the issuer's key set is fetched again. A token with an unknown key causes an
            earlier fetch, but at most one in a thirtieth of this time.
    """

    ping_after_s: float = 1.0
    silence_s: float = 2.0
    open_timeout_s: float = 15.0
    http_read_timeout_s: float = 30.0
    farewell_s: float = 0.2
    reader_timeout_s: float = 120.0
    quota_timeout_s: float = 0.5
    max_watchers: int = 64
    token_skew_s: float = 30.0
    issuer_refresh_s: float = 300.0


USUAL_BOUNDS: Final = ClientBounds()
