"""Causal language models without local weights: they send only token ids, and the last hop chooses each token."""

import copy
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from corolla.chain.reservations import OpenOptions
from corolla.chassis.errors import InvalidRequest, UnsupportedFamily
from corolla.chassis.merge import merge
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.sampler_record import SamplerRecord
from corolla.hf.connection import DEFAULT_ROUTER, Connection, cache_salt
from corolla.hf.defaults import served_defaults
from corolla.hf.loading import NotPickled, read_options
from corolla.hf.positions import PositionRules
from corolla.hf.refusals import RefusedMethods
from corolla.hf.vocabulary import require_token_ids
from corolla.models.checkpoint import Checkpoint, end_token_ids_of
from corolla.models.families import recurrent_layers
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.page_hashes import TextDigests

_NUM_SEEDS: Final = 2**63 - 1

# Options of the generation config that a last hop, or this module, applies.
_HEEDED: Final = frozenset(
    {
        "do_sample", "eos_token_id", "max_length", "max_new_tokens", "max_time", "min_p", "num_return_sequences",
        "pad_token_id", "prompt_lookup_num_tokens", "repetition_penalty", "stop_strings", "temperature", "top_k",
        "top_p",
    }
)  # fmt: skip

# Options that have no effect here, since there is only one kind of cache, and no beams or assistant model.
_IDLE: Final = frozenset(
    {
        "assistant_confidence_threshold", "assistant_lookbehind", "bos_token_id", "cache_config",
        "cache_implementation", "decoder_start_token_id", "disable_compile", "early_stopping", "is_assistant",
        "length_penalty", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "target_lookbehind", "transformers_version", "use_cache",
    }
)  # fmt: skip


class RemoteModelForCausalLM(NotPickled, RefusedMethods, GenerationMixin):
    """A causal language model that has only its configuration in this process.

    `generate` decodes greedily or by sampling, with the block servers' own sampler. Beams, logits processors and
    guidance need logits in this process: use a `DistributedModelForCausalLM` for them.

    Args:
        reuse_prefixes: whether the tenant's prompts share what hops computed for equal beginnings of texts.
        salt: the salt with which the digests of the tenant's texts begin.
    """

    main_input_name = "input_ids"

    def __init__(
        self, checkpoint: Checkpoint, connection: Connection, tenant: str, *, reuse_prefixes: bool, salt: bytes = b""
    ) -> None:
        self.config: PretrainedConfig = copy.deepcopy(checkpoint.config)
        self._position_rules = PositionRules(self.config.get_text_config())
        self.generation_config: GenerationConfig = served_defaults(checkpoint, lambda name: name in _HEEDED | _IDLE)
        self._context_length = checkpoint.context_length
        self._connection = connection
        self._tenant = tenant
        self._reuses_prefixes = reuse_prefixes
        self._cache_salt = salt
        self._adapter: AdapterVersion | None = None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        router: str = DEFAULT_ROUTER,
        dtype: str | torch.dtype | None = None,
        quantization: str = "none",
        kv_cache_dtype: str = "auto",
        revision: str | None = None,
        tenant: str = "public",
        reuse_prefixes: bool = False,
        tls_dir: str | Path | None = None,
        cache_secret: str | None = None,
        adapter: str | None = None,
        **options: Any,
    ) -> Self:
        """Reads the configuration, and connects to a router. See `DistributedModelForCausalLM.from_pretrained`."""
        dtype, _ = read_options(options, dtype, None)
        salt = cache_salt(tenant, cache_secret)
        checkpoint = Checkpoint.from_pretrained(name_or_path, revision=revision)
        connection = Connection.to(checkpoint, router, dtype, quantization, tls_dir, kv_cache_dtype)
        model = cls(checkpoint, connection, tenant, reuse_prefixes=reuse_prefixes, salt=salt)
        model.set_adapter(adapter)
        return model

    def set_adapter(self, name: str | None) -> None:
        """Sets the adapter of later answers; None for no adapter. See `DistributedModelForCausalLM.set_adapter`."""
        self._adapter = self._connection.adapter(name, self._tenant)

    @classmethod
    def can_generate(cls) -> bool:
        return True

    @property
    def name_or_path(self) -> str:
        """A folder with configuration and tokenizer."""
        return str(self.config.name_or_path)

    @property
    def device(self) -> torch.device:
        """The CPU; but `generate` returns its result on the device of the prompts."""
        return torch.device("cpu")

    def generate(  # type: ignore[override]
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        tokenizer: Any = None,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> Tensor:
        """Answers prompts, and returns prompts and answers as `generate` of transformers does.

        Each row is a session of its own, so no row waits for another.

        Args:
            inputs: int64 `[B, T]`, on any device, padded on the left if at all; `input_ids` is another name for them.
            generation_config: None takes the model's own; `options` are applied to it.
            attention_mask: `[B, T]`; 0 is padding.
            stopping_criteria: criteria that are called for each row alone, without scores.
            streamer: gets the prompt, then tokens as they come; only for a single row.
            options: options of a generation config. The seed of a sampled answer is drawn from torch's random stream; a
                client service gives the same tokens for that seed.

        Returns:
            int64 `[B * num_return_sequences, T + N]`, where N is the longest answer's length; shorter ones are padded.

        Raises:
            ValueError: an argument needs logits in this process, or a token id is outside the vocabulary.
            CorollaError: the chain failed.
        """
        given = inputs if inputs is not None else input_ids
        if given is None or given.dim() != 2 or given.shape[1] == 0 or (inputs is not None and input_ids is not None):
            raise ValueError("Give prompts as `inputs` or as `input_ids`, int64 [B, T], each of at least one token.")
        has_length = any(each is not None for each in (options.get("max_length"), self.generation_config.max_length))
        has_length |= generation_config is not None and generation_config.max_length is not None
        upstream: Any = super()
        config, unknown = upstream._prepare_generation_config(generation_config, **options)
        refuse_without_logits(config, unknown)
        criteria = _criteria(config, stopping_criteria, tokenizer)
        max_new_tokens = _max_new_tokens(config, given.shape[1], has_length=has_length)
        if attention_mask is None:
            # transformers takes padding tokens for padding unless they also end answers.
            special = copy.deepcopy(config)
            upstream._prepare_special_tokens(special, device=given.device)
            attention_mask = upstream._prepare_attention_mask_for_generation(given, special, {})
        mask: Tensor = attention_mask
        if mask.shape != given.shape or not bool((mask[:, -1] != 0).all()):
            raise ValueError(
                f"`attention_mask` must have the shape {list(given.shape)} of the tokens, and padding is on the left."
            )
        self._position_rules.refuse_holes(mask.bool())
        token_ids = given.repeat_interleave(config.num_return_sequences or 1, dim=0)
        mask = mask.repeat_interleave(config.num_return_sequences or 1, dim=0).bool()
        require_token_ids("input_ids", token_ids[mask], self.config.get_text_config().vocab_size)
        if streamer is not None and len(token_ids) > 1:
            raise ValueError("`streamer` takes a single row; streams of several would be mixed.")
        rows = self._rows(token_ids, mask, config, max_new_tokens)
        if streamer is not None:
            streamer.put(token_ids.cpu())
        self._answer(rows, criteria, streamer)
        if streamer is not None:
            streamer.end()
        return _joined(token_ids, rows, config)

    def _rows(self, token_ids: Tensor, mask: Tensor, config: GenerationConfig, max_new_tokens: int) -> list["_Row"]:
        params = _sampling_params(config)
        end_token_ids = frozenset(end_token_ids_of(config))
        drafts = None
        if config.prompt_lookup_num_tokens:
            if recurrent_layers(self.config.get_text_config()):
                raise UnsupportedFamily(
                    "Draft tokens can be wrong, and models with a recurrent state cannot take them back; leave out "
                    "prompt_lookup_num_tokens."
                )
            drafts = pb.Drafts(
                source=pb.Drafts.SOURCE_PROMPT_LOOKUP, max_tokens=config.prompt_lookup_num_tokens, is_adaptive=True
            )
        seeds = torch.randint(_NUM_SEEDS, (len(token_ids),)).tolist() if config.do_sample else [0] * len(token_ids)
        rows = []
        for ids, its_mask, seed in zip(token_ids.cpu(), mask.cpu(), seeds, strict=True):
            prompt_ids: list[int] = ids[its_mask].tolist()
            room = self._context_length - len(prompt_ids)
            if room < 1:
                raise ValueError(
                    f"A prompt of {len(prompt_ids)} tokens leaves no room in the model's context of "
                    f"{self._context_length} tokens."
                )
            # An answer may end long before its limit. One that reaches the end of the context ends there.
            most = min(max_new_tokens, room)
            sampler = SamplerRecord(
                params, seed, prompt_ids, max_new_tokens=most, end_token_ids=end_token_ids, drafts=drafts
            )
            rows.append(_Row(ids.tolist(), prompt_ids, sampler, most, end_token_ids))
        return rows

    def _answer(self, rows: Sequence["_Row"], criteria: StoppingCriteriaList, streamer: BaseStreamer | None) -> None:
        """Reads all rows' tokens. This thread calls the criteria and the streamer while the hops compute."""
        answers = self._connection.iterate(merge([self._tokens_of(row) for row in rows]))
        with closing(answers):
            for index, new_ids in answers:
                for token_id in rows[index].take(new_ids, criteria):
                    if streamer is not None:
                        streamer.put(torch.tensor([token_id]))

    async def _tokens_of(self, row: "_Row") -> AsyncGenerator[Sequence[int], None]:
        """Runs one row's session in the connection's thread. Yields the row's new tokens as they arrive."""
        options = OpenOptions(
            max_tokens=len(row.prompt_ids) + row.num_left,
            transient=True,
            texts=[TextDigests(row.prompt_ids)] if self._reuses_prefixes else None,
            cache_salt=self._cache_salt,
            adapter=self._adapter,
        )
        async with self._connection.open_session(self._tenant, options, row.sampler) as session:
            await session.restore(row.prompt_ids)
            await session.prefill(row.prompt_ids[session.position :], row)
            while True:
                while row.wants_more and session.has_unread_tokens:
                    await session.decode(row)
                new_ids, row.new_ids = row.new_ids, []
                yield new_ids
                if not row.wants_more:
                    return
                await session.decode(row)


@dataclass(slots=True)
class _Row:
    """One sequence, its prompt and its answer so far. The connection's thread reads tokens, the caller's takes them.

    Attributes:
        shown_ids: the prompt, padding included.
        prompt_ids: the prompt without padding.
        num_left: how many tokens may still be read.
        new_ids: the tokens that were read and not given to the caller's thread yet.
        answer_ids: the tokens of the answer so far.
        is_stopped: whether a criterion ended the answer.
    """

    shown_ids: list[int]
    prompt_ids: list[int]
    sampler: SamplerRecord
    num_left: int
    end_token_ids: frozenset[int]
    new_ids: list[int] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)
    is_stopped: bool = False

    def read(self, token: SampledToken) -> bool:
        """Takes the next token. Returns whether another one is wanted."""
        self.new_ids.append(token.token_id)
        self.num_left = 0 if token.token_id in self.end_token_ids else self.num_left - 1
        return self.wants_more

    @property
    def wants_more(self) -> bool:
        """The row continues, as far as the connection's thread knows."""
        return self.num_left > 0 and not self.is_stopped

    def take(self, new_ids: Sequence[int], criteria: StoppingCriteriaList) -> Sequence[int]:
        """Appends tokens up to the one at which a criterion ends the row; returns the appended tokens."""
        if self.is_stopped:
            return ()
        for count, token_id in enumerate(new_ids, 1):
            self.answer_ids.append(token_id)
            if criteria and _are_met(criteria, [*self.shown_ids, *self.answer_ids]):
                self.is_stopped = True
                return new_ids[:count]
        return new_ids


def _are_met(criteria: StoppingCriteriaList, token_ids: Sequence[int]) -> bool:
    without_scores: Any = None
    return bool(criteria(torch.tensor([token_ids]), without_scores).any())


def refuse_without_logits(config: GenerationConfig, unknown: dict[str, Any]) -> None:
    """Raises ValueError for an option that needs logits in this process, or that is unknown."""
    idle_values = GenerationConfig._get_default_generation_params()
    served = _HEEDED | _IDLE
    options = {
        name: value for name, value in config.to_dict().items() if name not in served and not name.startswith("_")
    }
    known = GenerationConfig().to_dict().keys()
    asked = [name for name in options.keys() & known if options[name] not in (None, False, idle_values.get(name))]
    asked += [name for name, value in unknown.items() if value is not None and value is not False]
    if asked:
        raise ValueError(
            f"`{min(asked)}` is not supported with remote edges: block servers choose the tokens, and no logits come "
            "here. Load the model with local edges."
        )


def _criteria(config: GenerationConfig, given: StoppingCriteriaList | None, tokenizer: Any) -> StoppingCriteriaList:
    """The criteria that end a row, apart from its length and its end tokens, which the last hop checks."""
    criteria = StoppingCriteriaList(given or [])
    if config.max_time is not None:
        criteria.append(MaxTimeCriteria(max_time=config.max_time))
    if config.stop_strings is not None:
        if tokenizer is None:
            raise ValueError("`stop_strings` needs the model's `tokenizer`.")
        criteria.append(StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer))
    return criteria


def _max_new_tokens(config: Any, num_columns: int, *, has_length: bool) -> int:
    if config.max_new_tokens is not None:
        max_new_tokens: int = config.max_new_tokens
    elif has_length:
        max_new_tokens = (config.max_length or 0) - num_columns
    else:
        max_new_tokens = config.max_length or 0
    if max_new_tokens < 1:
        raise ValueError(f"The prompt has {num_columns} tokens, and there is no room for a new one; see `max_length`.")
    return max_new_tokens


def _sampling_params(config: GenerationConfig) -> SamplingParams:
    if not config.do_sample:
        return SamplingParams(repetition_penalty=config.repetition_penalty or 1.0)
    if not config.temperature or config.temperature < 0:
        raise ValueError("`temperature` must be above 0; `do_sample=False` is greedy.")
    try:
        return SamplingParams(
            temperature=config.temperature,
            top_k=config.top_k or 0,
            top_p=1.0 if config.top_p is None else config.top_p,
            min_p=config.min_p or 0.0,
            repetition_penalty=config.repetition_penalty or 1.0,
        )
    except InvalidRequest as refusal:
        raise ValueError(str(refusal)) from None


def _joined(token_ids: Tensor, rows: Sequence[_Row], config: GenerationConfig) -> Tensor:
    """Prompts, int64 `[B, T]`, with their answers, padded on the right as transformers does: int64 `[B, T + N]`."""
    longest = max(len(row.answer_ids) for row in rows)
    padding = next(iter(end_token_ids_of(config)), 0) if config.pad_token_id is None else config.pad_token_id
    answers = [row.answer_ids + [padding] * (longest - len(row.answer_ids)) for row in rows]
    return torch.cat([token_ids, torch.tensor(answers, device=token_ids.device)], dim=1)
