"""Generation in which a small local model drafts several tokens and one pass through the chain checks them.

transformers checks the draft tokens, as it does those of an `assistant_model`. Sampled tokens keep their distribution
by rejection sampling (Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", 2023).
This module drafts: in the draft model's own context, and for a vocabulary whose embeddings are padded further.
"""

from typing import Any, Final, Self, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PretrainedConfig, PreTrainedModel
from transformers.generation import logits_process
from transformers.generation.candidate_generator import CandidateGenerator

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
    "assistant_model": "the small model drafts already",
    "prompt_lookup_num_tokens": "the small model drafts already",
    "inputs_embeds": "the small model reads tokens",
}


class SpeculativeGenerationMixin:
    """`generate` with the draft tokens of a small model. Batches have one row.

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
                than one row, beams, `assistant_model`, `prompt_lookup_num_tokens` or `inputs_embeds`.
        """
        if self.draft_model is None:
            raise ValueError("Speculative generation needs a `small_model` that drafts.")
        if not 1 <= speculative_inference_iteration_size <= MAX_DRAFT_TOKENS:
            raise ValueError(f"`speculative_inference_iteration_size` must lie between 1 and {MAX_DRAFT_TOKENS}.")
        for name, reason in _REFUSED.items():
            if kwargs.get(name) is not None:
                raise ValueError(f"`{name}` is not supported in speculative generation: {reason}.")
        if (kwargs.get("num_beams") or 1) > 1:
            raise ValueError("`num_beams` is not supported in speculative generation: it follows one sequence.")
        upstream: Any = super()
        # This option makes transformers check draft tokens; `_get_candidate_generator` makes them.
        return upstream.generate(inputs, *args, prompt_lookup_num_tokens=speculative_inference_iteration_size, **kwargs)

    def _get_candidate_generator(
        self,
        generation_config: GenerationConfig,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        **_further: Any,
    ) -> CandidateGenerator:
        if self.draft_model is None or input_ids.shape[0] != 1 or not input_ids.shape[1]:
            raise ValueError("Speculative generation takes one sequence, of at least one token.")
        mask = model_kwargs.get("attention_mask")
        is_text = torch.ones_like(input_ids[0]).bool() if mask is None else mask[0].bool()
        require_token_ids("input_ids", input_ids[0][is_text], num_tokens_of(self))
        return _Drafter(self.draft_model, logits_processor, generation_config, int((~is_text).sum()))


class _Drafter(CandidateGenerator):
    """Drafts the tokens of one answer.

    Args:
        num_padding: the number of columns before the text.
    """

    def __init__(
        self, model: DraftModel, processors: LogitsProcessorList, config: GenerationConfig, num_padding: int
    ) -> None:
        self._reading = DraftReading(model)
        self._processors = LogitsProcessorList([each for each in processors if isinstance(each, _PURE_PROCESSORS)])
        self._config: Any = config
        self._num_padding = num_padding

    def get_candidates(self, input_ids: Any, **_further: Any) -> Any:
        """Appends draft tokens to int64 `[1, T]`, one after the other; never up to the text's maximum length.

        Returns:
            The longer text, and the scores of the drafts, float32 `[1, drafts, V]`; None if tokens are not sampled.
        """
        reading = self._reading
        reading.token_ids[:] = input_ids[0, self._num_padding :].tolist()
        reading.forget_rejected_tokens()
        while reading.read_chunk():
            pass
        most = min(self._config.prompt_lookup_num_tokens, self._config.max_length - input_ids.shape[1] - 1)
        text = torch.tensor([reading.token_ids])
        drawn_by: list[Tensor] = []
        for _ in range(min(most, reading.num_tokens_left)):
            logits = reading.logits_after(int(text[0, -1]))
            scores: Tensor = self._processors(cast(Any, text), cast(Any, logits[None]))
            if self._config.do_sample:
                drawn_by.append(scores)
                newest = torch.multinomial(scores.softmax(dim=-1), 1)
            else:
                newest = scores.argmax(dim=-1, keepdim=True)
            text = torch.cat([text, newest], dim=1)
        drafted = text[:, len(reading.token_ids) :].to(input_ids.device)
        return torch.cat([input_ids, drafted], dim=1), torch.stack(drawn_by, dim=1) if drawn_by else None


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
