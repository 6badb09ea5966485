"""What a hop says of sessions that it handed over, and when it counts."""

import asyncio

from corolla.client.chain.identity import SessionIdentity
from corolla.client.chain.moves import Moves
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2

ONE, OTHER = SessionIdentity(b"s" * 16, 5, "t"), SessionIdentity(b"o" * 16, 5, "t")


def a_hop(name: str, start: int, end: int) -> common_pb2.Hop:
    return common_pb2.Hop(server_id=name, address=f"{name}:1", span=common_pb2.BlockSpan(start=start, end=end))


CHAIN = common_pb2.Chain(hops=[a_hop("a", 0, 2), a_hop("b", 2, 5)])
TAKER = a_hop("c", 2, 5)


def moved(identity: SessionIdentity = ONE, epoch: int = 5, hop: common_pb2.Hop | None = TAKER) -> pb.Moved:
    return pb.Moved(session_id=identity.session_id, epoch=epoch, hop=hop)


def servers(chain: common_pb2.Chain) -> list[str]:
    return [hop.server_id for hop in chain.hops]


def test_the_chain_goes_on_where_the_session_is_now() -> None:
    moves = Moves()
    assert not moves.concern(CHAIN, [ONE])
    moves.told(moved(), "b:1")
    assert moves.concern(CHAIN, [OTHER, ONE])
    assert servers(moves.followed(CHAIN, [ONE])) == ["a", "c"]
    assert [hop.server_id for hop in moves.holders(CHAIN, ONE)] == ["a", "b", "c"]
    assert not moves.concern(CHAIN, [OTHER])
    moves.forget([ONE])
    assert moves.followed(CHAIN, [ONE]) == CHAIN


def test_what_was_said_of_another_epoch_other_blocks_or_by_another_hop_does_not_count() -> None:
    for told, address in (
        (moved(epoch=4), "b:1"), (moved(epoch=6), "b:1"), (moved(hop=None), "b:1"), (moved(), "d:1"),
        (moved(hop=a_hop("c", 2, 4)), "b:1"), (moved(OTHER), "b:1"),
    ):  # fmt: skip
        moves = Moves()
        moves.told(told, address)
        assert not moves.concern(CHAIN, [ONE])
        assert moves.followed(CHAIN, [ONE]) == CHAIN


def test_a_server_that_is_in_the_chain_already_is_not_followed_to() -> None:
    """It has one run of blocks of a session, and could open no second one."""
    moves = Moves()
    moves.told(moved(hop=a_hop("a", 2, 5)), "b:1")
    assert moves.followed(CHAIN, [ONE]) == CHAIN
    both = Moves()
    both.told(moved(hop=a_hop("c", 0, 2)), "a:1")
    both.told(moved(), "b:1")
    assert servers(both.followed(CHAIN, [ONE])) == ["c", "b"]


async def test_a_refused_step_waits_for_what_the_hop_says_after_it() -> None:
    moves = Moves()
    moves.told(moved(hop=None), "b:1")
    moves.refused("b:1")
    waiting = asyncio.create_task(moves.settled("b:1", [ONE, OTHER]))
    await asyncio.sleep(0)
    moves.told(moved(), "b:1")
    await asyncio.sleep(0.01)
    assert not waiting.done()
    moves.told(moved(OTHER, hop=None), "b:1")
    await asyncio.wait_for(waiting, 30)


async def test_nobody_waits_for_a_server_that_is_gone() -> None:
    moves = Moves()
    waiting = asyncio.create_task(moves.settled("b:1", [ONE]))
    await asyncio.sleep(0)
    moves.reachable("b:1", is_so=False)
    await asyncio.wait_for(waiting, 30)
