"""The record of a session's sampler, from which any hop can rebuild it. Pure: a fresh seed is passed in."""

from collections.abc import Iterable, Sequence

from corolla.decoding.parameters import SamplingParams
from corolla.v1 import blocks_pb2 as pb

_NUM_SEEDS = 2**64


class SamplerRecord:
    """The client's record of a session's sampler; the sampler itself lives on the session's last hop.

    Parameters, seed and text determine a sampler. So a rebuilt sampler chooses again the tokens that never arrived.

    Args:
        seed: the seed of the answer; only its last 64 bits count.
        prompt_ids: the tokens before the answer.
        generated_ids: tokens of the answer that were chosen already.
        max_new_tokens: the most tokens of the answer, `generated_ids` included.
        end_token_ids: tokens that end the answer.
        drafts: how the hop drafts tokens; None for no drafts.
        grammar: the grammar that the answer must fit; empty allows any text.

    Attributes:
        pauses_at: the number of prompt and answer tokens at which the hop stops choosing; None for the answer's end.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        *,
        generated_ids: Sequence[int] = (),
        max_new_tokens: int,
        end_token_ids: Iterable[int] = (),
        drafts: pb.Drafts | None = None,
        grammar: str = "",
    ) -> None:
        self.params = params
        self.pauses_at: int | None = None
        self._seed = seed % _NUM_SEEDS
        self._prompt_ids = prompt_ids
        self._generated_ids = list(generated_ids)
        self._max_new_tokens = max_new_tokens
        self._end_token_ids = sorted(end_token_ids)
        self._drafts = drafts
        self._grammar = grammar

    @property
    def num_text_tokens(self) -> int:
        """The number of tokens of the prompt and of the answer so far."""
        return len(self._prompt_ids) + len(self._generated_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Records the answer's next tokens."""
        self._generated_ids.extend(token_ids)

    def message(self, max_tokens: int | None = None) -> pb.Sampler:
        """Returns the message that a last hop builds the sampler from.

        Args:
            max_tokens: for how many tokens of the prompt and the answer hops have room; None: for all.
        """
        params = self.params
        num_tokens_left = self._max_new_tokens - len(self._generated_ids)
        if self.pauses_at is not None:
            num_tokens_left = min(num_tokens_left, self.pauses_at - self.num_text_tokens)
        if max_tokens is not None:
            # A session without room is opened again only to stay open, and then chooses no token.
            num_tokens_left = min(num_tokens_left, max(1, max_tokens - self.num_text_tokens))
        message = pb.Sampler(
            parameters=params.message(),
            num_logprobs=params.num_logprobs,
            num_tokens_left=num_tokens_left,
            end_token_ids=self._end_token_ids,
        )
        if not params.is_greedy:
            message.seed, message.position = self._seed, len(self._generated_ids)
        if params.has_penalties or self._drafts is not None:
            message.token_ids.extend(self._prompt_ids)
            message.num_prompt_tokens = len(message.token_ids)
        if message.num_prompt_tokens or self._grammar:
            # A grammar does not need the prompt.
            message.token_ids.extend(self._generated_ids)
        if self._grammar:
            message.grammar.text = self._grammar
        if self._drafts is not None:
            message.drafts.CopyFrom(self._drafts)
        return message
