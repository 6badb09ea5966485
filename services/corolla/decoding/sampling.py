"""The sampler of one sequence: what its next choice depends on, apart from the logits.

`batched_sampling` chooses with it, by biases, penalties and a grammar, and by the filters of `generate` of
`transformers`: top-k (Fan et al. 2018, "Hierarchical Neural Story Generation"), top-p (Holtzman et al. 2019, "The
Curious Case of Neural Text Degeneration") and min-p (Nguyen et al. 2024, "Turning Up the Heat"); the repetition penalty
is that of CTRL (Keskar et al. 2019). A token is drawn by a race (`race`), which is the Gumbel-max trick without
logarithms of probabilities. Its random numbers follow from the seed, the token's position in the answer, and its id.
"""

import copy
import functools
import secrets
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from corolla.decoding.grammar import AnswerGrammar
from corolla.decoding.parameters import SamplingParams
from corolla.decoding.penalties import TokenPenalties
from corolla.wire.device_copies import to_device


class Sampler:
    """What the next choice for one sequence depends on.

    Args:
        params: without a seed, the sampler takes a fresh one.
        prompt_ids: the tokens before the answer; only penalties use them.
        generated_ids: tokens of the answer that were chosen already; only penalties use them.
        position: how many tokens of the answer were chosen already.
        grammar: a grammar that has read the tokens of the answer and that no other sampler uses; the sampler never
            chooses tokens that would break it.

    Attributes:
        seed: the seed of the answer, of 64 bits.
        position: where in the answer the next token is.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        generated_ids: Sequence[int] = (),
        position: int = 0,
        grammar: AnswerGrammar | None = None,
    ) -> None:
        self.params = params
        self.seed = (secrets.randbits(64) if params.seed is None else params.seed) % (1 << 64)
        self.position = position
        self._grammar = grammar
        self._bias: Tensor | None = None
        self._past: tuple[Sequence[int], Sequence[int]] = (tuple(prompt_ids), tuple(generated_ids))
        self._penalties: TokenPenalties | None = None

    @property
    def adjusts_logits(self) -> bool:
        """True if tokens are chosen by other scores than the model's own."""
        return self.looks_back or bool(self.params.logit_bias)

    @property
    def looks_back(self) -> bool:
        """True if a choice depends on the tokens before it, and not only on their number."""
        return self.has_grammar or self.params.has_penalties

    @property
    def has_grammar(self) -> bool:
        """True if a grammar bars tokens."""
        return self._grammar is not None

    def allowed(self) -> bytes | None:
        """Returns a bit for each token: 1 if the grammar allows the token next. Returns None if there is no grammar.

        Raises:
            InvalidRequest: the grammar has become too complex.
        """
        return None if self._grammar is None else self._grammar.allowed()

    def biases(self, num_logits: int, device: torch.device) -> Tensor:
        """The bias of each token, float32 `[V]` on `device`."""
        # A fork may read logits of another device, such as those of a draft model.
        if self._bias is None or self._bias.device != device:
            bias = torch.zeros(num_logits)
            token_ids, biases = zip(*self.params.logit_bias, strict=True)
            bias[list(token_ids)] = torch.tensor(biases)
            self._bias = to_device(bias, device, bias.dtype)
        return self._bias

    def penalties(self, vocabulary_size: int) -> TokenPenalties:
        """The penalties of the sequence, up to the last token that was added."""
        if self._penalties is None:
            prompt_ids, generated_ids = self._past
            self._penalties = TokenPenalties(
                prompt_ids,
                generated_ids,
                repetition=self.params.repetition_penalty,
                presence=self.params.presence_penalty,
                frequency=self.params.frequency_penalty,
                vocabulary_size=vocabulary_size,
            )
            self._past = ((), ())
        return self._penalties

    def take(self, token_id: int) -> None:
        """Advances position and grammar by the chosen token, which `StackedPenalties.add` counts."""
        self.position += 1
        if self._grammar is not None:
            self._grammar.add(token_id)

    def bar_ahead(self) -> None:
        """Computes which tokens the grammar allows next, before the logits are there. Any thread may call this.

        Raises:
            InvalidRequest: the grammar has become too complex; the next choice raises the same.
        """
        if self._grammar is not None:
            self._grammar.allowed()

    def fork(self) -> "Sampler":
        """An independent sampler that chooses the same next tokens as this one, without log probabilities."""
        copied = copy.copy(self)
        copied.params = replace(self.params, num_logprobs=None)
        if self._penalties is not None:
            copied._penalties = self._penalties.copy()
        if self._grammar is not None:
            copied._grammar = self._grammar.fork()
        return copied


def barred(allowed: Sequence[bytes], num_logits: int, device: torch.device) -> Tensor:
    """Numbers to be added to scores, so that a NaN stays NaN: minus Inf for barred tokens, and 0 for others.

    Args:
        allowed: for each row, one bit for each token, as `Sampler.allowed` returns them; all of one length.

    Returns:
        float32 `[R, V]` on `device`.
    """
    groups = to_device(torch.frombuffer(bytearray(b"".join(allowed)), dtype=torch.uint8), device, torch.uint8).int()
    return _barred_of_byte(device)[groups].view(len(allowed), -1)[:, :num_logits]


@functools.cache
def _barred_of_byte(device: torch.device) -> Tensor:
    """A float32 `[256, 8]` table: for each value of a byte, 0 or minus Inf for each of its eight bits."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return torch.zeros(256, 8).masked_fill(bits == 0, -torch.inf).to(device)
