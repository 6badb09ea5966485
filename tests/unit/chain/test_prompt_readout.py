"""A prompt is asked about chunk by chunk, and the reports are joined whatever the chunks are."""

import pytest

from corolla.chain.prompt_readout import Pooling, PromptReadout
from corolla.chassis.errors import ServiceUnavailable
from corolla.v1 import blocks_pb2 as pb

PROMPT = list(range(100, 110))


def answer(asked: pb.Readout | None) -> pb.SampledRow | None:
    """What a hop reports: each token's log probability is minus its id."""
    if asked is None:
        return None
    scored = [pb.SampledToken(token_id=each, logprob=-float(each)) for each in asked.scored_token_ids]
    return pb.SampledRow(scored=scored, pooled=[1.0, 2.0] if asked.pooling else [])


def read(readout: PromptReadout, start: int, size: int) -> None:
    for position in range(start, len(PROMPT), size):
        num_tokens = min(size, len(PROMPT) - position)
        readout.take(position, num_tokens, answer(readout.of(position, num_tokens)))


@pytest.mark.parametrize("size", [1, 3, 4, 10])
@pytest.mark.parametrize("first_scored", [1, 2, 5, 9, 10])
def test_each_token_is_scored_once_whatever_the_chunks_are(size: int, first_scored: int) -> None:
    readout = PromptReadout.scores(PROMPT, first_scored, 1)
    # A hop that has cached all it may begins with the last token of the shared beginning.
    start = len(readout.shared_ids) - 1
    read(readout, start, size)
    assert [each.token_id for each in readout.scored] == PROMPT[first_scored:]
    assert [each.logprob for each in readout.scored] == [-float(each) for each in PROMPT[first_scored:]]
    assert readout.is_complete


@pytest.mark.parametrize("size", [3, 10])
def test_a_pooled_state_is_the_sum_over_chunks_or_that_of_the_last_token(size: int) -> None:
    mean = PromptReadout(PROMPT, pooling=Pooling.POOLING_SUM)
    assert len(mean.shared_ids) == 1
    read(mean, 0, size)
    assert mean.pooled == [-(-len(PROMPT) // size) * 1.0, -(-len(PROMPT) // size) * 2.0]
    last = PromptReadout(PROMPT, pooling=Pooling.POOLING_LAST)
    assert last.shared_ids == PROMPT
    read(last, 0, size)
    assert last.pooled == [1.0, 2.0]


@pytest.mark.parametrize("answered", [None, pb.SampledRow(), pb.SampledRow(scored=[pb.SampledToken(token_id=7)] * 9)])
def test_a_server_that_does_not_report_is_not_believed(answered: pb.SampledRow | None) -> None:
    with pytest.raises(ServiceUnavailable):
        PromptReadout.scores(PROMPT, 1, 0).take(0, len(PROMPT), answered)
