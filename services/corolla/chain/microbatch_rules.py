"""When waiting decode steps leave as a microbatch, and how many of them. Pure: time is counted in microbatches sent.

A chain of `h` hops is kept busy by `h` microbatches that follow each other. So each is an `h`-th of the sessions that
decode, and leaves as soon as it is complete; a smaller one leaves only when nothing is under way to wait for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

_MAX_MISSED_ROUNDS = 2


class ActiveSessions:
    """Sessions that decode on one chain, without those that let rounds of microbatches pass.

    A session whose caller does not read what it is sent has no next step, for as long as the caller likes. If
    microbatches counted on it none would be complete, and each would wait until nothing is under way.

    Args:
        num_per_round: microbatches that are sent while one goes through the chain: as many as may be under way.
    """

    def __init__(self, num_per_round: int) -> None:
        self._max_missed = _MAX_MISSED_ROUNDS * num_per_round
        self._num_sent = 0
        self._in_step: set[bytes] = set()
        # Sessions that are expected back, with the number of microbatches sent before they had their answer; the one
        # that waits longest comes first.
        self._answered: dict[bytes, int] = {}

    @property
    def num_sessions(self) -> int:
        """Sessions that wait for a microbatch, are under way, or are expected back."""
        return len(self._in_step) + len(self._answered)

    def begin_step(self, session_id: bytes) -> None:
        """The session has a step to take."""
        self._answered.pop(session_id, None)
        self._in_step.add(session_id)

    def end_step(self, session_id: bytes) -> None:
        """Its step is over; the next one is expected."""
        if session_id in self._in_step:
            self._in_step.remove(session_id)
            self._answered[session_id] = self._num_sent

    def remove(self, session_id: bytes) -> None:
        """No more steps of it come."""
        self._in_step.discard(session_id)
        self._answered.pop(session_id, None)

    def note_sent(self) -> None:
        """A microbatch was sent. A session that missed too many does not count until its next step."""
        self._num_sent += 1
        while self._answered:
            session_id, num_before = next(iter(self._answered.items()))
            if self._num_sent - num_before <= self._max_missed:
                return
            del self._answered[session_id]


@dataclass(frozen=True, slots=True)
class MicrobatchRules:
    """Bounds the microbatches of one chain: `max_under_way` at a time, one for each hop, and `max_tokens` of each.

    A single step may have as many tokens as a microbatch.
    """

    max_under_way: int
    max_tokens: int

    def share(self, num_sessions: int) -> int:
        """How many steps make a microbatch complete, where so many sessions decode."""
        return -(-max(num_sessions, 1) // self.max_under_way)

    def num_leaving(self, waiting: Sequence[int], num_sessions: int, num_under_way: int, *, may_come: bool) -> int:
        """How many of the waiting steps leave now, the first ones; 0 while they should wait.

        Args:
            waiting: tokens of each waiting step, in the order in which they came.
            num_sessions: that decode on this chain, waiting or not.
            num_under_way: microbatches that have not come back.
            may_come: whether an incomplete microbatch waits for further steps even if nothing is under way.
        """
        if not waiting or num_under_way >= self.max_under_way:
            return 0
        share = self.share(num_sessions)
        totals = takewhile(lambda total: total <= self.max_tokens, accumulate(waiting[:share]))
        num_fitting = max(1, sum(1 for _ in totals))
        is_complete = len(waiting) >= share
        return num_fitting if is_complete or not (num_under_way or may_come) else 0
