"""Where a session's sampler stands: enough to make it anew on any hop. Pure: the seed of a new stream is passed in."""

from collections.abc import Iterable, Sequence

from corolla.decoding.parameters import SamplingParams
from corolla.v1 import blocks_pb2 as pb

_NUM_SEEDS = 2**64


class SamplerRecord:
    """What the owner of a session knows of the sampler, which itself lives on the session's last hop.

    A sampler follows from its parameters, its random stream and the text. The stream's place is the newest state that
    the hop has sent, and the number of choices since. So whatever a hop chose that never arrived is chosen again.

    Args:
        seed: where the random stream begins, unless `state` says so.
        prompt_ids: the tokens before the answer.
        generated_ids: tokens of the answer that were chosen already.
        state: of the random stream, as a hop sent it.
        num_draws: choices since that state, or since the seed.
        max_new_tokens: of the answer, with those that were chosen already.
        end_token_ids: tokens that end the answer.
        drafts: what the hop is to draft.
        grammar: that the answer is to fit; empty: any text will do.

    Attributes:
        pauses_at: where the text has so many tokens, the hop chooses no further ones; None: until the answer ends.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        *,
        generated_ids: Sequence[int] = (),
        state: bytes = b"",
        num_draws: int = 0,
        max_new_tokens: int,
        end_token_ids: Iterable[int] = (),
        drafts: pb.Drafts | None = None,
        grammar: str = "",
    ) -> None:
        self.params = params
        self.pauses_at: int | None = None
        self.state = state
        self.num_draws = num_draws
        self._seed = seed % _NUM_SEEDS
        self._prompt_ids = prompt_ids
        self._generated_ids = list(generated_ids)
        self._max_new_tokens = max_new_tokens
        self._end_token_ids = sorted(end_token_ids)
        self._drafts = drafts
        self._grammar = grammar

    @property
    def num_text_tokens(self) -> int:
        """Of the prompt, and of the answer so far."""
        return len(self._prompt_ids) + len(self._generated_ids)

    def accept(self, token_ids: Sequence[int], state: bytes = b"") -> None:
        """Takes the answer's next tokens; `state`, if the hop sent it, is that of the stream behind the last one."""
        self._generated_ids.extend(token_ids)
        if self.params.is_greedy:
            return
        if state:
            self.state, self.num_draws = state, 0
        else:
            self.num_draws += len(token_ids)

    def message(self) -> pb.Sampler:
        """What a last hop makes the sampler from."""
        params = self.params
        num_tokens_left = self._max_new_tokens - len(self._generated_ids)
        if self.pauses_at is not None:
            num_tokens_left = min(num_tokens_left, self.pauses_at - self.num_text_tokens)
        message = pb.Sampler(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            num_logprobs=params.num_logprobs,
            num_tokens_left=num_tokens_left,
            end_token_ids=self._end_token_ids,
        )
        if not params.is_greedy:
            message.seed, message.state, message.num_skipped = self._seed, self.state, self.num_draws
        for token_id, bias in params.logit_bias:
            message.biased_token_ids.append(token_id)
            message.biases.append(bias)
        if params.has_penalties or self._drafts is not None:
            message.token_ids.extend(self._prompt_ids)
            message.num_prompt_tokens = len(message.token_ids)
        if message.num_prompt_tokens or self._grammar:
            # A grammar asks for nothing of the prompt.
            message.token_ids.extend(self._generated_ids)
        if self._grammar:
            message.grammar.text = self._grammar
        if self._drafts is not None:
            message.drafts.CopyFrom(self._drafts)
        return message
