"""Events: what happened is told, and nothing floods."""

from corolla.router.cluster.events import HandoverLedger, Happening, PodRef, SpanLedger
from corolla.wire.span import Span

GAP = [Span(15, 30)]


def told(ledger: SpanLedger, states: list[tuple[float, list[Span]]], until_s: float) -> list[tuple[float, str]]:
    """When what was told, where the ledger looks twice a second; the first state is so from the beginning."""
    found = []
    now_s = 0.0
    while now_s < until_s:
        uncovered = [each for since_s, each in states if since_s <= now_s][-1]
        happening = ledger.look("m", uncovered, now_s)
        if happening is not None:
            found.append((now_s, happening.reason))
        now_s += 0.5
    return found


def test_a_gap_and_its_end_are_told_once_each() -> None:
    assert told(SpanLedger(), [(0, []), (10, GAP), (40, [])], 1000) == [(13, "SpanUncovered"), (43, "SpanRestored")]


def test_the_words() -> None:
    ledger = SpanLedger()
    ledger.look("m", [], 0)
    ledger.look("m", [Span(0, 2), Span(15, 30)], 1)
    assert ledger.look("m", [Span(0, 2), Span(15, 30)], 4) == Happening(
        "SpanUncovered", "blocks 0:2, 15:30 of m have no ready block server", True
    )
    ledger.look("m", [], 20)
    assert ledger.look("m", [], 23) == Happening("SpanRestored", "all blocks of m have a ready block server", False)


def test_what_is_so_at_the_first_look_is_not_told_but_its_end_is() -> None:
    assert told(SpanLedger(), [(0, GAP)], 1000) == []
    assert told(SpanLedger(), [(0, GAP), (20, [])], 1000) == [(23, "SpanRestored")]


def test_a_moment_is_not_told() -> None:
    assert told(SpanLedger(), [(0, []), (10, GAP), (12.5, [])], 1000) == []


def test_an_end_soon_after_is_told_after_a_pause() -> None:
    assert told(SpanLedger(), [(0, []), (10, GAP), (14, [])], 1000) == [(13, "SpanUncovered"), (23, "SpanRestored")]


def test_a_span_that_flaps_for_an_hour_gives_a_handful() -> None:
    states = [(4.0 * number, GAP if number % 2 else []) for number in range(900)]
    found = told(SpanLedger(), states, 4200)
    assert 3 <= len(found) <= 12
    # In the end what is so was told: the last state is a gap.
    assert found[-1][1] == "SpanUncovered"


def test_after_quiet_the_pauses_are_short_again() -> None:
    states = [(4.0 * number, GAP if number % 2 else []) for number in range(100)]
    states += [(400, []), (3000, GAP), (3020, [])]
    assert told(SpanLedger(), states, 4000)[-2:] == [(3003, "SpanUncovered"), (3023, "SpanRestored")]


def test_flapping_is_said() -> None:
    ledger = SpanLedger()
    for second in range(20):
        ledger.look("m", GAP if second % 2 else [], second)
    happening = ledger.look("m", GAP, 23)
    assert happening is not None
    assert "changes since the last Event" in happening.message


def test_models_are_apart_and_forgotten() -> None:
    ledger = SpanLedger()
    ledger.look("m", [], 0)
    ledger.look("n", [], 0)
    ledger.look("m", GAP, 1)
    assert ledger.look("n", [], 9) is None
    ledger.forget({"n"})
    assert ledger.look("m", GAP, 10) is None, "as at a first look"


POD = PodRef("pod-a", "uid-a")


def test_a_handover_is_told_at_once_about_its_pod() -> None:
    ledger = HandoverLedger()
    ledger.note(POD, 3, 0)
    assert ledger.due(0) == [
        Happening("SessionsHandedOver", "sessions that other block servers have taken over: 3", False, POD)
    ]
    assert ledger.due(1) == []


def test_sessions_that_nobody_took_make_it_a_warning() -> None:
    ledger = HandoverLedger()
    ledger.note(POD, 1, 2)
    (happening,) = ledger.due(0)
    assert happening.is_warning
    assert happening.message.endswith("taken over: 1; left, and to be recomputed: 2")


def test_who_had_no_sessions_is_not_told_of() -> None:
    ledger = HandoverLedger()
    ledger.note(POD, 0, 0)
    assert ledger.due(0) == []


def test_one_pod_is_told_of_once_a_minute_and_nothing_is_lost() -> None:
    ledger = HandoverLedger()
    messages = []
    for second in range(181):
        ledger.note(POD, 1, 0)
        messages += [each.message for each in ledger.due(second)]
    assert [int(message.split()[-1]) for message in messages] == [1, 60, 60, 60]


def test_pods_that_are_gone_are_forgotten() -> None:
    ledger = HandoverLedger()
    for number in range(100):
        ledger.note(PodRef(f"p{number}", f"u{number}"), 1, 0)
    assert len(ledger.due(0)) == 100
    assert ledger.due(60) == []
    assert not ledger._pods
