"""`generate` of transformers over remote blocks, in sessions that later calls can continue.

transformers decides every token; this module only chooses the cache and says how much of the text is in it.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from corolla.chassis.errors import UnsupportedFamily
from corolla.hf.blocks import RemoteBlocks
from corolla.hf.cache import FOREIGN_CACHE, NO_CROP, RemotePastKeyValues, is_empty
from corolla.hf.refusals import refuse_alone, refuse_in_session, refuse_unsupported
from corolla.hf.session import InferenceSession, active_session, warn_of_session_elsewhere
from corolla.hf.vocabulary import num_tokens_of, require_token_ids
from corolla.models.families import recurrent_layers


@dataclass(frozen=True, slots=True)
class Continuation:
    """The text that a call continues, and how much of it the caller did not give.

    Attributes:
        token_ids: int64 `[B, T]`, the whole text, on the device of the session's text.
        mask: int64 `[B, T]` on the same device, or None if no mask was given.
        num_omitted: the number of leading columns that the caller did not give; the answer leaves them out, too.
    """

    token_ids: Tensor
    mask: Tensor | None
    num_omitted: int


def continuation_of(text: Tensor, text_mask: Tensor | None, given: Tensor | None, mask: Tensor | None) -> Continuation:
    """Joins a session's text with the input of a call: the whole text and more, only new text, or nothing.

    Input that begins with the session's whole text counts as the whole text, never as new text that repeats it.

    Args:
        text: int64 `[B, L]`, the token log. The result is on its device.
        text_mask: int64 `[B, L]`; None is all ones.
        given: int64 `[B, T]` on any device, or None to continue the session's text.
        mask: int64, with the shape of `given` or of the whole text.

    Raises:
        ValueError: the batch has another size, or the mask another length.
    """
    if given is None:
        token_ids, num_omitted = text, text.shape[1]
    else:
        if given.dim() != 2 or given.shape[0] != text.shape[0]:
            raise ValueError(
                f"The session holds {text.shape[0]} sequences, so `inputs` must have the shape [{text.shape[0]}, "
                f"tokens], not {list(given.shape)}."
            )
        given = given.to(device=text.device, dtype=text.dtype)
        num_held = text.shape[1]
        if given.shape[1] >= num_held and torch.equal(given[:, :num_held], text):
            token_ids, num_omitted = given, 0
        else:
            token_ids, num_omitted = torch.cat([text, given], dim=1), num_held
    num_given = 0 if given is None else given.shape[1]
    return Continuation(token_ids, _mask_of(token_ids, num_given, text_mask, mask), num_omitted)


def _mask_of(token_ids: Tensor, num_given: int, text_mask: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if mask is None and text_mask is None:
        return None
    num_tokens = token_ids.shape[1]
    whole = torch.ones_like(token_ids)
    if text_mask is not None:
        whole[:, : text_mask.shape[1]] = text_mask
    if mask is not None:
        if mask.dim() != 2 or mask.shape[0] != token_ids.shape[0] or mask.shape[1] not in (num_given, num_tokens):
            raise ValueError(
                f"`attention_mask` must have the shape [{token_ids.shape[0]}, {num_given}], for what is given, or "
                f"[{token_ids.shape[0]}, {num_tokens}], for the whole text; not {list(mask.shape)}."
            )
        whole[:, num_tokens - mask.shape[1] :] = mask.to(device=whole.device, dtype=whole.dtype)
    return whole


Method = TypeVar("Method", bound=Callable[..., Any])

_SIGNATURE: Final = inspect.signature(GenerationMixin.generate)

# The sessions that a running call of `generate` made, for itself and for logits processors.
_new_sessions: ContextVar[list[InferenceSession] | None] = ContextVar("sessions that generate made", default=None)


class _FoundByThreads:
    """A method that remembers the session of the thread that looked it up, for threads that this thread starts.

    `Thread(target=model.generate, ...)` looks `generate` up in the owner's thread, and calls it in another one, which
    does not know what the owner has entered.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__doc__ = function.__doc__
        self._function = function

    def __get__(self, model: Any, owner: Any = None) -> Callable[..., Any]:
        if model is None:
            return self._function
        bound: Callable[..., Any] = self._function.__get__(model)
        # The model may have no sessions: the method also serves models of transformers.
        session: InferenceSession | None = getattr(model, "active_session", None)
        if session is None:
            return bound
        owners_thread = threading.get_ident()

        @functools.wraps(bound)
        def found(*args: Any, **kwargs: Any) -> Any:
            is_elsewhere = threading.get_ident() != owners_thread and model.active_session is None
            if is_elsewhere and session.is_entered and kwargs.get("session") is None:
                kwargs["session"] = session
            return bound(*args, **kwargs)

        return found


def found_by_threads(method: Method) -> Method:
    """Makes a method remember the session of the thread that looks it up; see `_FoundByThreads`."""
    return cast(Method, _FoundByThreads(method))


class RemoteGenerationMixin(GenerationMixin):
    """`generate` for a model whose blocks are remote."""

    blocks: RemoteBlocks

    def inference_session(
        self,
        *,
        max_length: int | None = None,
        prompts: Tensor | None = None,
        block_prompts: Tensor | None = None,
    ) -> InferenceSession:
        """A session over all blocks.

        Inside `with session:`, every `generate` of this model uses it.

        Args:
            max_length: the number of positions, padding included, to reserve now; None lets the session grow.
            prompts: `[P, H]`, floating point, on any device: trained embeddings that come before every sequence's text.
            block_prompts: `[blocks, P, H]` or `[blocks, B, P, H]`, floating point, on any device: trained embeddings
                that are added to the input of each block at the first P positions; see `InferenceSession`.
        """
        return self.blocks.inference_session(max_length=max_length, prompts=prompts, block_prompts=block_prompts)

    @property
    def active_session(self) -> InferenceSession | None:
        """The session of this model that the running code has entered, if any."""
        return active_session(self.blocks.remote)

    @contextmanager
    def use_session(self, session: InferenceSession) -> Iterator[InferenceSession]:
        """Inside the context, `generate` uses this session, which stays open afterwards."""
        session.activate()
        try:
            yield session
        finally:
            session.deactivate()

    @found_by_threads
    def generate(
        self, inputs: Tensor | None = None, *args: Any, session: InferenceSession | None = None, **kwargs: Any
    ) -> Any:
        """`generate` of transformers, with the same arguments and results.

        The call uses the given session, else the active one, else a new one for this call. A thread whose target is
        this method is in the session that its starter has entered; any other thread must be given the session. In a
        session, a later call gives the whole text so far and more, or only new text, or nothing; the answer begins with
        the given text. Text that begins with the whole token log counts as the whole text. `max_length` counts the
        whole text of the session, `max_new_tokens` only new tokens.

        Args:
            inputs: int64 `[B, T]`, on any device, padded on the left if at all; None continues a session that has text.
            session: the session to use; it stays open after the call.
            args: positional arguments of transformers' own `generate`; `kwargs` are its keyword arguments.

        Raises:
            ValueError: an argument needs what remote blocks cannot do, or a token id is outside the vocabulary.
            CorollaError: the chain failed.
        """
        bound = _SIGNATURE.bind_partial(self, inputs, *args)
        call: dict[str, Any] = {name: value for name, value in bound.arguments.items() if name != "self"}
        if twice := call.keys() & kwargs.keys():
            raise TypeError(f"generate() got multiple values for {', '.join(sorted(twice))}")
        call |= kwargs
        config = self._resolved_config(call)
        refuse_unsupported(call, config)
        session = session or self.active_session
        if session is None:
            refuse_alone(call)
            if is_empty(call.get("past_key_values")):
                call["past_key_values"] = self.own_cache(call["past_key_values"])
            warn_of_session_elsewhere(self.blocks.remote)
            return self._generate(call)
        if not isinstance(session, InferenceSession):
            raise ValueError("`session` must be what `inference_session()` of this model returned.")
        self._check_blocks(session)
        refuse_in_session(call, config, has_text=session.output_ids is not None)
        return self._generate_in(session, call)

    def _generate(self, call: dict[str, Any]) -> Any:
        """Calls transformers' `generate`. New sessions of the call end with it, except that of a returned cache."""
        new_sessions: list[InferenceSession] = []
        token = _new_sessions.set(new_sessions)
        kept: InferenceSession | None = None
        try:
            upstream: Any = super()
            answer = upstream.generate(**call)
            cache = getattr(answer, "past_key_values", None)
            kept = cache.session if isinstance(cache, RemotePastKeyValues) else None
            return answer
        finally:
            _new_sessions.reset(token)
            for session in new_sessions:
                if session is not kept:
                    session.close()

    def _generate_in(self, session: InferenceSession, call: dict[str, Any]) -> Any:
        given = call.pop("input_ids", None) if call.get("inputs") is None else call["inputs"]
        mask = call.get("attention_mask")
        num_omitted = 0
        if session.output_ids is not None:
            text = continuation_of(session.output_ids, session.output_mask, given, mask)
            call = _continued(call, text)
            given, mask, num_omitted = text.token_ids, text.mask, text.num_omitted
        elif given is not None:
            call["inputs"] = given
        session.count_prefix()
        position = session.position
        try:
            answer = self._generate(call | {"past_key_values": self._cache_of(session)})
        except BaseException:
            # A repeated call recognises tokens that were processed, but would process embeddings twice.
            if call.get("inputs_embeds") is not None and not session.is_closed:
                session.position = position
            raise
        sequences: Tensor = answer if isinstance(answer, Tensor) else answer.sequences
        if call.get("inputs_embeds") is not None:
            session.count_prefix()
            mask = None
        session.output_ids = sequences
        session.output_mask = None if mask is None else _grown(mask, sequences)
        shown = sequences[:, num_omitted:]
        if isinstance(answer, Tensor):
            return shown
        answer.sequences = shown
        return answer

    def _resolved_config(self, call: dict[str, Any]) -> GenerationConfig:
        upstream: Any = super()
        options = {name: value for name, value in call.items() if name not in _SIGNATURE.parameters}
        config: GenerationConfig = upstream._prepare_generation_config(call.get("generation_config"), **options)[0]
        return config

    def new_cache(self, expected_length: int) -> RemotePastKeyValues:
        """A cache with a new session, which lives for one call, or as long as the cache is referenced."""
        session = InferenceSession(self.blocks.remote, expected_length=expected_length)
        new_sessions = _new_sessions.get()
        if new_sessions is not None:
            new_sessions.append(session)
        return self._cache_of(session)

    def own_cache(self, cache: Any) -> RemotePastKeyValues | None:
        """A caller's cache, if it gave one that this model can use.

        Raises:
            ValueError: the cache is of another kind, or of another model.
        """
        if cache is None:
            return None
        if is_empty(cache):
            session = InferenceSession(self.blocks.remote)
            return RemotePastKeyValues.adopt(cache, session, is_croppable=not self._has_recurrent_state)
        if not isinstance(cache, RemotePastKeyValues):
            raise ValueError(FOREIGN_CACHE)
        self._check_blocks(cache.session)
        return cache

    def _check_blocks(self, session: InferenceSession) -> None:
        remote = self.blocks.remote
        if session.blocks.connection is not remote.connection or session.blocks.span != remote.span:
            raise ValueError("The session runs through other blocks than this model's.")

    @property
    def _has_recurrent_state(self) -> bool:
        model: Any = self
        return bool(recurrent_layers(model.config))

    def _cache_of(self, session: InferenceSession) -> RemotePastKeyValues:
        return RemotePastKeyValues(session, is_croppable=not self._has_recurrent_state)

    # --- methods that transformers calls --------------------------------------------------------------------------

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Expands the inputs to a row for each beam, and removes from the cache what is not part of that final text."""
        upstream: Any = super()
        input_ids, model_kwargs = upstream._expand_inputs_for_generation(*args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if input_ids is not None and input_ids.shape[1]:
            mask = model_kwargs.get("attention_mask")
            mask = torch.ones_like(input_ids).bool() if mask is None else mask.bool()
            if mask.shape == input_ids.shape:
                require_token_ids("input_ids", input_ids[mask], num_tokens_of(self))
            if isinstance(cache, RemotePastKeyValues):
                cache.session.align(input_ids, mask)
        return input_ids, model_kwargs

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        if generation_mode is GenerationMode.ASSISTED_GENERATION and self._has_recurrent_state:
            raise UnsupportedFamily(NO_CROP)
        cache = model_kwargs.get("past_key_values")
        if cache is None and generation_config.use_cache is not False:
            cache = self.new_cache(max_cache_length + 1)
            model_kwargs["past_key_values"] = cache
            self._end_at_limit(generation_config, cache.session, model_kwargs, max_cache_length)
        elif isinstance(cache, RemotePastKeyValues):
            self._end_at_limit(generation_config, cache.session, model_kwargs, max_cache_length)
            # Assisted decoding begins with the whole text even if the cache holds a part of it.
            cache.is_primed = generation_mode is GenerationMode.ASSISTED_GENERATION and cache.get_seq_length() > 0

    def _end_at_limit(
        self,
        generation_config: GenerationConfig,
        session: InferenceSession,
        model_kwargs: dict[str, Any],
        max_cache_length: int,
    ) -> None:
        """Makes a text that may outgrow its session or the model's context end there. It may end long before.

        Raises:
            ValueError: there is no room for the given tokens.
        """
        limit = (session.max_length or self.blocks.remote.context_length) - session.num_prefix
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.shape[1] > limit:
            raise ValueError(
                f"Maximum length exceeded: the text has {mask.shape[1]} tokens, and the session has room for {limit}."
            )
        # The last token of a text is never processed, so it needs no room.
        generation_config.max_length = (generation_config.max_length or 0) - max(0, max_cache_length - limit)

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        config: GenerationConfig = kwargs["generation_config"]
        return DraftsWithinLength(upstream._get_candidate_generator(*args, **kwargs), config.max_length or 0)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        inputs_embeds: Any = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> Any:
        upstream: Any = super()
        if isinstance(past_key_values, RemotePastKeyValues) and past_key_values.is_primed:
            past_key_values.is_primed = False
            next_sequence_length = input_ids.shape[1] - past_key_values.get_seq_length()
        return upstream.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )


def _continued(call: dict[str, Any], text: Continuation) -> dict[str, Any]:
    call = call | {"inputs": text.token_ids}
    if text.mask is not None:
        call["attention_mask"] = text.mask
    if call.get("streamer") is not None:
        call["streamer"] = NewTextStreamer(call["streamer"], text.num_omitted)
    return call


def _grown(mask: Tensor, sequences: Tensor) -> Tensor:
    """The mask, int64 `[N, L]`, of `sequences`: that of their prompts, `mask`, int64 `[B, T]`, then ones."""
    num_rows, num_columns = sequences.shape
    rows = mask.repeat_interleave(num_rows // mask.shape[0], dim=0).to(sequences.device)
    return torch.cat([rows, rows.new_ones(num_rows, num_columns - rows.shape[1])], dim=1)


class DraftsWithinLength(CandidateGenerator):
    """Cuts drafts at the text's maximum length, so that no position beyond it is ever sent or reserved.

    Args:
        generator: the generator that drafts.
        max_length: the most tokens of the text, the token after a draft included.
    """

    def __init__(self, generator: CandidateGenerator, max_length: int) -> None:
        self._generator: Any = generator
        self._max_length = max_length
        self.requires_model_outputs = generator.requires_model_outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def get_candidates(self, input_ids: Any, **options: Any) -> Any:
        candidates, logits = self._generator.get_candidates(input_ids, **options)
        num_kept = max(self._max_length - 1, input_ids.shape[1])
        if logits is not None:
            logits = logits[:, : num_kept - input_ids.shape[1]]
        return candidates[:, :num_kept], logits

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        self._generator.update_candidate_strategy(input_ids, scores, num_matches)


class NewTextStreamer(BaseStreamer):
    """Leaves out the part of the prompt that the caller did not give in this call.

    Args:
        num_omitted: the number of leading tokens to leave out of each row.
    """

    def __init__(self, streamer: BaseStreamer, num_omitted: int) -> None:
        self._streamer: Any = streamer
        self._num_omitted = num_omitted
        self._is_prompt = True

    def put(self, value: Any) -> None:
        if self._is_prompt:
            value, self._is_prompt = value[:, self._num_omitted :], False
        self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()
