"""For how long a client service waits for others: what every deployment has alike."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ClientBounds:
    """What bounds callers, block servers and the issuer of tokens.

    Attributes:
        ping_after_s: of silence, then a block server is asked whether it lives.
        silence_s: of silence, then it counts as lost: two seconds of an answer are what the loss of a frozen one costs.
        open_timeout_s: that a block server which lives may take to open a session, then it is avoided; far more than
            one needs that has a long step before it.
        http_read_timeout_s: in which the head of an HTTP request must have come, and then its body.
        farewell_s: before its deadline, a caller is notified that there will be no answer.
        reader_timeout_s: that a caller may take nothing of what it is sent, with full buffers; then its answer ends.
        quota_timeout_s: that a router may take to count quotas, then the client service enforces its share.
        max_watchers: callers that watch the placement at a time, a quarter of them of one tenant where there are
            several. They have one event in common, so that this bounds connections and not work.
        token_skew_s: by which the issuer's clock and this one may differ.
        issuer_refresh_s: until the issuer's key set is fetched again; when a token names a key that is not known,
            sooner, though never twice in a thirtieth of it.
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
