"""The times that a client service waits for others; they are the same in every deployment."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ClientBounds:
    """Limits for callers, block servers and the issuer of tokens.

    Attributes:
        ping_after_s: seconds of silence after which a block server is pinged.
        silence_s: seconds of silence after which a block server counts as lost. A frozen server delays answers by this.
        open_timeout_s: seconds that a live block server may take to open a session before it is avoided; far more than
            a server with a long step before the opening needs.
        http_read_timeout_s: seconds until the head of an HTTP request must have arrived, and again for its body.
        farewell_s: how many seconds before its deadline a caller gets the error that there is no answer.
        reader_timeout_s: seconds that a caller may read nothing, with full buffers, before its answer ends.
        quota_timeout_s: seconds that a router may take to count quotas before the client service enforces its share.
        max_watchers: callers that may watch the placement at a time, a quarter of them of one tenant where there are
            several. All get the same events, so this bounds connections, not work.
        token_skew_s: seconds by which the clocks of the issuer and of this service may differ.
        issuer_refresh_s: seconds until the issuer's key set is fetched again; a token with an unknown key causes it
            earlier, but never twice in a thirtieth of this time.
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
