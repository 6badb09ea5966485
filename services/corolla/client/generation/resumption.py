"""Resumes an answer whose stream broke, in any client service. Nothing of it is remembered here.

An answer follows from its request: the same prompt, options and random numbers give the same tokens. So a request that
its caller named can be made again, and what has come of its answer is left out. A request that is named and has no seed
takes its random numbers from the name.
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
    """What a caller says of an answer that has begun, perhaps elsewhere: `num_received` tokens have come.

    `received_ids` are those tokens, if the caller still has them; the answer then need not be generated up to there.
    A request without a name has begun nowhere.
    """

    request_id: str = ""
    num_received: int = 0
    received_ids: tuple[int, ...] = ()

    def turn_name(self, tenant: str) -> str:
        """A name that only the same request of the same tenant has, or none. The caller's own name is not stored."""
        return self._digest("turn", tenant).hex()[:32] if self.request_id else ""

    def seeded(self, params: SamplingParams, tenant: str) -> SamplingParams:
        """Adds a seed for a request that has a name, so that every client service draws the same numbers for it."""
        if params.seed is not None or not self.request_id:
            return params
        return replace(params, seed=int.from_bytes(self._digest("seed", tenant)[:7]))

    def replay_into(self, answer: Answer) -> None:
        """Makes what came the answer's own, which may end with it. Raises InvalidRequest where it would have before."""
        for token_id in self.received_ids:
            if answer.finish_reason is not None:
                raise _too_many(len(answer.tokens))
            answer.accept(SampledToken(token_id), 0.0)
        answer.deltas()

    def without_last(self) -> "Resumption":
        """So that the last token that has come is generated again; its caller does not get it again."""
        return replace(self, received_ids=self.received_ids[:-1])

    def unsent_of(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Of a whole answer what has not come yet, and its end. Raises InvalidRequest where more came than there is."""
        unsent = UnsentDeltas(replace(self, received_ids=()))
        return (left for delta in deltas if (left := unsent.select([delta])) is not None)

    def _digest(self, purpose: str, tenant: str) -> bytes:
        return hashlib.sha256("\0".join((purpose, tenant, self.request_id)).encode()).digest()


class UnsentDeltas:
    """Tells which parts of an answer are to be sent, as they come one after the other."""

    def __init__(self, resumption: Resumption) -> None:
        self._num_received = resumption.num_received
        self._num_tokens = len(resumption.received_ids)

    def select(self, deltas: Sequence[Delta]) -> Delta | None:
        """What of these is to be sent, as one; None: nothing. Just the end of an answer whose last token has come.

        Raises InvalidRequest where the answer ends, and more than all of it has come.
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
        answer: an empty one, which decides about ends as the first one did.
        finish_reason: of the first one; only time can have made another.
    """
    for token in tokens:
        answer.accept(token, 0.0)
    answer.finish_reason = finish_reason
    return answer.deltas()


def _too_many(num_tokens: int) -> InvalidRequest:
    return InvalidRequest("resume_from_index", f"the answer has only {num_tokens} tokens")
