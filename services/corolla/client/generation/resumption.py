"""Resumes an answer whose stream broke, in any client service, and repeats the answer of a session's last turn.

The same prompt, options and random numbers give the same tokens. So a caller can send a request with an id again and
tell how many tokens it has; the answer leaves these out. A request with an id and no seed gets its seed from the id. No
service keeps state for this; only the answer of a session's last turn stands in its record.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from corolla.chassis.errors import InvalidRequest
from corolla.client.generation.answer import Answer
from corolla.client.output_parsing.deltas import Delta, joined
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.stopping import FinishReason
from corolla.v1 import router_pb2 as pb

_MAX_LOGPROB_BYTES: Final = 1 << 20
_BYTES_OF_A_FLOAT: Final = 4
_BYTES_OF_AN_ALTERNATIVE: Final = 8


@dataclass(frozen=True, slots=True)
class Resumption:
    """A caller's progress in an answer that may have begun in another client service.

    Attributes:
        request_id: the id by which the caller names the request; empty: no answer has begun.
        num_received: how many tokens of the answer the caller has.
        received_ids: these tokens, if the caller sent them; then hops need not generate them again.
    """

    request_id: str = ""
    num_received: int = 0
    received_ids: tuple[int, ...] = ()

    def turn_name(self, tenant: str) -> str:
        """A name that follows from the tenant and the request id, and does not reveal the id; empty without an id."""
        return self._digest("turn", tenant).hex()[:32] if self.request_id else ""

    def seeded(self, params: SamplingParams, tenant: str) -> SamplingParams:
        """Adds a seed if the request has an id and no seed, so that every client service draws the same numbers."""
        if params.seed is not None or not self.request_id:
            return params
        return replace(params, seed=int.from_bytes(self._digest("seed", tenant)[:8]))

    def replay_into(self, answer: Answer) -> None:
        """Adds the received tokens to the answer. Raises InvalidRequest if the answer ends before the last one."""
        for token_id in self.received_ids:
            if answer.finish_reason is not None:
                raise _too_many(len(answer.tokens))
            answer.accept(SampledToken(token_id), 0.0)
        answer.deltas()

    def without_last(self) -> "Resumption":
        """A copy without the last received id: hops generate this token again, but the caller does not get it again."""
        return replace(self, received_ids=self.received_ids[:-1])

    def unsent_of(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """The rest of a complete answer, with its end. Raises InvalidRequest if the caller claims more tokens."""
        unsent = UnsentDeltas(replace(self, received_ids=()))
        return (left for delta in deltas if (left := unsent.select([delta])) is not None)

    def _digest(self, purpose: str, tenant: str) -> bytes:
        return hashlib.sha256("\0".join((purpose, tenant, self.request_id)).encode()).digest()


class UnsentDeltas:
    """Selects the parts that the caller lacks from the consecutive deltas of an answer."""

    def __init__(self, resumption: Resumption) -> None:
        self._num_received = resumption.num_received
        self._num_tokens = len(resumption.received_ids)

    def select(self, deltas: Sequence[Delta]) -> Delta | None:
        """The part of these deltas that the caller lacks, as one delta, perhaps only the end; None if it has them all.

        Raises InvalidRequest if the answer ends with fewer tokens than the caller received.
        """
        left = [each for delta in deltas if (each := self._select(delta)) is not None]
        return joined(left) if left else None

    def _select(self, delta: Delta) -> Delta | None:
        self._num_tokens += len(delta.tokens)
        if self._num_tokens > self._num_received:
            return delta
        if delta.finish_reason is None:
            return None
        if self._num_tokens < self._num_received:
            raise _too_many(self._num_tokens)
        return Delta(finish_reason=delta.finish_reason, stop_sequence=delta.stop_sequence)


def replay_answer(answer: Answer, tokens: Sequence[SampledToken], finish_reason: FinishReason) -> list[Delta]:
    """Makes the deltas of a complete answer again.

    Args:
        answer: an empty answer without a limit of tokens or time.
        tokens: the answer's tokens, at least one.
        finish_reason: the finish reason of the first answer.
    """
    *earlier, last = tokens
    for token in earlier:
        answer.accept(token, 0.0)
    # An answer with stop sequences decodes a token when it is accepted, and must know the reason then.
    answer.accept(last, 0.0, finish_reason)
    return answer.deltas()


def write_last_answer(record: pb.SessionRecord, answer: Answer, turn_name: str) -> None:
    """Writes how the turn ended and, if the turn can be requested again, its log probabilities.

    The record keeps log probabilities of the last tokens, at most a mebibyte. The caller writes the token log.

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


def _too_many(num_tokens: int) -> InvalidRequest:
    return InvalidRequest("resume_from_index", f"the answer has only {num_tokens} tokens")
