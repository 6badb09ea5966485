"""What a session's last hop reports about its prompt while the chain processes that: log probabilities, or a vector."""

from collections.abc import Sequence
from typing import Self

from corolla.chassis.errors import ServiceUnavailable
from corolla.decoding.parameters import SampledToken
from corolla.v1 import blocks_pb2 as pb

Pooling = pb.Readout.Pooling


class PromptReadout:
    """Asks for a readout with each chunk of a prompt, and joins the reports in the order of the chunks.

    A chunk that a hop lost is asked for again; a chunk whose report has come is not, even when a recovery computes it
    again. So the joined readout is the same with and without recoveries.

    Args:
        first_scored: the index in the prompt of the first token whose log probability is wanted; at least 1.
        num_top: how many of the most probable tokens are reported in place of each of them.
        pooling: which hidden states after the final norm are added up.

    Attributes:
        prompt_ids: all tokens of the prompt.
        scored: the scored tokens so far, in order.
        pooled: the sum of the pooled hidden states, `[hidden_size]`; empty if none are wanted.
        is_complete: whether the reports about all chunks have come.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        first_scored: int | None = None,
        num_top: int = 0,
        pooling: Pooling.ValueType = Pooling.POOLING_NONE,
    ) -> None:
        self.prompt_ids = prompt_ids
        self._first_scored = len(prompt_ids) if first_scored is None else first_scored
        self._num_top = num_top
        self._pooling = pooling
        self.scored: list[SampledToken] = []
        self.pooled: list[float] = []
        self.is_complete = False

    @classmethod
    def scores(cls, prompt_ids: Sequence[int], first_scored: int, num_top: int) -> Self:
        """A readout of the log probabilities of the prompt's tokens from `first_scored` on."""
        return cls(prompt_ids, first_scored=max(1, first_scored), num_top=num_top)

    @property
    def shared_ids(self) -> Sequence[int]:
        """The beginning of the prompt that hops may have cached: they compute its last token and all that follow."""
        if self._pooling == Pooling.POOLING_SUM:
            return self.prompt_ids[:1]
        return self.prompt_ids[: self._first_scored]

    def of(self, position: int, num_tokens: int) -> pb.Readout | None:
        """The readout of the chunk of `num_tokens` tokens from `position` on; None if nothing is wanted of it."""
        start, end = max(position, self._first_scored - 1), position + num_tokens
        pooling = self._pooling
        if pooling == Pooling.POOLING_LAST and end < len(self.prompt_ids):
            pooling = Pooling.POOLING_NONE
        scored_ids = self.prompt_ids[start + 1 : end + 1]
        if not scored_ids and pooling == Pooling.POOLING_NONE:
            return None
        first_token = start - position if scored_ids else 0
        return pb.Readout(scored_token_ids=scored_ids, first_token=first_token, num_top=self._num_top, pooling=pooling)

    def take(self, position: int, num_tokens: int, sampled: pb.SampledRow | None) -> None:
        """Takes the report about the chunk from `position` on.

        Raises ServiceUnavailable if it is not what was asked for.
        """
        asked = self.of(position, num_tokens)
        self.is_complete = position + num_tokens == len(self.prompt_ids)
        if asked is None:
            return
        found = pb.SampledRow() if sampled is None else sampled
        asks_for_pooled = asked.pooling != Pooling.POOLING_NONE
        if [each.token_id for each in found.scored] != list(asked.scored_token_ids) or (
            asks_for_pooled and not found.pooled
        ):
            raise ServiceUnavailable(
                "a block server of an earlier version cannot report on prompts; try again after the upgrade"
            )
        self.scored.extend(token_of(each) for each in found.scored)
        if asks_for_pooled:
            pooled = self.pooled or [0.0] * len(found.pooled)
            self.pooled = [before + more for before, more in zip(pooled, found.pooled, strict=True)]


def token_of(token: pb.SampledToken) -> SampledToken:
    """A token as it came from a hop, with its log probabilities if it has some."""
    if not token.HasField("logprob"):
        return SampledToken(token.token_id)
    return SampledToken(token.token_id, token.logprob, tuple(zip(token.top_token_ids, token.top_logprobs, strict=True)))
