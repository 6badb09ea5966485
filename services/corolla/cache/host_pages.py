"""Remembers which evicted page of the prefix cache lies where in the memory of the machine. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from corolla.cache.prefixes import PrefixKey
from corolla.cache.runs import FreeRuns


@dataclass(slots=True)
class _Place:
    """The place of an evicted page's contents.

    Attributes:
        page: the page that still has them, since nothing was written to it; None once they were copied.
        slot: their slot in the memory of the machine; None until they are copied.
    """

    page: int | None
    slot: int | None = None


class HostPages:
    """The pages that the prefix cache evicted, and their slots in the memory of the machine.

    An evicted page is copied only before something is written to it. Texts that were used least recently are dropped
    first, and each from its end.

    Invariants: no key has both a page and a slot; keys with a slot and free slots add up to the slots, of which at
    least as many are free as keys wait to be copied.

    Args:
        num_slots: how many pages the memory takes, at least 1.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = FreeRuns(num_slots)
        # In order of use, least recently used first.
        self._places: dict[PrefixKey, _Place] = {}
        self._waiting: dict[int, PrefixKey] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def has_waiting(self) -> bool:
        """Some evicted pages were not copied yet."""
        return bool(self._waiting)

    def evicted(self, key: PrefixKey, page: int) -> None:
        """Notes that a page was evicted. Its contents stay until something is written to it."""
        place = self._places.pop(key, None)
        if place is None or place.slot is None:
            if place is not None and place.page is not None:
                del self._waiting[place.page]
            if len(self._places) == self.num_slots:
                self._drop(next(iter(self._places)))
            place = _Place(page)
            self._waiting[page] = key
        self._places[key] = place

    def overwritten(self, page: int) -> None:
        """Notes that a page has other contents. If it waited to be copied, it is lost."""
        if (key := self._waiting.get(page)) is not None:
            self._drop(key)

    def save(self, pages: Iterable[int]) -> list[tuple[int, int]]:
        """Gives slots to those of the pages that wait. Returns pairs of page and slot, which the caller has to copy."""
        waiting = sorted(page for page in pages if page in self._waiting)
        pairs = list(zip(waiting, sorted(self._free.allocate(len(waiting))), strict=True)) if waiting else []
        for page, slot in pairs:
            place = self._places[self._waiting.pop(page)]
            place.page, place.slot = None, slot
        return pairs

    def renew(self, keys: Sequence[PrefixKey]) -> None:
        """Makes these keys, in the order of their text, the last ones to be dropped."""
        for key in reversed(keys):
            if (place := self._places.pop(key, None)) is not None:
                self._places[key] = place

    def page_of(self, key: PrefixKey) -> int | None:
        """The page that waits to be copied under this key."""
        return None if (place := self._places.get(key)) is None else place.page

    def slot_of(self, key: PrefixKey) -> int | None:
        """The slot of a key that was copied."""
        return None if (place := self._places.get(key)) is None else place.slot

    def _drop(self, key: PrefixKey) -> None:
        place = self._places.pop(key)
        if place.page is not None:
            del self._waiting[place.page]
        if place.slot is not None:
            self._free.release([place.slot])
