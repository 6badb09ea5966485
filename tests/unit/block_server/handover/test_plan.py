"""Which server receives a session, and in which parts the session travels, whatever fails on the way."""

from hypothesis import given
from hypothesis import strategies as st

from corolla.block_server.handover.plan import MAX_REPEATS, HandoverProgress, peers_for
from corolla.v1 import common_pb2, router_pb2
from corolla.wire.numerics import Numerics
from corolla.wire.span import Span


def a_server(name: str, start: int = 0, end: int = 4, free: int = 10, **changes: object) -> router_pb2.PlacedServer:
    placed = router_pb2.PlacedServer(
        server=router_pb2.ServerDescription(server_id=name, address=f"{name}:1", fingerprint="f"),
        span=common_pb2.BlockSpan(start=start, end=end),
        state=router_pb2.SERVER_STATE_READY,
        load=router_pb2.ServerLoad(num_free_pages=free, max_session_tokens=16 * free),
    )
    for name_of_field, value in changes.items():
        setattr(placed, name_of_field, value)
    return placed


def chosen(*servers: router_pb2.PlacedServer, num_tokens: int = 64, blocks: Span = Span(1, 4)) -> list[str]:  # noqa: B008
    return [each.server.server_id for each in peers_for(servers, "f", blocks, num_tokens, {"self"})]


def test_only_a_server_with_the_same_blocks_weights_and_room_receives_a_session() -> None:
    other_weights = a_server("weights")
    other_weights.server.fingerprint = "g"
    assert chosen(
        a_server("self"), a_server("part", start=2), a_server("short", end=3), a_server("full", free=3), other_weights,
        a_server("leaving", state=router_pb2.SERVER_STATE_DRAINING),
        a_server("joining", state=router_pb2.SERVER_STATE_JOINING),
        a_server("lost", suspected=True), a_server("good", free=4),
    ) == ["good"]  # fmt: skip


def test_the_peer_with_most_room_comes_first() -> None:
    assert chosen(a_server("b", free=5), a_server("a", free=5), a_server("c", free=7)) == ["c", "a", "b"]


def test_a_tenant_with_a_guarantee_may_have_room_where_others_have_none() -> None:
    servers = a_server("full", free=3), a_server("b", free=4), a_server("empty", free=0)
    usable = peers_for(servers, "f", Span(1, 4), 64, {"self"}, is_guaranteed=True)
    assert [each.server.server_id for each in usable] == ["b", "full", "empty"]


def test_a_peer_that_computes_alike_comes_before_more_free_pages() -> None:
    servers = a_server("many", free=9), a_server("alike", free=5), a_server("full", free=3)
    for each in servers[1:]:
        each.load.numerics = "a+head"
    usable = peers_for(servers, "f", Span(1, 4), 64, {"self"}, is_guaranteed=True, numerics=Numerics("a"))
    assert [each.server.server_id for each in usable] == ["alike", "many", "full"]


@given(
    num_tokens=st.integers(0, 40),
    max_tokens=st.integers(1, 9),
    changes=st.lists(st.tuples(st.integers(-6, 6), st.booleans()), max_size=30),
)
def test_the_receiver_ends_with_exactly_the_senders_tokens(
    num_tokens: int, max_tokens: int, changes: list[tuple[int, bool]]
) -> None:
    """It grows or goes back between the parts, and parts are lost: tokens are numbered as they are computed."""
    held = list(range(num_tokens))
    received: list[int] = []
    next_token, num_unchanged = num_tokens, 0
    progress = HandoverProgress()
    # In the end nothing happens any more, for as many parts as there may be tokens.
    for change, is_lost in [*changes, *[(0, False)] * (40 + 6 * 30)]:
        if change < 0:
            del held[max(0, len(held) + change) :]
            num_unchanged = min(num_unchanged, len(held))
        else:
            held += range(next_token, next_token + change)
            next_token += change
        start, count, is_last = progress.next_part(len(held), num_unchanged, max_tokens)
        assert count <= max_tokens
        assert start <= len(received)
        num_unchanged = start + count
        if is_lost:
            # It kept a part of it at most; and it says what it holds.
            progress.answered(min(len(received), start), taken=False)
            received = received[: min(len(received), start)]
            continue
        received = received[:start] + held[start : start + count]
        progress.answered(len(received), taken=True)
        if is_last:
            assert received == held
            return
    raise AssertionError("it does not end")


def test_a_receiver_that_takes_nothing_is_given_up() -> None:
    progress = HandoverProgress()
    assert all(progress.answered(0, taken=False) for _ in range(MAX_REPEATS - 1))
    assert not progress.answered(0, taken=False)
    # What is taken in between counts as getting on.
    progress = HandoverProgress()
    assert all(progress.answered(0, taken=number % 2 == 0) for number in range(4 * MAX_REPEATS))
