"""What a recovery has learned. Pure: times are passed in."""

from dataclasses import dataclass, field

from corolla.client.chain.account import Recovered
from corolla.client.chain.lost import LostServers


@dataclass(slots=True)
class Findings:
    """What one recovery has learned from attempt to attempt.

    Attributes:
        lost: the servers that it does without.
        began_s: when it began.
        incomplete_since_s: since when no chain has had the sessions open on every hop.
        forgetful: ids of the servers that no longer have the outputs that they said they keep.
        may_scratch: until a hop had no room for a scratch session.
        patience_s: how long to wait for a server that can replace a lost one.
    """

    lost: LostServers
    began_s: float
    incomplete_since_s: float = field(init=False)
    forgetful: set[str] = field(default_factory=set)
    may_scratch: bool = True
    patience_s: float = 0.0
    methods: set[str] = field(default_factory=set)
    num_recomputed_tokens: int = 0

    def __post_init__(self) -> None:
        self.incomplete_since_s = self.began_s

    def recovered(self, cause: str, now_s: float) -> Recovered:
        methods = "+".join(sorted(self.methods)) or "reopen"
        return Recovered(cause, methods, now_s - self.began_s, self.num_recomputed_tokens)
