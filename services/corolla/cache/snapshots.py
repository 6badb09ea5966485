"""Keeps recurrent states at the ends of pages, so that other sessions continue from there. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

States = TypeVar("States")

_SHARE_OF_UNNAMED: Final = 4
"""States without a name keep no named ones out of three quarters of the places."""


class StateSnapshots(Generic[States]):
    """The states of all layers at the ends of whole pages, in at most `num_places` places.

    The name of a page stands for the text up to its end, and so for the state there. Pages of an answer have no names
    while it goes on, so the state at the end of its newest page waits for one.

    The states that were used least recently go first. Of one prompt, those at earlier ends go before the one at its
    last.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._named: OrderedDict[bytes, States] = OrderedDict()
        self._unnamed: OrderedDict[Hashable, tuple[int, States]] = OrderedDict()

    def __contains__(self, name: object) -> bool:
        return name in self._named

    def __len__(self) -> int:
        return len(self._named) + len(self._unnamed)

    def use(self, name: bytes) -> States:
        """The states with this name, which now are the last to go. Raises KeyError if there are none."""
        self._named.move_to_end(name)
        return self._named[name]

    def keep(self, name: bytes, states: States, after: bytes | None = None) -> bool:
        """Keeps states under a name. Returns whether named states went for them.

        Args:
            after: the name of the states at an earlier end of the same prompt; they become the first to go.
        """
        if after is not None and after in self._named:
            self._named.move_to_end(after, last=False)
        self._named[name] = states
        self._named.move_to_end(name)
        return self._fit()

    def keep_unnamed(self, session: Hashable, position: int, states: States) -> bool:
        """Keeps the states of a session at a position, in place of those that it had at an earlier one.

        Returns:
            Whether named states went for them.
        """
        self._unnamed[session] = position, states
        self._unnamed.move_to_end(session)
        return self._fit()

    def unnamed_position(self, session: Hashable) -> int:
        """The position of the session's states that have no name; 0: there are none."""
        return self._unnamed[session][0] if session in self._unnamed else 0

    def give_name(self, session: Hashable, name: bytes) -> bool:
        """Names the states of a session that have no name; see `keep`. Raises KeyError if there are none."""
        _, states = self._unnamed.pop(session)
        return self.keep(name, states)

    def drop_unnamed(self, session: Hashable) -> None:
        """Forgets the states of a session that have no name."""
        self._unnamed.pop(session, None)

    def _fit(self) -> bool:
        # One of two places, or of three, is for answers.
        most_unnamed = max(self._num_places // _SHARE_OF_UNNAMED, min(1, self._num_places - 1))
        num_named = len(self._named)
        while len(self) > self._num_places:
            if len(self._unnamed) > most_unnamed or not self._named:
                self._unnamed.popitem(last=False)
            else:
                self._named.popitem(last=False)
        return len(self._named) < num_named
