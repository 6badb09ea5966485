from hypothesis import given
from hypothesis import strategies as st

from corolla.cache.runs import FreeRuns


def num_runs(ids: list[int]) -> int:
    return sum(1 for before, each in zip([None, *ids], ids, strict=False) if before is None or each != before + 1)


@given(st.data())
def test_ids_are_given_once_and_in_as_few_runs_as_there_can_be(data: st.DataObject) -> None:
    runs, free, held = FreeRuns(24), set(range(24)), list[int]()
    for _ in range(data.draw(st.integers(1, 20))):
        gives_back: bool = data.draw(st.booleans())
        if held and gives_back:
            back = sorted(data.draw(st.sets(st.sampled_from(held), min_size=1)))
            runs.release(back)
            free |= set(back)
            held = [each for each in held if each not in back]
        elif free:
            count = data.draw(st.integers(1, len(free)))
            sizes = sorted((len(run) for run in maximal_runs(free)), reverse=True)
            grows: bool = data.draw(st.booleans())
            taken = runs.allocate(count, grows=grows)
            assert len(taken) == len(set(taken)) == count
            assert set(taken) <= free
            needed = next(number for number in range(1, len(sizes) + 1) if sum(sizes[:number]) >= count)
            assert num_runs(taken) <= needed
            free -= set(taken)
            held += taken
        assert len(runs) == len(free)


def maximal_runs(ids: set[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for each in sorted(ids):
        if runs and runs[-1][-1] == each - 1:
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def test_the_smallest_run_that_is_large_enough_is_taken() -> None:
    runs = FreeRuns(20)
    runs.allocate(20)
    runs.release([0, 1, 2, 3, 4, 5, 8, 9, 10, 15, 16])
    assert runs.allocate(3) == [8, 9, 10]
    assert runs.allocate(7) == [0, 1, 2, 3, 4, 5, 15]


def test_the_id_after_the_last_one_is_preferred() -> None:
    runs = FreeRuns(10)
    assert runs.allocate(2) == [0, 1]
    assert runs.allocate(1) == [2]
    assert runs.allocate(2, after=1) == [3, 4]
    runs.release([2])
    assert runs.allocate(3, after=4) == [5, 6, 7]
    assert runs.allocate(3, after=1) == [2, 8, 9]


def test_holders_that_grow_together_have_runs_of_their_own() -> None:
    runs = FreeRuns(64)
    held: list[list[int]] = [[], [], [], []]
    for _ in range(8):
        for ids in held:
            ids += runs.allocate(1, after=ids[-1] if ids else None, grows=True)
    assert [num_runs(ids) for ids in held] == [1] * 4
