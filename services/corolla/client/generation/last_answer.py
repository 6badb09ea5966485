"""Stores the answer of a session's last turn in its record, for callers that request the turn again."""

from collections.abc import Sequence
from typing import Final

from corolla.client.generation.answer import Answer
from corolla.decoding.parameters import SampledToken
from corolla.v1 import router_pb2 as pb

_MAX_LOGPROB_BYTES: Final = 1 << 20
_BYTES_OF_A_FLOAT: Final = 4
_BYTES_OF_AN_ALTERNATIVE: Final = 8


def write_last_answer(record: pb.SessionRecord, answer: Answer, turn_name: str) -> None:
    """Writes how the turn ended and, if the turn can be requested again, its log probabilities.

    At most a mebibyte of log probabilities is kept, those of the last tokens. The caller writes the token log.

    Args:
        answer: an answer that has ended. Tokens that its caller had before it was resumed have no log probabilities.
        turn_name: the name of the turn; empty if it has none.
    """
    if answer.finish_reason is not None:
        record.last_turn, record.last_finish_reason = turn_name, answer.finish_reason.value
    record.last_answer_tokens = len(answer.tokens)
    record.ClearField("last_logprobs")
    if not turn_name or not answer.tokens or answer.tokens[-1].logprob is None:
        return
    num_top = len(answer.tokens[-1].top_logprobs)
    max_tokens = _MAX_LOGPROB_BYTES // (_BYTES_OF_A_FLOAT + num_top * _BYTES_OF_AN_ALTERNATIVE)
    for token in answer.tokens[-max_tokens:]:
        if token.logprob is not None:
            record.last_logprobs.logprobs.append(token.logprob)
            record.last_logprobs.top_token_ids.extend(token_id for token_id, _ in token.top_logprobs)
            record.last_logprobs.top_logprobs.extend(logprob for _, logprob in token.top_logprobs)
    record.last_logprobs.num_top = num_top


def read_last_answer(record: pb.SessionRecord) -> tuple[Sequence[int], list[SampledToken]]:
    """The prompt and the answer of the last turn, with the log probabilities that the record has."""
    num_prompt_tokens = len(record.token_log) - record.last_answer_tokens
    answer_ids = record.token_log[num_prompt_tokens:]
    described = record.last_logprobs
    num_top, num_without = described.num_top, len(answer_ids) - len(described.logprobs)
    alternatives = list(zip(described.top_token_ids, described.top_logprobs, strict=True))
    tokens = [SampledToken(token_id) for token_id in answer_ids[:num_without]]
    for index, (token_id, logprob) in enumerate(zip(answer_ids[num_without:], described.logprobs, strict=True)):
        top = alternatives[index * num_top : (index + 1) * num_top]
        tokens.append(SampledToken(token_id, logprob, tuple(top)))
    return record.token_log[:num_prompt_tokens], tokens
