"""The router records Events for gaps and handovers, and bounds their number."""

import pytest

from corolla.router.cluster.events import ClusterEvent, CoverageReporter, DrainReporter, PodRef
from corolla.wire.span import Span

GAP = [Span(15, 30)]


def recorded(
    reporter: CoverageReporter, states: list[tuple[float, list[Span]]], until_s: float
) -> list[tuple[float, str]]:
    """Times and reasons of the events if the reporter looks twice a second; the first state holds from the start."""
    found = []
    now_s = 0.0
    while now_s < until_s:
        uncovered = [each for since_s, each in states if since_s <= now_s][-1]
        event = reporter.look("m", uncovered, now_s)
        if event is not None:
            found.append((now_s, event.reason))
        now_s += 0.5
    return found


@pytest.mark.parametrize(
    "states, expected",
    [
        # A gap and its end; a gap at the first look; one that lasts a moment; one whose end waits for a pause.
        ([(0, []), (10, GAP), (40, [])], [(13, "SpanUncovered"), (43, "SpanRestored")]),
        ([(0, GAP)], []),
        ([(0, GAP), (20, [])], [(23, "SpanRestored")]),
        ([(0, []), (10, GAP), (12.5, [])], []),
        ([(0, []), (10, GAP), (14, [])], [(13, "SpanUncovered"), (23, "SpanRestored")]),
    ],
)
def test_a_gap_that_lasts_gives_an_event_and_so_does_its_end(
    states: list[tuple[float, list[Span]]], expected: list[tuple[float, str]]
) -> None:
    assert recorded(CoverageReporter(), states, 1000) == expected


def test_events_are_worded_for_operators() -> None:
    reporter = CoverageReporter()
    reporter.look("m", [], 0)
    reporter.look("m", [Span(0, 2), Span(15, 30)], 1)
    assert reporter.look("m", [Span(0, 2), Span(15, 30)], 4) == ClusterEvent(
        "SpanUncovered", "blocks 0:2, 15:30 of m have no ready block server", True
    )
    reporter.look("m", [], 20)
    assert reporter.look("m", [], 23) == ClusterEvent(
        "SpanRestored", "all blocks of m have a ready block server", False
    )


def test_a_span_that_flaps_for_an_hour_gives_a_handful() -> None:
    states = [(4.0 * number, GAP if number % 2 else []) for number in range(900)]
    found = recorded(CoverageReporter(), states, 4200)
    assert 3 <= len(found) <= 12
    # The last event agrees with the last state, a gap.
    assert found[-1][1] == "SpanUncovered"


def test_after_quiet_the_pauses_are_short_again() -> None:
    states = [(4.0 * number, GAP if number % 2 else []) for number in range(100)]
    states += [(400, []), (3000, GAP), (3020, [])]
    assert recorded(CoverageReporter(), states, 4000)[-2:] == [(3003, "SpanUncovered"), (3023, "SpanRestored")]


def test_the_event_of_a_flapping_span_says_so() -> None:
    reporter = CoverageReporter()
    for second in range(20):
        reporter.look("m", GAP if second % 2 else [], second)
    event = reporter.look("m", GAP, 23)
    assert event is not None
    assert "changes since the last Event" in event.message


def test_models_are_apart_and_forgotten() -> None:
    reporter = CoverageReporter()
    reporter.look("m", [], 0)
    reporter.look("n", [], 0)
    reporter.look("m", GAP, 1)
    assert reporter.look("n", [], 9) is None
    reporter.forget({"n"})
    assert reporter.look("m", GAP, 10) is None, "as at a first look"


POD = PodRef("pod-a", "uid-a")


def test_a_handover_gives_an_event_on_its_pod_at_once() -> None:
    reporter = DrainReporter()
    reporter.note(POD, 3, 0)
    assert reporter.due(0) == [
        ClusterEvent("SessionsHandedOver", "sessions that other block servers have taken over: 3", False, POD)
    ]
    assert reporter.due(1) == []


def test_sessions_without_a_receiver_make_the_event_a_warning_and_no_sessions_make_none() -> None:
    reporter = DrainReporter()
    reporter.note(PodRef("pod-b", "uid-b"), 0, 0)
    reporter.note(POD, 1, 2)
    (event,) = reporter.due(0)
    assert event.is_warning
    assert event.message.endswith("taken over: 1; left, and to be recomputed: 2")


def test_a_pod_gives_one_event_a_minute_and_counts_are_summed() -> None:
    reporter = DrainReporter()
    messages = []
    for second in range(181):
        reporter.note(POD, 1, 0)
        messages += [each.message for each in reporter.due(second)]
    assert [int(message.split()[-1]) for message in messages] == [1, 60, 60, 60]


def test_pods_that_are_gone_are_forgotten() -> None:
    reporter = DrainReporter()
    for number in range(100):
        reporter.note(PodRef(f"p{number}", f"u{number}"), 1, 0)
    assert len(reporter.due(0)) == 100
    assert reporter.due(60) == []
    assert reporter == DrainReporter()
