"""Parts start in the order of their table and stop in the reverse order, whatever fails between."""

import asyncio

import pytest

from corolla.chassis.parts import Part, Parts


class Diary:
    """Parts that write down when they start and stop."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def part(self, name: str, *needs: str, fails: str = "") -> Part:
        def write(event: str) -> None:
            self.events.append(f"{event} {name}")
            if event == fails:
                raise RuntimeError(f"{name} does not {event}")

        async def start() -> None:
            await asyncio.sleep(0)
            write("start")

        return Part(name, start, needs, lambda: write("stop"))

    def made(self, name: str) -> Part:
        """A part that the constructor of the service makes."""
        return Part(name, stop=lambda: self.events.append(f"stop {name}"))


@pytest.fixture
def diary() -> Diary:
    return Diary()


async def test_parts_stop_in_the_reverse_order(diary: Diary) -> None:
    parts = Parts(diary.made("port"), diary.part("store"), diary.part("cache", "store", "port"), Part("empty"))
    await parts.start()
    assert parts.started == ["port", "empty", "store", "cache"]
    await parts.stop()
    await parts.stop()
    assert diary.events == ["start store", "start cache", "stop cache", "stop store", "stop port"]


async def test_parts_below_still_run_while_one_stops() -> None:
    seen: list[list[str]] = []
    parts = Parts(*(Part(name, stop=lambda: seen.append([*parts.started])) for name in ("store", "cache")))
    await parts.stop()
    assert (seen, parts.started) == ([["store", "cache"], ["store"]], [])


async def test_after_a_failure_what_has_started_stops_in_the_reverse_order(diary: Diary) -> None:
    parts = Parts(
        diary.made("port"), diary.part("a"), diary.part("b", "a"), diary.part("c", "b", fails="start"), diary.part("d")
    )
    with pytest.raises(RuntimeError, match="c does not start"):
        await parts.start()
    await parts.stop()
    assert diary.events == ["start a", "start b", "start c", "stop b", "stop a", "stop port"]


async def test_what_the_constructor_made_stops_without_a_start(diary: Diary) -> None:
    await Parts(diary.made("port"), diary.part("a", "port")).stop()
    assert diary.events == ["stop port"]


async def test_a_part_that_does_not_stop_keeps_no_other_from_stopping(diary: Diary) -> None:
    parts = Parts(diary.part("a"), diary.part("b", fails="stop"), diary.part("c"))
    await parts.start()
    with pytest.raises(RuntimeError, match="b does not stop"):
        await parts.stop()
    assert diary.events[-3:] == ["stop c", "stop b", "stop a"]


@pytest.mark.parametrize(
    "needs",
    [{"a": ("b",), "b": ("c",), "c": ("a",)}, {"a": ("a",)}, {"a": (), "b": ("unknown",)}, {"a": ("b",), "b": ()}],
    ids=["a circle", "itself", "an unknown part", "a part below"],
)
def test_a_table_that_cannot_start_in_its_order_is_refused(diary: Diary, needs: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="stands twice, or above one that it needs"):
        Parts(*(diary.part(name, *each) for name, each in needs.items()))


def test_a_name_stands_once(diary: Diary) -> None:
    with pytest.raises(ValueError, match="'a' stands twice"):
        Parts(diary.part("a"), diary.part("a"))
