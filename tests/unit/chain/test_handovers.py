"""Notifications of handed-over sessions, and when the client service accepts them."""

import asyncio

from corolla.chain.handovers import Handovers
from corolla.chain.identity import SessionIdentity
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
    handovers = Handovers({"b:1"})
    assert not handovers.affect(CHAIN, [ONE])
    handovers.on_moved(moved(), "b:1")
    assert handovers.affect(CHAIN, [OTHER, ONE])
    assert servers(handovers.redirect(CHAIN, [ONE])) == ["a", "c"]
    assert [hop.server_id for hop in handovers.hops_holding(CHAIN, ONE)] == ["a", "b", "c"]
    assert not handovers.affect(CHAIN, [OTHER])
    handovers.forget([ONE])
    assert handovers.redirect(CHAIN, [ONE]) == CHAIN


def test_moves_of_another_epoch_other_blocks_or_from_another_hop_do_not_count() -> None:
    for move, address in (
        (moved(epoch=4), "b:1"), (moved(epoch=6), "b:1"), (moved(hop=None), "b:1"), (moved(), "d:1"),
        (moved(hop=a_hop("c", 2, 4)), "b:1"), (moved(OTHER), "b:1"),
    ):  # fmt: skip
        handovers = Handovers({"b:1"})
        handovers.on_moved(move, address)
        assert not handovers.affect(CHAIN, [ONE])
        assert handovers.redirect(CHAIN, [ONE]) == CHAIN


def test_a_move_to_a_server_of_the_same_chain_is_ignored() -> None:
    """It has one run of blocks of a session, and could open no second one."""
    handovers = Handovers({"b:1"})
    handovers.on_moved(moved(hop=a_hop("a", 2, 5)), "b:1")
    assert handovers.redirect(CHAIN, [ONE]) == CHAIN
    both = Handovers({"b:1"})
    both.on_moved(moved(hop=a_hop("c", 0, 2)), "a:1")
    both.on_moved(moved(), "b:1")
    assert servers(both.redirect(CHAIN, [ONE])) == ["c", "b"]


async def test_a_refused_step_waits_for_the_hops_notification() -> None:
    handovers = Handovers({"b:1"})
    handovers.on_moved(moved(hop=None), "b:1")
    handovers.on_step_refused("b:1")
    waiting = asyncio.create_task(handovers.wait_until_settled("b:1", [ONE, OTHER]))
    await asyncio.sleep(0)
    handovers.on_moved(moved(), "b:1")
    await asyncio.sleep(0.01)
    assert not waiting.done()
    handovers.on_moved(moved(OTHER, hop=None), "b:1")
    await asyncio.wait_for(waiting, 30)


async def test_a_step_does_not_wait_for_a_server_that_is_gone() -> None:
    connected = {"b:1"}
    handovers = Handovers(connected)
    waiting = asyncio.create_task(handovers.wait_until_settled("b:1", [ONE]))
    await asyncio.sleep(0)
    connected.clear()
    handovers.on_news()
    await asyncio.wait_for(waiting, 30)
