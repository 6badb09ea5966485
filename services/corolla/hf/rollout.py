"""Generates rollouts, whole batches of answers for reinforcement learning, with remote or local models.

The functions have the names and arguments of ColossalAI's `coati.models.generation`, so that training loops for that
module run unchanged. Greedy decoding, beams and several stop sequences, which it lacks, work here.

All tensors are on the device of the prompts; a local model must be there, too.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

PrepareInputs = Callable[..., dict[str, Any]]
"""Takes `(input_ids, pad_token_id, **model_kwargs)` and returns the arguments of the model's call."""

UpdateModelKwargs = Callable[..., dict[str, Any]]
"""Takes `(outputs, new_mask, **model_kwargs)`, with `new_mask` `[B, 1]`; returns the next step's `model_kwargs`."""


def generate(
    model: Any,
    input_ids: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    num_beams: int = 1,
    do_sample: bool = True,
    early_stopping: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float | None = None,
    prepare_inputs_fn: PrepareInputs | None = None,
    update_model_kwargs_fn: UpdateModelKwargs | None = None,
    *,
    max_new_tokens: int | None = None,
    stop_token_ids: Sequence[Sequence[int]] | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Answers a batch of prompts.

    A row ends with an end token of the model's generation config (with the tokenizer's, if that names none) or with a
    stop sequence, which are part of the result; padding follows. Tokens are sampled from torch's own random stream, as
    in `generate` of transformers.

    Args:
        model: a causal language model, distributed or local. The caller switches it to evaluation or training.
        input_ids: int64 `[B, T]`, padded on the left.
        tokenizer: defines the token for padding, and the end of a sequence if the model does not.
        max_length: the most tokens of prompt and answer together. A prompt of that length is returned unchanged.
        num_beams: more than one is a beam search by the model's own `generate`.
        do_sample: False takes the most probable token.
        early_stopping: whether to return when all rows on every process of a group have ended, before the full length.
        top_k: keeps this many most probable tokens; None or 0 is off.
        top_p: keeps the smallest set of tokens with this total probability; None or 1 is off.
        temperature: divides the logits; None or 1 is off.
        prepare_inputs_fn: replaces this module's function of that name, which gives the model each token only once.
        update_model_kwargs_fn: replaces this module's function of that name.
        max_new_tokens: the most tokens of the answer.
        stop_token_ids: sequences of tokens; a row ends when its last tokens are one of them.
        model_kwargs: arguments for the model's forward. Without an `attention_mask`, a row's first tokens are padding
            as long as they are the token for padding. If that token also begins or ends texts, one row of the batch
            counts as free of padding.

    Returns:
        int64 `[B, L]`, prompts and answers.

    Raises:
        ValueError: padding is on the right or has no token, a stop sequence is not a sequence of at least one token,
            or beams do not support an argument.
        CorollaError: the chain of a distributed model failed.
    """
    if num_beams > 1:
        hooks = [prepare_inputs_fn, update_model_kwargs_fn, stop_token_ids]
        return _beam_search(
            model, input_ids, tokenizer, max_length, max_new_tokens, hooks, model_kwargs, num_beams=num_beams,
            do_sample=do_sample, early_stopping=early_stopping, top_k=top_k, top_p=top_p, temperature=temperature,
        )  # fmt: skip
    growing = _sequences(
        model, input_ids, tokenizer, max_length, do_sample, early_stopping, max_new_tokens, stop_token_ids,
        prepare_logits_processor(top_k, top_p, temperature), prepare_inputs_fn, update_model_kwargs_fn, model_kwargs,
    )  # fmt: skip
    last = deque(growing, maxlen=1)
    return last[0] if last else input_ids


def generate_streaming(
    model: Any,
    input_ids: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    num_beams: int = 1,
    do_sample: bool = True,
    early_stopping: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float | None = None,
    prepare_inputs_fn: PrepareInputs | None = None,
    update_model_kwargs_fn: UpdateModelKwargs | None = None,
    *,
    max_new_tokens: int | None = None,
    stop_token_ids: Sequence[Sequence[int]] | None = None,
    stream_interval: int = 2,
    **model_kwargs: Any,
) -> Iterator[Tensor]:
    """Does the same as `generate`, and yields the answers as they grow.

    Args:
        input_ids: int64 `[B, T]`, padded on the left; `generate` describes the other arguments.
        stream_interval: the number of tokens from one result to the next.

    Yields:
        int64 `[B, L]`, prompts and answers so far; the last result is what `generate` returns.

    Raises:
        ValueError: as in `generate`; or `num_beams` is above 1, since beams change earlier tokens; or `stream_interval`
            is below 1. The request for the first result raises it.
        CorollaError: the chain of a distributed model failed.
    """
    if num_beams > 1:
        raise ValueError("`num_beams` cannot be streamed: a later token may change earlier ones.")
    if stream_interval < 1:
        raise ValueError("`stream_interval` must be at least 1.")
    sequences, num_yielded = input_ids, input_ids.shape[1]
    for sequences in _sequences(
        model, input_ids, tokenizer, max_length, do_sample, early_stopping, max_new_tokens, stop_token_ids,
        prepare_logits_processor(top_k, top_p, temperature), prepare_inputs_fn, update_model_kwargs_fn, model_kwargs,
    ):  # fmt: skip
        if sequences.shape[1] - num_yielded >= stream_interval:
            num_yielded = sequences.shape[1]
            yield sequences
    if sequences.shape[1] > num_yielded or sequences is input_ids:
        yield sequences


def prepare_logits_processor(
    top_k: int | None = None, top_p: float | None = None, temperature: float | None = None
) -> LogitsProcessorList:
    """The processors for temperature, top-k and top-p, in the order of transformers, without those that do nothing."""
    processors = LogitsProcessorList()
    if temperature is not None and temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(temperature)))
    if top_k is not None and top_k != 0:
        processors.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    return processors


def is_sequence_finished(unfinished_sequences: Tensor) -> bool:
    """All rows of all processes have ended. All processes of a torch.distributed group call this together.

    Args:
        unfinished_sequences: int64 `[B]`, 1 for rows of this process that continue, else 0.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        unfinished_sequences = unfinished_sequences.sum()
        torch.distributed.all_reduce(unfinished_sequences)
    return not bool(unfinished_sequences.any())


def prepare_inputs_fn(input_ids: Tensor, pad_token_id: int | None, **model_kwargs: Any) -> dict[str, Any]:
    """The arguments of the model's call, with the columns of `input_ids`, int64 `[B, L]`, that its cache lacks."""
    cache = model_kwargs.get("past_key_values")
    num_held = 0 if cache is None else cache.get_seq_length()
    return {**model_kwargs, "input_ids": input_ids[:, num_held:], "use_cache": True}


def update_model_kwargs_fn(outputs: Any, new_mask: Tensor, **model_kwargs: Any) -> dict[str, Any]:
    """The next step's `model_kwargs`, with the new cache. Masks get `new_mask`, int64 `[B, 1]`, as their last column.

    Token types repeat their last column.
    """
    updated = {**model_kwargs, "past_key_values": outputs.get("past_key_values")}
    if (token_type_ids := model_kwargs.get("token_type_ids")) is not None:
        updated["token_type_ids"] = torch.cat([token_type_ids, token_type_ids[:, -1:]], dim=-1)
    if (mask := model_kwargs.get("attention_mask")) is not None:
        updated["attention_mask"] = torch.cat([mask, new_mask.to(mask.dtype)], dim=-1)
    return updated


def _sequences(
    model: Any,
    input_ids: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    do_sample: bool,
    early_stopping: bool,
    max_new_tokens: int | None,
    stop_token_ids: Sequence[Sequence[int]] | None,
    processors: LogitsProcessorList,
    prepare: PrepareInputs | None,
    update: UpdateModelKwargs | None,
    model_kwargs: dict[str, Any],
) -> Iterator[Tensor]:
    """Yields prompts and answers so far, `[B, L]`, after each token."""
    end_token_ids, pad_token_id = _end_token_ids(model, tokenizer), tokenizer.pad_token_id
    _check(tokenizer, end_token_ids, stop_token_ids)
    ends = torch.tensor(end_token_ids, device=input_ids.device)
    stops = [torch.tensor(list(each), device=input_ids.device) for each in stop_token_ids or ()]
    takes_positions = prepare is None and "position_ids" in inspect.signature(model.forward).parameters
    if "attention_mask" not in model_kwargs:
        model_kwargs = {**model_kwargs, "attention_mask": _mask_of(input_ids, tokenizer, end_token_ids)}
    unfinished = input_ids.new_ones(input_ids.shape[0])
    for _ in range(_num_new_tokens(input_ids, max_length, max_new_tokens)):
        # This is not inference mode, because a training loop uses these tensors afterwards.
        with torch.no_grad():
            inputs = (prepare or prepare_inputs_fn)(input_ids, pad_token_id, **model_kwargs)
            if takes_positions and "position_ids" not in model_kwargs:
                positions = (model_kwargs["attention_mask"].long().cumsum(dim=-1) - 1).clamp(min=0)
                inputs["position_ids"] = positions[:, -inputs["input_ids"].shape[1] :]
            outputs = model(**inputs)
            # Padding is on the left, so the last column is the newest token of every row.
            scores: Any = processors(input_ids, outputs["logits"][:, -1, :].float())  # type: ignore[arg-type]
            if do_sample:
                newest = torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
            else:
                newest = scores.argmax(dim=-1)
            newest = newest.to(input_ids.device)
            if pad_token_id is not None:
                newest = torch.where(unfinished.bool(), newest, pad_token_id)
            input_ids = torch.cat([input_ids, newest[:, None]], dim=-1)
            model_kwargs = (update or update_model_kwargs_fn)(outputs, unfinished[:, None], **model_kwargs)
            if end_token_ids:
                unfinished = unfinished * torch.isin(newest, ends, invert=True)
            for stop in stops:
                unfinished = unfinished * (input_ids[:, -len(stop) :] != stop).any(dim=1)
        yield input_ids
        if early_stopping and is_sequence_finished(unfinished):
            return


def _beam_search(
    model: Any,
    input_ids: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    max_new_tokens: int | None,
    hooks: Sequence[object],
    model_kwargs: dict[str, Any],
    **options: Any,
) -> Tensor:
    end_token_ids = _end_token_ids(model, tokenizer)
    _check(tokenizer, end_token_ids, None)
    if any(hook is not None for hook in hooks):
        raise ValueError(
            "`prepare_inputs_fn`, `update_model_kwargs_fn` and `stop_token_ids` work with `num_beams=1` only; beams "
            "are searched by the model's own `generate`."
        )
    num_new_tokens = _num_new_tokens(input_ids, max_length, max_new_tokens)
    if num_new_tokens == 0:
        return input_ids
    if "attention_mask" not in model_kwargs:
        model_kwargs = {
            **model_kwargs,
            "attention_mask": _mask_of(input_ids, tokenizer, end_token_ids),
        }
    if not options["do_sample"]:
        options = {name: value for name, value in options.items() if name not in ("top_k", "top_p", "temperature")}
    sequences: Tensor = model.generate(
        input_ids, max_new_tokens=num_new_tokens, eos_token_id=end_token_ids or None,
        pad_token_id=tokenizer.pad_token_id, **options, **model_kwargs,
    )  # fmt: skip
    return sequences


def _end_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a sequence, as the model's own `generate` takes them, or else the tokenizer's."""
    config = getattr(model, "generation_config", None)
    ids = None if config is None else config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    return [ids] if isinstance(ids, int) else list(ids or ())


def _check(
    tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int], stop_token_ids: Sequence[Sequence[int]] | None
) -> None:
    if tokenizer.padding_side != "left":
        raise ValueError("Rollouts need padding on the left: set `tokenizer.padding_side = 'left'`.")
    if tokenizer.pad_token_id is None and (end_token_ids or stop_token_ids):
        raise ValueError("Rows that end early are padded: set `tokenizer.pad_token`.")
    for index, stop in enumerate(stop_token_ids or ()):
        if isinstance(stop, int) or len(stop) == 0:
            raise ValueError(f"`stop_token_ids[{index}]` must be a sequence of at least one token.")


def _mask_of(input_ids: Tensor, tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int]) -> Tensor:
    """The mask of the tokens that are not padding, int64 `[B, T]`: padding stands before a row's text.

    Raises:
        ValueError: a row ends in a token that can only be padding.
    """
    pad_token_id = tokenizer.pad_token_id
    if pad_token_id is None:
        return torch.ones_like(input_ids)
    is_pad = input_ids.eq(pad_token_id).long()
    num_pads = is_pad.cumprod(dim=1).sum(dim=1)
    may_end = pad_token_id in (*end_token_ids, tokenizer.eos_token_id)
    if not may_end and bool(is_pad[:, -1].any()):
        raise ValueError(
            "A row of `input_ids` ends in padding; pad on the left, or give an `attention_mask` if that token is text."
        )
    if may_end or pad_token_id == tokenizer.bos_token_id:
        # A text may begin with this token, too. A tokenizer pads to the longest row, which has none before its text.
        num_pads = num_pads - num_pads.min()
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    return (columns >= num_pads[:, None]).long()


def _num_new_tokens(input_ids: Tensor, max_length: int, max_new_tokens: int | None) -> int:
    room = max(0, max_length - input_ids.shape[1])
    return room if max_new_tokens is None else min(max(0, max_new_tokens), room)
