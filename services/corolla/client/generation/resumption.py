"""Resumes an answer whose stream broke, in any client service. No service keeps state for this.

The same prompt, options and random numbers give the same tokens. So a caller can send a request with an id again and
tell how many tokens it has; the answer leaves these out. A request with an id and no seed gets its seed from the id.
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
        return Delta((), "", delta.finish_reason, stop_sequence=delta.stop_sequence)


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


def _too_many(num_tokens: int) -> InvalidRequest:
    return InvalidRequest("resume_from_index", f"the answer has only {num_tokens} tokens")
