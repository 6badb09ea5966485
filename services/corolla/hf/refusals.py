"""Refuses the arguments of `generate` that remote blocks cannot serve, each with a sentence that says why."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

from torch import Tensor
from transformers import GenerationConfig

from corolla.hf.cache import FOREIGN_CACHE, RemotePastKeyValues, is_empty

# Options of the generation config that remote blocks cannot serve; the values None and False are accepted.
_OPTIONS: Final[Mapping[str, str]] = {
    "cache_implementation": "keys and values lie on the block servers, in one kind of cache",
    "cache_config": "keys and values lie on the block servers, in one kind of cache",
    "output_attentions": "attention weights stay on the block servers",
    "output_hidden_states": "only the last block's output comes back; step an inference session to see it",
    "assistant_early_exit": "the first blocks alone cannot be asked for a draft; give an `assistant_model`",
    "use_mtp": "remote blocks have no further prediction heads; give an `assistant_model`",
    "speculation_type": "such drafts need the hidden states of single blocks; give an `assistant_model`",
    "low_memory": "all beams go through one step; use fewer beams",
    "constraints": "transformers runs it with code from the hub, and remote code is never run",
    "force_words_ids": "transformers runs it with code from the hub, and remote code is never run",
    "dola_layers": "it needs the output of single blocks",
    "continuous_batching_config": "block servers form their batches themselves",
}

# What an option may say that remote blocks do anyway: a cache grows with its text.
_USUAL: Final = (("cache_implementation", "dynamic"), ("cache_implementation", "dynamic_full"))

# Arguments of `generate` itself that remote blocks cannot serve; None and False are accepted.
_ARGUMENTS: Final[Mapping[str, str]] = {
    "synced_gpus": "each process steps through its own chain",
    "trust_remote_code": "remote code is never run",
    "encoder_outputs": "only decoder-only models are served",
    "decoder_input_ids": "only decoder-only models are served",
}


_ADAPTERS: Final = "adapters are registered with the router; choose one by `set_adapter`"
_REMOTE_WEIGHTS: Final = "most weights are on the block servers; copy the checkpoint"
_OWN_BATCHES: Final = "block servers form their batches themselves; call `generate`"

# Methods of transformers' models that would change or save only the few modules in this process.
METHODS: Final[Mapping[str, str]] = {
    "active_adapters": _ADAPTERS,
    "add_adapter": _ADAPTERS,
    "continuous_batching_context_manager": _OWN_BATCHES,
    "delete_adapter": _ADAPTERS,
    "dequantize": "the block servers have the blocks; see `COROLLA_QUANTIZATION`",
    "disable_adapters": _ADAPTERS,
    "enable_adapters": _ADAPTERS,
    "generate_batch": _OWN_BATCHES,
    "get_adapter_state_dict": _ADAPTERS,
    "init_continuous_batching": _OWN_BATCHES,
    "load_adapter": _ADAPTERS,
    "push_to_hub": _REMOTE_WEIGHTS,
    "resize_position_embeddings": "block servers keep to the checkpoint's positions",
    "save_pretrained": _REMOTE_WEIGHTS,
    "set_decoder": "the blocks are on the block servers",
}


class RefusedMethods:
    """Methods of transformers' models that cannot work over remote blocks: each raises ValueError with the reason."""


def _refused(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
        raise ValueError(f"`{name}` is not supported over remote blocks: {reason}.")

    return refuse


for _name, _reason in METHODS.items():
    setattr(RefusedMethods, _name, _refused(_name, _reason))


UNSUPPORTED_OPTIONS: Final = frozenset({*_OPTIONS, "num_beam_groups", "penalty_alpha", "token_healing"})
"""The options of a generation config that a caller may not ask for, or not in every call; files may have them."""


def refuse_unsupported(arguments: Mapping[str, Any], config: GenerationConfig) -> None:
    """Checks a call of `generate` before anything is computed.

    Args:
        arguments: the caller's arguments by name.
        config: the generation config with the call's own options applied.

    Raises:
        ValueError: an argument is not supported; the message has its name and the reason.
    """
    for name, reason in _ARGUMENTS.items():
        if _is_asked_for(arguments.get(name)):
            raise ValueError(f"`{name}` is not supported over remote blocks: {reason}.")
    for name, reason in _OPTIONS.items():
        value = getattr(config, name, None)
        if _is_asked_for(value) and (name, value) not in _USUAL:
            raise ValueError(f"`{name}` is not supported over remote blocks: {reason}.")
    for applies, sentence in _further_refusals(arguments, config):
        if applies:
            raise ValueError(sentence)


def refuse_alone(arguments: Mapping[str, Any]) -> None:
    """Checks a call without a session: if it has no cache either, its mask must have the shape of its tokens.

    Raises:
        ValueError: the mask has another shape.
    """
    mask = arguments.get("attention_mask")
    given = [arguments[name] for name in ("inputs", "input_ids", "inputs_embeds") if arguments.get(name) is not None]
    if arguments.get("past_key_values") is None and mask is not None and len(given) == 1:
        shape = list(given[0].shape[:2])
        if list(mask.shape) != shape:
            raise ValueError(f"`attention_mask` must have the shape {shape} of the tokens, not {list(mask.shape)}.")


def refuse_in_session(arguments: Mapping[str, Any], config: GenerationConfig, *, has_text: bool) -> None:
    """Checks a call in a session that stays open after the call.

    Raises:
        ValueError: an argument contradicts the session; the message has its name and the reason.
    """
    if arguments.get("past_key_values") is not None:
        raise ValueError("`past_key_values` and a session both say where the call goes on; give one of them.")
    if config.use_cache is False:
        raise ValueError("`use_cache=False` contradicts a session, which is a cache.")
    if config.token_healing:
        raise ValueError("`token_healing` changes tokens that the session holds; heal the prompt before the call.")
    if arguments.get("inputs_embeds") is not None:
        if has_text:
            raise ValueError("`inputs_embeds` can only begin a session; this one has text already.")
        if arguments.get("inputs") is not None or arguments.get("input_ids") is not None:
            raise ValueError("`inputs_embeds` and `input_ids` cannot both begin a session; give one of them.")


def _is_asked_for(value: object) -> bool:
    return value is not None and value is not False


def _further_refusals(arguments: Mapping[str, Any], config: GenerationConfig) -> Iterator[tuple[Any, str]]:
    """Yields further refusals: whether each applies, and its sentence."""
    mask, cache = arguments.get("attention_mask"), arguments.get("past_key_values")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        yield True, "`attention_mask` must have the shape [batch, tokens]; which token sees which is not free."
    elif mask is not None and mask.shape[1] > 0:
        is_padded = bool((mask[:, -1] == 0).any())
        yield is_padded, "`attention_mask` ends in padding; pad on the left (`tokenizer.padding_side = 'left'`)."
    is_foreign = cache is not None and not isinstance(cache, RemotePastKeyValues) and not is_empty(cache)
    yield is_foreign, FOREIGN_CACHE
    is_named = isinstance(arguments.get("custom_generate"), str)
    yield is_named, "`custom_generate` must be a function; code from a repository is never run."
    is_contrastive = config.penalty_alpha and (config.top_k or 0) > 1 and not config.do_sample
    code = "runs with code from the hub, and remote code is never run."
    yield is_contrastive, f"`penalty_alpha` (contrastive search) {code}"
    yield (config.num_beam_groups or 1) > 1, f"`num_beam_groups` {code}"
