"""Tokens that go round, as the client service takes them: in order, each once, of one epoch."""

import asyncio

import pytest

from corolla.chain.token_stream import TokenStream
from corolla.chassis.errors import HopSessionLost, HopUnavailable, InternalError
from corolla.v1 import blocks_pb2 as pb


def stream() -> TokenStream:
    return TokenStream(epoch=2, position=5, credit_end=40, addresses=frozenset(["a:1"]))


def row(position: int, num_tokens: int = 1, num_result_tokens: int = 1, *, epoch: int = 2) -> pb.StepRow:
    return pb.StepRow(epoch=epoch, position=position, num_tokens=num_tokens, num_result_tokens=num_result_tokens)


def tokens(*token_ids: int) -> pb.SampledRow:
    return pb.SampledRow(tokens=[pb.SampledToken(token_id=token_id) for token_id in token_ids])


async def ids(tokens_of: TokenStream) -> list[int]:
    return [token.token_id for token in (await tokens_of.next(1.0)).sampled.tokens]


async def test_tokens_come_in_order_and_what_comes_again_or_from_another_epoch_does_not_count() -> None:
    tokens_of = stream()
    assert tokens_of.push(row(5, 4, 1), tokens(7))
    assert not tokens_of.push(row(5, 4, 1), tokens(8)), "a copy"
    assert not tokens_of.push(row(9, epoch=1), tokens(8)), "of an epoch that is over"
    # Two of three draft tokens are right: the next step begins behind them.
    assert tokens_of.push(row(9, 4, 4), tokens(1, 2, 3))
    assert not tokens_of.push(row(13), tokens(8)), "it would leave a token out"
    assert tokens_of.push(row(12), tokens(4))
    assert tokens_of.num_unread_tokens == 5
    assert [await ids(tokens_of) for _ in range(3)] == [[7], [1, 2, 3], [4]]
    assert tokens_of.num_unread_tokens == 0


async def test_a_failure_comes_behind_the_tokens_that_came_before_it() -> None:
    tokens_of = stream()
    tokens_of.push(row(5), tokens(7))
    tokens_of.fail(row(5), HopSessionLost("answered already"))
    tokens_of.fail(row(6, epoch=1), HopSessionLost("of an epoch that is over"))
    tokens_of.fail(row(6), HopSessionLost("lost"))
    tokens_of.end(HopUnavailable("the first failure counts"))
    assert await ids(tokens_of) == [7]
    with pytest.raises(HopSessionLost, match="lost"):
        await tokens_of.next(1.0)


async def test_whoever_waits_gets_the_next_tokens_or_learns_what_happened() -> None:
    tokens_of = stream()
    waiting = asyncio.create_task(ids(tokens_of))
    await asyncio.sleep(0)
    tokens_of.push(row(5), tokens(7))
    assert await waiting == [7]
    waiting = asyncio.create_task(ids(tokens_of))
    await asyncio.sleep(0)
    tokens_of.end(HopUnavailable("a hop was lost"))
    with pytest.raises(HopUnavailable, match="was lost"):
        await waiting


async def test_a_silent_chain_is_given_up() -> None:
    with pytest.raises(HopUnavailable, match="does not answer"):
        await stream().next(0.01)


@pytest.mark.parametrize("sampled", [tokens(), tokens(1, 2)], ids=["none", "too many"])
async def test_a_hop_that_does_not_keep_the_protocol_fails_the_row(sampled: pb.SampledRow) -> None:
    tokens_of = stream()
    assert not tokens_of.push(row(5), sampled)
    with pytest.raises(InternalError):
        await tokens_of.next(1.0)
