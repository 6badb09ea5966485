"""Resumes an answer whose stream broke, in any client service. No service keeps state for this.

The same prompt, options and random numbers give the same tokens. So a request with a name can be sent again, and the
answer leaves out the tokens that the caller has. A request with a name and without a seed gets its seed from the name.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from corolla.chassis.errors import InvalidRequest
from corolla.client.generation.answer import Answer, Delta, joined
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.stopping import FinishReason


@dataclass(frozen=True, slots=True)
class Resumption:
    """The state of an answer that may have begun in another client service: the caller has `num_received` tokens.

    `received_ids` are those tokens, if the caller sent them; then they need not be generated again. Without a name, no
    answer has begun.
    """

    request_id: str = ""
    num_received: int = 0
    received_ids: tuple[int, ...] = ()

    def turn_name(self, tenant: str) -> str:
        """A name that only the same request of the same tenant has; empty without a request id, which is not stored."""
        return self._digest("turn", tenant).hex()[:32] if self.request_id else ""

    def seeded(self, params: SamplingParams, tenant: str) -> SamplingParams:
        """Adds a seed for a request that has a name, so that every client service draws the same numbers for it."""
        if params.seed is not None or not self.request_id:
            return params
        return replace(params, seed=int.from_bytes(self._digest("seed", tenant)[:7]))

    def replay_into(self, answer: Answer) -> None:
        """Adds the received tokens to the answer. Raises InvalidRequest if it ends before the last of them."""
        for token_id in self.received_ids:
            if answer.finish_reason is not None:
                raise _too_many(len(answer.tokens))
            answer.accept(SampledToken(token_id), 0.0)
        answer.deltas()

    def without_last(self) -> "Resumption":
        """A copy in which the last received token is generated again, though it is not sent again."""
        return replace(self, received_ids=self.received_ids[:-1])

    def unsent_of(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """The rest of a whole answer, with its end. Raises InvalidRequest if the caller claims to have more of it."""
        unsent = UnsentDeltas(replace(self, received_ids=()))
        return (left for delta in deltas if (left := unsent.select([delta])) is not None)

    def _digest(self, purpose: str, tenant: str) -> bytes:
        return hashlib.sha256("\0".join((purpose, tenant, self.request_id)).encode()).digest()


class UnsentDeltas:
    """Selects the parts of an answer that the caller lacks, as they come one after the other."""

    def __init__(self, resumption: Resumption) -> None:
        self._num_received = resumption.num_received
        self._num_tokens = len(resumption.received_ids)

    def select(self, deltas: Sequence[Delta]) -> Delta | None:
        """The part of these deltas to send, as one delta, or None. It may be only the end, without tokens.

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
        return Delta((), "", delta.finish_reason)


def replay_answer(answer: Answer, tokens: Sequence[SampledToken], finish_reason: FinishReason) -> list[Delta]:
    """The deltas of a complete answer of at least one token.

    Args:
        answer: an empty answer with the same stop conditions as the first one.
        finish_reason: the finish reason of the first answer; only a time limit could give another one.
    """
    *earlier, last = tokens
    for token in earlier:
        answer.accept(token, 0.0)
    # With stop sequences, a token is decoded when it is accepted: the reason must be known then.
    answer.accept(last, 0.0, finish_reason)
    return answer.deltas()


def _too_many(num_tokens: int) -> InvalidRequest:
    return InvalidRequest("resume_from_index", f"the answer has only {num_tokens} tokens")
