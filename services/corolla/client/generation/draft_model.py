"""Guesses at the next tokens by a small model that runs in this process."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from corolla.chassis.errors import CheckpointError
from corolla.client.compute import ComputeThread
from corolla.client.generation.sampling import Sampler
from corolla.client.text.tokenizer import TextTokenizer
from corolla.models.checkpoint import Checkpoint

DRAFT_MODEL_RATES: Final[tuple[float, ...]] = (0.7,)
"""How often a guess is right before anything is known of a text; there is one kind of evidence."""

_CHUNK_TOKENS: Final = 64


@dataclass(frozen=True)
class DraftModel:
    """A model with the target's vocabulary.

    Args:
        causal_model: a causal language model of `transformers`.
        context_length: the longest text that it can read, in tokens.
        vocab_size: logits of the target model.
    """

    causal_model: PreTrainedModel
    context_length: int
    vocab_size: int

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, tokenizer: TextTokenizer, *, vocab_size: int, dtype: torch.dtype, device: str
    ) -> "DraftModel":
        """Reads the whole model, after a look at its tokenizer.

        Args:
            tokenizer: the target's; token ids are compared by what the draft guesses, so both must have the same.

        Raises:
            CheckpointError: another tokenizer, or weights that cannot be read.
        """
        vocabulary, own_vocabulary = (
            each.hf_tokenizer.get_vocab() for each in (tokenizer, TextTokenizer.load(checkpoint.folder))
        )
        if vocabulary != own_vocabulary:
            raise CheckpointError(
                f"The draft model {checkpoint.name} has another tokenizer than the model that it is to draft for; "
                "COROLLA_DRAFT_MODEL must name a model of the same vocabulary."
            )
        library: Any = AutoModelForCausalLM
        try:
            model = library.from_pretrained(checkpoint.folder, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"The draft model {checkpoint.name} cannot be loaded.") from error
        return cls(model.eval().to(device), checkpoint.context_length, vocab_size)

    @torch.inference_mode()
    def logits(self, token_ids: list[int], cache: DynamicCache) -> Tensor:
        """Float32 `[vocabulary of the target]` on the CPU, after `token_ids`, which follow what `cache` holds."""
        ids = torch.tensor([token_ids], device=self.causal_model.device)
        output = self.causal_model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = cast(Tensor, output.logits)[0, -1].float().cpu()[: self.vocab_size]
        # Embeddings may be padded differently. The random stream must not notice: it takes one number for each logit.
        missing = self.vocab_size - logits.shape[0]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class ModelDrafter:
    """The draft model's reading of one text, with a KV cache of its own.

    It chooses as the target will: by a fork of its sampler, penalties and random stream included. With equal random
    numbers two similar distributions mostly give the same token, so drafts of sampled answers are accepted, too.
    """

    def __init__(self, model: DraftModel, compute: ComputeThread) -> None:
        self._model = model
        self._compute = compute
        # One layer of a kind for all: it can forget its newest tokens, whatever window the model looks through.
        self._cache = DynamicCache()
        self._token_ids: list[int] = []
        self._cached_ids: list[int] = []

    def extend(self, token_ids: Iterable[int]) -> None:
        """Takes the next tokens of the text."""
        self._token_ids.extend(token_ids)

    @property
    def evidence(self) -> int | None:
        return 0 if len(self._token_ids) < self._model.context_length else None

    async def prepare(self) -> None:
        """Reads the text up to its last token, so that a later draft has less to do."""
        if self.evidence is not None:
            await self._read_up_to(len(self._token_ids) - 1)

    async def draft(self, num_tokens: int, sampler: Sampler) -> list[int]:
        """The next tokens as this model would have them.

        Args:
            sampler: the target's; it is not touched.
        """
        self._forget_wrong_guesses()
        num_tokens = min(num_tokens, self._model.context_length - len(self._token_ids))
        await self._read_up_to(len(self._token_ids) - 1)
        fork = await self._compute.run(sampler.fork)
        drafted: list[int] = []
        newest = self._token_ids[-1]
        for _ in range(num_tokens):
            newest = await self._compute.run(self._guess, newest, fork)
            drafted.append(newest)
        return drafted

    async def _read_up_to(self, end: int) -> None:
        """In chunks, so that the thread serves other answers in between."""
        while (start := len(self._cached_ids)) < end:
            chunk = self._token_ids[start : min(end, start + _CHUNK_TOKENS)]
            await self._compute.run(self._model.logits, chunk, self._cache)
            self._cached_ids.extend(chunk)

    def _guess(self, newest: int, sampler: Sampler) -> int:
        logits = self._model.logits([newest], self._cache)
        self._cached_ids.append(newest)
        return sampler.sample(logits).token_id

    def _forget_wrong_guesses(self) -> None:
        """What was cached of guesses that the target did not take goes; the text's last token is always read anew."""
        num_right = min(len(self._cached_ids), len(self._token_ids) - 1)
        first_unsure = max(0, num_right - 2 * _CHUNK_TOKENS)
        for index in range(first_unsure, num_right):
            if self._cached_ids[index] != self._token_ids[index]:
                num_right = index
                break
        if (num_wrong := len(self._cached_ids) - num_right) > 0:
            self._cache.crop(-num_wrong)
            del self._cached_ids[num_right:]
