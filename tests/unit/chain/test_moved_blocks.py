"""Blocks that a recovery moves: which servers compute them afterwards."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from corolla.planning.numerics import MovedBlocks, moved_blocks
from corolla.v1 import common_pb2
from corolla.wire.span import Span

NUM_BLOCKS = 12


def chain_of(*hops: tuple[str, int, int]) -> common_pb2.Chain:
    spans = [(name, common_pb2.BlockSpan(start=start, end=end)) for name, start, end in hops]
    return common_pb2.Chain(hops=[common_pb2.Hop(server_id=name, span=span) for name, span in spans])


@st.composite
def chains(draw: st.DrawFn) -> common_pb2.Chain:
    cuts = sorted(draw(st.sets(st.integers(1, NUM_BLOCKS - 1), max_size=4)))
    bounds = [0, *cuts, NUM_BLOCKS]
    names = draw(st.permutations("abcdefgh"))
    return chain_of(*((names[number], start, end) for number, (start, end) in enumerate(pairwise(bounds))))


def holders(chain: common_pb2.Chain) -> list[str]:
    return [hop.server_id for hop in chain.hops for _ in range(hop.span.start, hop.span.end)]


@given(chains(), chains())
def test_each_block_that_moved_is_named_once(before: common_pb2.Chain, after: common_pb2.Chain) -> None:
    changed = {
        block: (lost, found)
        for block, (lost, found) in enumerate(zip(holders(before), holders(after), strict=True))
        if lost != found
    }
    named = [
        (block, (each.lost, each.found))
        for each in moved_blocks(before, after)
        for block in range(each.blocks.start, each.blocks.end)
    ]
    assert len(named) == len(changed)
    assert dict(named) == changed


def test_a_lost_span_may_be_found_in_parts() -> None:
    before = chain_of(("a", 0, 4), ("b", 4, 10), ("c", 10, 12))
    after = chain_of(("a", 0, 4), ("d", 4, 7), ("e", 7, 12))
    assert moved_blocks(before, after) == (
        MovedBlocks(Span(4, 7), "b", "d"),
        MovedBlocks(Span(7, 10), "b", "e"),
        MovedBlocks(Span(10, 12), "c", "e"),
    )
