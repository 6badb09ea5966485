"""Which sessions of a chain the gangs may count on. Pure: time is counted in departures."""

_MAX_MISSED_ROUNDS = 2


class Attendance:
    """Sessions that decode on one chain, without those that let rounds of gangs pass.

    A session whose caller does not read what it is sent has no next step, for as long as the caller likes. If gangs
    counted on it none would be complete, and each would wait until nothing is under way: the others would pay for it.

    Args:
        round_departures: gangs that leave while one goes through the chain; as many as there are under way at most.
    """

    def __init__(self, round_departures: int) -> None:
        self._max_missed = _MAX_MISSED_ROUNDS * round_departures
        self._num_departures = 0
        self._in_step: set[bytes] = set()
        # Sessions that are expected back, with the departures before they had their answer; those who wait longest
        # come first.
        self._answered: dict[bytes, int] = {}

    @property
    def num_sessions(self) -> int:
        """Sessions that wait for a gang, are under way, or are expected back."""
        return len(self._in_step) + len(self._answered)

    def come(self, session_id: bytes) -> None:
        """The session has a step to take."""
        self._answered.pop(session_id, None)
        self._in_step.add(session_id)

    def answer(self, session_id: bytes) -> None:
        """Its step is over; the next one is expected."""
        if session_id in self._in_step:
            self._in_step.remove(session_id)
            self._answered[session_id] = self._num_departures

    def leave(self, session_id: bytes) -> None:
        """No more steps of it come."""
        self._in_step.discard(session_id)
        self._answered.pop(session_id, None)

    def depart(self) -> None:
        """A gang has left. Who has missed too many is not counted until it comes again."""
        self._num_departures += 1
        while self._answered:
            session_id, num_before = next(iter(self._answered.items()))
            if self._num_departures - num_before <= self._max_missed:
                return
            del self._answered[session_id]
