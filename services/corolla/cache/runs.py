"""Keeps free page ids as maximal runs, so that whole runs can be handed out. Pure."""

from bisect import bisect_left, insort
from collections.abc import Sequence


class FreeRuns:
    """A set of ids, which contains all of `[0, num_ids)` at first.

    Invariant: runs are maximal, so two runs never touch; `_by_size` lists each run once, smallest first.
    """

    def __init__(self, num_ids: int) -> None:
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._num_ids = 0
        self._insert(0, num_ids)

    def __len__(self) -> int:
        """The number of ids in the set."""
        return self._num_ids

    def allocate(self, num_ids: int, after: int | None = None, *, grows: bool = False) -> list[int]:
        """Removes ids in few runs, and returns them: the smallest run that is large enough, else the largest runs.

        Args:
            num_ids: how many ids to remove; the set must have as many.
            after: the ids that follow this id are taken first, because they continue the run of its holder.
            grows: whether the holder may take more ids later. Then a new run begins in the middle of the largest one,
                so that the ids behind it stay free as long as there are others.
        """
        if num_ids > self._num_ids:
            raise ValueError(f"cannot take {num_ids} of {self._num_ids} free ids")
        taken: list[int] = []
        if after is not None and num_ids and after + 1 in self._ends:
            taken += self._cut(after + 1, num_ids)
        while len(taken) < num_ids:
            missing = num_ids - len(taken)
            best = bisect_left(self._by_size, (missing, 0))
            size, start = self._by_size[-1 if grows else min(best, len(self._by_size) - 1)]
            if grows and (skipped := min(size // 2, size - missing)) > 0:
                self._split(start, start + skipped)
                start += skipped
            taken += self._cut(start, missing)
        return taken

    def release(self, ids: Sequence[int]) -> None:
        """Adds ids, which must not be in the set."""
        index = 0
        while index < len(ids):
            end = index + 1
            while end < len(ids) and ids[end] == ids[end - 1] + 1:
                end += 1
            self._insert(ids[index], ids[end - 1] + 1)
            index = end

    def _cut(self, start: int, num_ids: int) -> range:
        end = self._ends[start]
        self._remove(start, end)
        cut = min(end, start + num_ids)
        if cut < end:
            self._add(cut, end)
        return range(start, cut)

    def _split(self, start: int, middle: int) -> None:
        """Divides a run in two, so that the second one can be cut."""
        end = self._ends[start]
        self._remove(start, end)
        self._add(start, middle)
        self._add(middle, end)

    def _insert(self, start: int, end: int) -> None:
        if (before := self._starts.get(start)) is not None:
            self._remove(before, start)
            start = before
        if (behind := self._ends.get(end)) is not None:
            self._remove(end, behind)
            end = behind
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        self._ends[start] = end
        self._starts[end] = start
        insort(self._by_size, (end - start, start))
        self._num_ids += end - start

    def _remove(self, start: int, end: int) -> None:
        del self._ends[start], self._starts[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        self._num_ids -= end - start
