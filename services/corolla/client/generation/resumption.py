"""Going on with an answer whose stream broke, in any client service. Nothing of it is remembered here.

An answer follows from its request: the same prompt, options and random numbers give the same tokens. So a request that
its caller named can be made again, and what has come of its answer is left out. A request that is named and has no seed
takes its random numbers from the name.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from corolla.chassis.errors import InvalidRequest
from corolla.client.generation.answer import Answer, Delta
from corolla.client.generation.sampling import SampledToken, SamplingParams
from corolla.client.generation.stopping import FinishReason


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a caller says of an answer that has begun, perhaps elsewhere.

    Attributes:
        request_id: the caller's own name for the request.
        num_received: tokens that have come.
        received_ids: those tokens, if the caller still has them; the answer then need not be generated up to there.
    """

    request_id: str
    num_received: int = 0
    received_ids: tuple[int, ...] = ()

    def name_of_turn(self, tenant: str) -> str:
        """Only the same request of the same tenant has it. The caller's own name is not ours to store."""
        return self._digest("turn", tenant).hex()[:32]

    def seeded(self, params: SamplingParams, tenant: str) -> SamplingParams:
        """With a seed in any case, so that whoever answers draws the same numbers."""
        if params.seed is not None:
            return params
        return replace(params, seed=int.from_bytes(self._digest("seed", tenant)[:7]))

    def take_up(self, answer: Answer) -> None:
        """Makes what came the answer's own. Raises InvalidRequest where the answer would have ended with it."""
        for token_id in self.received_ids:
            if answer.finish_reason is not None:
                break
            answer.accept(SampledToken(token_id), 0.0)
        answer.deltas()
        if answer.finish_reason is not None:
            raise _nothing_left(len(answer.token_ids))

    def missing_of(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Of a whole answer what has not come yet. Raises InvalidRequest where that is nothing."""
        missing = Missing(replace(self, received_ids=()))
        return (delta for delta in deltas if missing.includes(delta))

    def _digest(self, purpose: str, tenant: str) -> bytes:
        return hashlib.sha256("\0".join((purpose, tenant, self.request_id)).encode()).digest()


class Missing:
    """Tells which parts of an answer are to be sent, as they come one after the other."""

    def __init__(self, resumption: Resumption | None) -> None:
        self._num_received = 0 if resumption is None else resumption.num_received
        self._num_tokens = 0 if resumption is None else len(resumption.received_ids)

    def includes(self, delta: Delta) -> bool:
        """Raises InvalidRequest where the answer ends with a token that has come."""
        self._num_tokens += 1
        if self._num_tokens > self._num_received:
            return True
        if delta.finish_reason is not None:
            raise _nothing_left(self._num_tokens)
        return False


def told_again(answer: Answer, token_ids: Sequence[int], finish_reason: FinishReason) -> list[Delta]:
    """The deltas of an answer that is complete.

    Args:
        answer: an empty one, which decides about ends as the first one did.
        token_ids: at least one.
        finish_reason: of the first one; only time can have made another.
    """
    for token_id in token_ids:
        answer.accept(SampledToken(token_id), 0.0)
    answer.finish_reason = finish_reason
    return answer.deltas()


def _nothing_left(num_tokens: int) -> InvalidRequest:
    return InvalidRequest("resume_from_index", f"the answer has only {num_tokens} tokens; nothing of it is missing")
