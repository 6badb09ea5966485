"""Which spans a server keeps beside its own, and which server takes a lost span over."""

from typing import Any

import pytest

from corolla.planning.spares import MOST_SPARE_SPANS, Takeover, fitting, spans_to_keep, takeover
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span

READY, JOINING, DRAINING = pb.SERVER_STATE_READY, pb.SERVER_STATE_JOINING, pb.SERVER_STATE_DRAINING


def placed(server_id: str, span: str, *spares: str, **facts: Any) -> pb.PlacedServer:
    server = pb.ServerDescription(
        server_id=server_id, address=f"{server_id}:1", fingerprint=facts.pop("fingerprint", "f"),
        movable=facts.pop("movable", True), decode_tokens_per_second=100, prefill_tokens_per_second=1000,
    )  # fmt: skip
    load = pb.ServerLoad(
        spare_spans=[Span.parse(each).to_message() for each in spares],
        num_tokens_at_risk=facts.pop("at_risk", 0), start_seconds_left=facts.pop("seconds_left", 0.0),
    )  # fmt: skip
    return pb.PlacedServer(server=server, span=Span.parse(span).to_message(), load=load, **{"state": READY, **facts})


def kept(*servers: pb.PlacedServer, before: tuple[str, ...] = (), twin: bool = True) -> list[str]:
    """What `own` keeps; it holds 0:4 or less, as its twin does."""
    others = (placed("twin", "0:4"),) if twin else ()
    return [str(each) for each in spans_to_keep([*servers, *others], "own", [Span.parse(each) for each in before])]


def test_single_copies_are_kept_first_then_what_is_kept_then_what_no_other_keeps_then_the_dearest() -> None:
    own = placed("own", "0:4")
    assert kept(own) == []
    assert kept(placed("a", "4:6"), before=("4:6", "2:8")) == ["2:8", "4:6"], "a placement without it says nothing"
    single, twice = placed("a", "8:10"), [placed("b", "4:6", at_risk=10), placed("c", "4:6")]
    assert kept(own, *twice, single) == ["8:10", "4:6"]
    other = [placed("d", "6:8", at_risk=900), placed("e", "6:8")]
    assert kept(own, *twice, *other) == ["6:8", "4:6"], "the loss of a server with more tokens costs more"
    assert kept(own, *twice, *other, before=("4:6",)) == ["4:6", "6:8"], "loads waver"
    assert kept(own, *twice, *other, placed("f", "0:4", "6:8")) == ["4:6", "6:8"]
    assert kept(own, *twice, *other, single, before=("4:6",))[0] == "8:10"


def test_only_ready_servers_of_the_same_weights_have_spans_to_keep() -> None:
    own = placed("own", "0:4")
    joining, leaving = placed("a", "4:6", state=JOINING), placed("b", "6:8", state=DRAINING)
    within, foreign, lost = placed("c", "1:3"), placed("d", "4:8", fingerprint="g"), placed("e", "4:8", suspected=True)
    assert kept(own, joining, leaving, within, foreign, lost) == []
    many = [placed(f"s{number}", f"{number}:{number + 5}") for number in range(40)]
    assert len(kept(own, *many)) == MOST_SPARE_SPANS


def test_a_lost_span_stays_kept_until_others_hold_its_blocks() -> None:
    own, third = placed("own", "0:4"), placed("a", "6:8")
    assert kept(own, third, before=("4:6",)) == ["4:6", "6:8"]
    assert kept(own, third, placed("b", "4:6", suspected=True), before=("4:6",)) == ["4:6", "6:8"]
    assert kept(own, third, placed("b", "3:6"), before=("4:6",)) == ["3:6", "6:8"]


def test_a_server_that_may_not_leave_reads_no_further_spans() -> None:
    own, other = placed("own", "0:4"), placed("a", "4:6")
    assert kept(own, other, twin=False) == []
    assert kept(own, other, placed("b", "0:3"), twin=False) == []
    assert kept(own, other, placed("b", "0:4", suspected=True), twin=False) == []
    assert kept(own, other, placed("b", "6:8"), before=("4:6",), twin=False) == ["4:6"]


def test_spans_are_kept_as_far_as_memory_goes() -> None:
    small, large, last = Span(0, 1), Span(1, 9), Span(9, 11)
    sizes = {small: 1, large: 8, last: 2}
    assert fitting([large, small, last], sizes, 100) == [large, small, last]
    assert fitting([large, small, last], sizes, 3) == [small, last]
    assert fitting([large, small, last], sizes, -5) == []


def taken(*servers: pb.PlacedServer, too_long: str = "") -> Takeover | None:
    return takeover(servers, 8, lambda _, span: str(span) != too_long)


SPARE = placed("spare", "0:4", "4:8")
TWIN = placed("twin", "0:4")


def test_a_spare_takes_over_at_once_what_no_server_has() -> None:
    assert taken(SPARE, TWIN) == Takeover("spare", Span(4, 8), at_once=True)
    assert taken(SPARE, TWIN, placed("a", "4:8")) is None
    assert taken(SPARE, TWIN, placed("a", "4:8", suspected=True)) is None, "it may live"
    assert taken(SPARE, TWIN, placed("a", "4:8", fingerprint="g")) == Takeover("spare", Span(4, 8), at_once=True)
    assert taken(SPARE, TWIN, placed("a", "4:8", state=DRAINING)) == Takeover("spare", Span(4, 8), at_once=False)
    part = placed("a", "4:6", state=DRAINING)
    assert taken(SPARE, TWIN, part) == Takeover("spare", Span(4, 8), at_once=True), "6:8 are lost"


@pytest.mark.parametrize("seconds_left, is_awaited", [(0.0, False), (1.0, True), (30.0, False)])
def test_a_server_that_joins_soon_is_awaited(seconds_left: float, is_awaited: bool) -> None:
    joining = placed("a", "4:8", state=JOINING, seconds_left=seconds_left)
    assert (taken(SPARE, TWIN, joining) is None) is is_awaited


def test_no_spare_leaves_blocks_that_it_alone_holds() -> None:
    assert taken(SPARE) is None
    assert taken(SPARE, placed("twin", "0:4", suspected=True)) is None
    assert taken(SPARE, placed("twin", "0:4", state=JOINING)) is None
    assert taken(SPARE, placed("twin", "0:3")) is None
    assert taken(placed("spare", "0:4", "3:8"), placed("twin", "0:3")) is not None, "the span that it takes has block 3"


@pytest.mark.parametrize(
    "spare",
    [
        placed("spare", "0:4"), placed("spare", "0:4", "4:8", movable=False), placed("spare", "0:4", "2:4"),
        placed("spare", "0:4", "4:8", suspected=True), placed("spare", "0:4", "4:8", state=JOINING),
    ],
)  # fmt: skip
def test_a_server_without_the_span_or_that_may_not_move_takes_nothing_over(spare: pb.PlacedServer) -> None:
    assert taken(spare, TWIN, placed("third", "0:4")) is None
    assert taken(SPARE, TWIN, too_long="4:8") is None
    assert taken(placed("spare", "0:4", "4:9"), TWIN) is None, "the model has 8 blocks"


def test_of_several_spares_the_one_comes_first_that_has_most_of_what_was_lost_and_then_the_one_with_least_to_lose() -> (
    None
):
    part = placed("a", "0:4", "4:6")
    assert taken(part, SPARE, TWIN) == Takeover("spare", Span(4, 8), at_once=True)
    busy = placed("busy", "0:4", "4:8", at_risk=500)
    assert taken(busy, SPARE) == Takeover("spare", Span(4, 8), at_once=True)
    assert taken(busy, part) == Takeover("busy", Span(4, 8), at_once=True)
