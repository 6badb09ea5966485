"""Generation in which a small local model drafts several tokens and one pass through the chain checks them.

Rejection sampling turns draft tokens from one distribution into exact samples of another one. Leviathan, Kalman,
Matias: "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al.: "Accelerating Large Language
Model Decoding with Speculative Sampling", 2023.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Self, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PretrainedConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import logits_process

from corolla.chassis.errors import UnsupportedFamily
from corolla.decoding.draft_model import DraftModel, DraftReading
from corolla.decoding.speculation import MAX_DRAFT_TOKENS
from corolla.hf.blocks import RemoteBlocks
from corolla.hf.families import MODEL_CLASSES, PREFIX
from corolla.hf.generation import found_by_threads
from corolla.hf.modeling import DistributedModelForCausalLM
from corolla.hf.vocabulary import num_tokens_of, require_same_vocabulary, require_token_ids
from corolla.models.checkpoint import context_length_of
from corolla.models.edges import Edges
from corolla.models.families import recurrent_layers


def checked_draft_token(
    target: Tensor, draft: Tensor, draft_token: int, generator: torch.Generator | None = None
) -> int:
    """Chooses the next token, the draft token or another one, so that it is distributed as `target`.

    A draft token `x` is accepted with the probability `min(1, target[x] / draft[x])`. Otherwise another token is drawn
    where `target` exceeds `draft`, in proportion to the excess.

    Args:
        target: float32 `[V]`, probabilities, on any device.
        draft: float32 `[V]`, on the same device: the probabilities by which `draft_token` was drawn.
        generator: the random stream; None takes torch's own.
    """
    chance = torch.rand((), generator=generator, device=target.device)
    if chance * draft[draft_token] < target[draft_token]:
        return draft_token
    surplus = (target - draft).clamp_(min=0)
    # Equal distributions have no surplus, apart from rounding; then the draft token is accepted.
    if surplus.sum() <= 0:
        return draft_token
    return int(torch.multinomial(surplus, num_samples=1, generator=generator))


SUFFIX: Final = "ForSpeculativeGeneration"
DEFAULT_ITERATION_SIZE: Final = 10

# Processors without state, which may run on draft tokens; those with state could count each call as a chosen token.
_PURE_PROCESSORS: Final = (
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
)

_REFUSED: Final = {
    "synced_gpus": "each process makes passes of its own number",
    "return_dict_in_generate": "a pass gives scores of tokens that are not taken",
    "assistant_model": "the small model drafts already",
    "prompt_lookup_num_tokens": "the small model drafts already",
    "inputs_embeds": "the small model reads tokens",
}

_iteration_size: ContextVar[int] = ContextVar("tokens drafted in one iteration", default=DEFAULT_ITERATION_SIZE)


class SpeculativeGenerationMixin:
    """Replaces transformers' loop for greedy decoding and sampling by one that drafts tokens. Batches have one row.

    Greedy answers equal plain decoding, token for token. Rejection sampling gives sampled answers the same
    distribution as plain sampling; it draws other random numbers, so the same seed gives another answer.

    The model needs a cache that can forget its last tokens.
    """

    draft_model: DraftModel | None = None

    @found_by_threads
    def generate(
        self,
        inputs: Tensor | None = None,
        *args: Any,
        speculative_inference_iteration_size: int = DEFAULT_ITERATION_SIZE,
        **kwargs: Any,
    ) -> Any:
        """`generate` of the model with drafts, and with one more argument.

        Args:
            inputs: int64 `[1, T]`, on the device of the model's head.
            speculative_inference_iteration_size: tokens drafted before each pass through the model, from 1 to 64.

        Raises:
            ValueError: there is no small model or no cache, the iteration size is out of range, or the call has more
                than one row, beams, `synced_gpus`, `return_dict_in_generate`, `assistant_model`,
                `prompt_lookup_num_tokens` or `inputs_embeds`.
        """
        if self.draft_model is None:
            raise ValueError("Speculative generation needs a `small_model` that drafts.")
        if not 1 <= speculative_inference_iteration_size <= MAX_DRAFT_TOKENS:
            raise ValueError(f"`speculative_inference_iteration_size` must lie between 1 and {MAX_DRAFT_TOKENS}.")
        for name, reason in _REFUSED.items():
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise ValueError(f"`{name}` is not supported in speculative generation: {reason}.")
        upstream: Any = super()
        token = _iteration_size.set(speculative_inference_iteration_size)
        try:
            return upstream.generate(inputs, *args, **kwargs)
        finally:
            _iteration_size.reset(token)

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("`num_beams` is not supported in speculative generation: it follows one sequence.")

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Decodes greedily or by sampling; transformers calls this method. Takes and returns int64 `[1, T]`."""
        if self.draft_model is None or synced_gpus or generation_config.return_dict_in_generate:
            raise ValueError("`synced_gpus` and `return_dict_in_generate` are not supported in speculative generation.")
        if input_ids.shape[0] != 1:
            raise ValueError(f"Speculative generation takes one sequence, not {input_ids.shape[0]}.")
        cache = model_kwargs.get("past_key_values")
        if cache is None or not input_ids.shape[1]:
            raise ValueError("Speculative generation needs a cache and at least one token of text.")
        answer = _Answer(self, input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        draft_tokens = _Drafter(self.draft_model, logits_processor, do_sample=bool(generation_config.do_sample))
        mask = model_kwargs.get("attention_mask")
        prompt = input_ids[0] if mask is None else input_ids[0][mask[0].bool()]
        require_token_ids("input_ids", prompt, num_tokens_of(self))
        draft_tokens.reading.token_ids.extend(prompt.tolist())
        while not answer.is_finished:
            draft = draft_tokens.draft(min(_iteration_size.get(), answer.num_tokens_left - 1))
            draft_tokens.reading.token_ids.extend(answer.check(draft, cache, model_kwargs.get("attention_mask")))
        if streamer is not None:
            streamer.end()
        return answer.input_ids


@dataclass(frozen=True, slots=True)
class _DraftToken:
    """A draft token and, if tokens are sampled, the distribution, float32 `[V]`, that it was drawn from."""

    token_id: int
    probabilities: Tensor | None


class _Drafter:
    """Drafts the tokens of one answer."""

    def __init__(self, model: DraftModel, processors: LogitsProcessorList, *, do_sample: bool) -> None:
        self.reading = DraftReading(model)
        self._processors = LogitsProcessorList([each for each in processors if isinstance(each, _PURE_PROCESSORS)])
        self._do_sample = do_sample

    def draft(self, num_tokens: int) -> list[_DraftToken]:
        """Drafts at most `num_tokens` tokens, one after the other."""
        self.reading.forget_rejected_tokens()
        while self.reading.read_chunk():
            pass
        draft_tokens: list[_DraftToken] = []
        text = torch.tensor([self.reading.token_ids])
        for _ in range(min(num_tokens, self.reading.num_tokens_left)):
            logits = self.reading.logits_after(int(text[0, -1]))
            scores = self._processors(cast(Any, text), cast(Any, logits[None]))
            probabilities = scores.softmax(dim=-1) if self._do_sample else None
            newest = (
                scores.argmax(dim=-1, keepdim=True) if probabilities is None else torch.multinomial(probabilities, 1)
            )
            draft_tokens.append(_DraftToken(int(newest), None if probabilities is None else probabilities[0]))
            text = torch.cat([text, newest], dim=1)
        return draft_tokens


class _Answer:
    """One answer. It calls transformers' processors, criteria and streamer for each token in order."""

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Any,
    ) -> None:
        self.input_ids = input_ids
        self.is_finished = False
        self._model = model
        self._processors = processors
        self._criteria = criteria
        self._do_sample = bool(config.do_sample)
        self._max_length: int | None = config.max_length
        self._streamer = streamer

    @property
    def num_tokens_left(self) -> int:
        if self._max_length is None:
            return MAX_DRAFT_TOKENS + 1
        return max(1, self._max_length - self.input_ids.shape[1])

    def check(self, draft: list[_DraftToken], cache: Any, mask: Tensor | None) -> list[int]:
        """Checks draft tokens in one pass over them and the text's tokens that the cache lacks.

        Args:
            cache: the cache of the text; it lacks at least the last token before the pass, and exactly that after it.
            mask: `[1, P]`, the prompt's mask; later tokens are not masked.

        Returns:
            The accepted draft tokens and, unless they end the answer, one token that the model chose itself.
        """
        drafted = self.input_ids.new_tensor([[draft_token.token_id for draft_token in draft]], dtype=torch.int64)
        candidate = torch.cat([self.input_ids, drafted], dim=1)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(1, candidate.shape[1] - mask.shape[1])], dim=1)
        new_ids = candidate[:, cache.get_seq_length() :]
        output = self._model(
            input_ids=new_ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=len(draft) + 1
        )
        taken: list[int] = []
        for row, draft_token in zip(output.logits[0].float(), [*draft, None], strict=True):
            scores = self._processors(cast(Any, self.input_ids), cast(Any, row[None]))[0]
            taken.append(self._choose(scores, draft_token))
            self._take(taken[-1])
            if self.is_finished or draft_token is None or taken[-1] != draft_token.token_id:
                break
        if (num_wrong := cache.get_seq_length() - (self.input_ids.shape[1] - 1)) > 0:
            cache.crop(-num_wrong)
        return taken

    def _choose(self, scores: Tensor, draft_token: _DraftToken | None) -> int:
        if not self._do_sample:
            return int(scores.argmax())
        probabilities = scores.softmax(dim=-1)
        if draft_token is None or draft_token.probabilities is None:
            return int(torch.multinomial(probabilities, num_samples=1))
        return checked_draft_token(
            probabilities, draft_token.probabilities.to(probabilities.device), draft_token.token_id
        )

    def _take(self, token_id: int) -> None:
        newest = self.input_ids.new_tensor([[token_id]])
        self.input_ids = torch.cat([self.input_ids, newest], dim=1)
        if self._streamer is not None:
            self._streamer.put(newest[0].cpu())
        # transformers would pass its scores here; this loop keeps none.
        self.is_finished = bool(self._criteria(self.input_ids, None).all())


class _DistributedSpeculative(SpeculativeGenerationMixin, DistributedModelForCausalLM):  # type: ignore[misc]
    """A distributed model with a small local model that drafts.

    Args:
        config: the configuration of the whole model, as read from its checkpoint.
        small_model: a causal language model of `transformers`, which must have the same tokenizer.
        edges: the embedding, final norm and head; without them or `blocks`, `from_config` makes both.
        options: options of that `from_config`, such as the router's address; otherwise they have no effect.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        small_model: PreTrainedModel | None = None,
        *,
        edges: Edges | None = None,
        blocks: RemoteBlocks | None = None,
        **options: Any,
    ) -> None:
        if edges is None or blocks is None:
            plain = DistributedModelForCausalLM.from_config(config, **options)
            edges, blocks = plain.edges, plain.blocks
        super().__init__(config, edges=edges, blocks=blocks)
        if small_model is not None:
            self.draft_with(small_model)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, name_or_path: str, *, small_model: PreTrainedModel, **options: Any
    ) -> Self:
        """Loads the model like `from_pretrained` of the family's distributed class, with `small_model` to draft.

        Raises:
            CheckpointError: see `DistributedModelForCausalLM.from_pretrained`.
            UnsupportedFamily: see `draft_with`.
            ValueError: `small_model` has another vocabulary.
        """
        model = super().from_pretrained(name_or_path, **options)
        model.draft_with(small_model)
        return model

    def draft_with(self, small_model: PreTrainedModel) -> None:
        """Sets the model that drafts from now on.

        Raises:
            UnsupportedFamily: one of the two models has a recurrent state, from which draft tokens cannot be removed.
            ValueError: `small_model` has another vocabulary.
        """
        for config in (self.config, small_model.config):
            if recurrent_layers(config):
                raise UnsupportedFamily(
                    f"Models of type {config.model_type!r} have a recurrent state, from which draft tokens cannot be "
                    "taken back; generate without a small model."
                )
        require_same_vocabulary(self.config, small_model.config)
        # The dataclass hides the small model from torch, so that its weights do not count as this model's.
        self.draft_model = DraftModel(small_model, context_length_of(small_model.config), int(self.config.vocab_size))


def _make(model_type: str) -> type[_DistributedSpeculative]:
    plain = MODEL_CLASSES[model_type]
    family = plain.__name__.removeprefix(PREFIX).removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    facts = {
        "model_type": model_type,
        "__module__": __name__,
        "__doc__": f"`{plain.__name__}` with a small local model that drafts tokens ahead.",
    }
    return type(PREFIX + family + SUFFIX, (_DistributedSpeculative, plain), facts)


SPECULATIVE_CLASSES: Final = {model_type: _make(model_type) for model_type in MODEL_CLASSES}
"""The classes by `config.model_type`."""

SPECULATIVE_CLASSES_BY_NAME: Final = {each.__name__: each for each in SPECULATIVE_CLASSES.values()}

globals().update(SPECULATIVE_CLASSES_BY_NAME)
