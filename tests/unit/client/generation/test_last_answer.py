"""The last answer in a session's record: what is read is what was written, and very long ones are bounded."""

import pytest

from corolla.client.generation.answer import Answer
from corolla.client.generation.resumption import read_last_answer, write_last_answer
from corolla.client.text.tokenizer import TextTokenizer
from corolla.decoding.parameters import SampledToken
from corolla.decoding.stopping import FinishReason, StopDecider
from corolla.v1 import router_pb2 as pb
from tests.checkpoints import make_tokenizer

TOKENIZER = TextTokenizer(make_tokenizer())
PROMPT = [1, 2, 3]


def written(tokens: list[SampledToken], turn_name: str = "turn") -> pb.SessionRecord:
    answer = Answer(TOKENIZER, PROMPT, StopDecider(max_new_tokens=len(tokens), ignore_eos=True), ())
    for token in tokens:
        answer.accept(token, 0.0)
    record = pb.SessionRecord(token_log=[*PROMPT, *answer.token_ids])
    write_last_answer(record, answer, turn_name)
    return record


def described(num_tokens: int, num_top: int) -> list[SampledToken]:
    top = [(number, -0.5 * number) for number in range(num_top)]
    return [SampledToken(number % 50, -0.25 * (number % 9), tuple(top)) for number in range(num_tokens)]


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("num_received", [0, 4])
def test_an_answer_is_read_as_it_was_written(num_top: int, num_received: int) -> None:
    received = [SampledToken(number) for number in range(num_received)]
    tokens = [*received, *described(9, num_top)]
    record = written(tokens)
    assert read_last_answer(record) == (PROMPT, tokens)
    assert record.last_finish_reason == FinishReason.LENGTH


def test_an_answer_without_log_probabilities_has_none() -> None:
    record = written([SampledToken(4)])
    assert read_last_answer(record) == (PROMPT, [SampledToken(4)])
    assert not record.HasField("last_logprobs")


def test_a_turn_that_nobody_can_ask_for_again_keeps_none() -> None:
    assert not written(described(3, 2), turn_name="").HasField("last_logprobs")


def test_the_next_turn_replaces_those_of_the_last() -> None:
    record = written(described(9, 2))
    record.MergeFrom(pb.SessionRecord(token_log=[7]))
    answer = Answer(TOKENIZER, PROMPT, StopDecider(max_new_tokens=1, ignore_eos=True), ())
    answer.accept(SampledToken(7), 0.0)
    write_last_answer(record, answer, "next")
    assert not record.HasField("last_logprobs")


def test_of_a_very_long_answer_the_last_tokens_have_log_probabilities() -> None:
    tokens = described(10_000, 20)
    record = written(tokens)
    assert record.last_logprobs.ByteSize() <= 1 << 20
    _, read = read_last_answer(record)
    num_bare = sum(token.logprob is None for token in read)
    assert 0 < num_bare < 5_000
    assert read[num_bare:] == tokens[num_bare:]
    assert [token.token_id for token in read] == [token.token_id for token in tokens]
